"""A pipe in one process: training over several steps, losses wherever they are, evaluation, and refusals."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.lowering import compile_with, in_double
from torch import Tensor, nn

from wholestep import PipelineError, zoo
from wholestep.remat import StepBudget
from wholestep.runtime.pipeline.draws import seed_of
from wholestep.runtime.pipeline.pipe import Pipe, PipeOptions

NUM_MICRO_BATCHES = 4
TIGHT: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-11}


class Skipping(nn.Module):
    """Skips over any distance, an early output, a frozen layer, batch norm, a weight used at both ends."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.first = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.middle = nn.Linear(8, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.last = nn.Linear(8, 8)
        self.dropout = dropout

    def forward(self, tokens: Tensor, weight: float = 1.0) -> dict[str, Tensor]:
        embedded = self.embedding(tokens).mean(1)
        first = F.dropout(torch.tanh(self.first(embedded)), self.dropout, self.training)
        middle = torch.tanh(self.middle(self.norm(first))) + embedded
        last = self.last(self.frozen(middle) + first * embedded)
        return {"early": first.sum(1), "logits": weight * F.linear(last + embedded, self.embedding.weight)}


def loss_fn(output: dict[str, Tensor], target: Tensor) -> Tensor:
    return F.cross_entropy(output["logits"], target) + 0.1 * output["early"].square().mean()


def batch_of(number: int, size: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(16, (size, 5), generator=generator)
    return tokens, torch.randint(16, (size,), generator=generator)


def pipe_of(model: nn.Module, **options: Any) -> Pipe:
    chosen: dict[str, Any] = {"num_micro_batches": NUM_MICRO_BATCHES, "num_stages": 3, "loss_fn": loss_fn} | options
    return Pipe(model, PipeOptions(**chosen))


def plain_step(model: nn.Module, tokens: Tensor, target: Tensor, num_micro_batches: int = NUM_MICRO_BATCHES) -> Tensor:
    """What a pipe does, in eager: micro-batch by micro-batch, each with the weight of its rows."""
    total = torch.zeros((), dtype=torch.float64)
    parts = (each.tensor_split(num_micro_batches) for each in (tokens, target))
    for part, wanted in zip(*parts, strict=True):
        share = len(part) / len(tokens)
        loss = loss_fn(model(part), wanted)
        (loss * share).backward()
        total += loss.detach() * share
    return total


def state_of(model: nn.Module) -> dict[str, Tensor]:
    gradients = {f"{name}.grad": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: value.detach().clone() for name, value in (model.state_dict() | gradients).items()}


@pytest.mark.parametrize(
    ("schedule", "num_stages", "stages_per_rank"),
    [("gpipe", 1, 1), ("1f1b", 3, 1), ("zb-h2", 4, 1), ("interleaved-1f1b", 4, 2), ("v-half", 6, 2)],
)
def test_five_steps_are_eagers(schedule: str, num_stages: int, stages_per_rank: int) -> None:
    torch.manual_seed(0)
    model = Skipping().double()
    twin = copy.deepcopy(model)
    pipe = pipe_of(model, schedule=schedule, num_stages=num_stages, stages_per_rank=stages_per_rank)
    ours, eager = (torch.optim.AdamW(each.parameters(), lr=0.01) for each in (model, twin))
    for number in range(5):
        tokens, target = batch_of(number)
        for optimizer in (ours, eager):
            optimizer.zero_grad()
        result = pipe.step(tokens, target=target)
        expected = plain_step(twin, tokens, target)
        assert result.loss is not None
        torch.testing.assert_close(result.loss, expected, **TIGHT)
        found, wanted = state_of(model), state_of(twin)
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, **TIGHT, msg=lambda text, n=name: f"{n}: {text}")
        ours.step()
        eager.step()
    assert len(pipe.schedule.actions) == num_stages // stages_per_rank


@pytest.mark.parametrize(
    "options", [{}, {"schedule": "zbv", "num_stages": 4, "stages_per_rank": 2}], ids=["1f1b", "zbv"]
)
def test_uneven_micro_batches_weigh_what_they_have(options: dict[str, Any]) -> None:
    """Batches of many sizes, even and uneven: each micro-batch counts with its rows, in training and evaluation."""
    torch.manual_seed(0)
    model = Skipping().double()
    twin = copy.deepcopy(model)
    pipe = pipe_of(model, returns_output=True, **options)
    for number, size in enumerate((10, 8, 11, 10)):
        tokens, target = batch_of(number, size)
        result = pipe.step(tokens, target=target)
        torch.testing.assert_close(result.loss, plain_step(twin, tokens, target), **TIGHT, check_dtype=False)
        assert result.output["logits"].shape == (size, 16)
        found, wanted = state_of(model), state_of(twin)
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, **TIGHT, msg=lambda text, n=name: f"{n}: {text}")
    model.eval()
    tokens, target = batch_of(5, 9)
    result = pipe.evaluate(tokens, target=target)
    assert result.output is not None
    torch.testing.assert_close(result.loss, loss_fn(model(tokens), target), **TIGHT)
    torch.testing.assert_close(result.output["logits"], model(tokens)["logits"], **TIGHT)


def test_uneven_micro_batches_keep_the_same_values() -> None:
    """What runs again is decided once, for the larger ones."""
    case = in_double(zoo.get("gpt"))
    gradients: list[dict[str, Tensor]] = []
    for budget in (None, StepBudget.of(0.0)):
        torch.manual_seed(0)
        model = case.build()
        options = PipeOptions(num_micro_batches=4, num_stages=2, schedule="zb-h1", memory_budget=budget)
        pipe = Pipe(Wrapped(model, case.loss), options)
        pipe.step(case.make_batch(9, 0))
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, **TIGHT)


class Counting(nn.Module):
    """Has other ops for an even number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.last = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x)
        return self.last(hidden if len(x) % 2 else torch.tanh(hidden)).square().mean()


def test_sizes_with_other_ops_are_refused() -> None:
    pipe = Pipe(Counting(), PipeOptions(num_micro_batches=2, num_stages=2))
    with pytest.raises(PipelineError, match="micro-batches of 4 and of 3 rows do not run through the same ops"):
        pipe.step(torch.randn(7, 4))
    assert pipe.step(torch.randn(8, 4)).loss is not None


def test_masks_depend_on_neither_cut_nor_schedule() -> None:
    gradients: list[list[Tensor]] = []
    for schedule, num_stages, stages_per_rank in (("gpipe", 1, 1), ("1f1b", 3, 1), ("zbv", 4, 2), ("zbv", 4, 2)):
        torch.manual_seed(len(gradients))  # the stream of the process plays no part
        model = Skipping(dropout=0.5).double()
        model.load_state_dict({name: torch.full_like(value, 0.1) for name, value in model.state_dict().items()})
        pipe_of(model, schedule=schedule, num_stages=num_stages, stages_per_rank=stages_per_rank).step(
            batch_of(0)[0], target=batch_of(0)[1]
        )
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    for other in gradients[1:]:
        torch.testing.assert_close(other, gradients[0], **TIGHT)


def test_steps_and_micro_batches_have_other_masks() -> None:
    seeds = {seed_of(seed_of(0, step, batch), number) for step in range(9) for batch in range(9) for number in range(9)}
    assert len(seeds) == 9**3
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_gradients_add_up_like_those_of_backward() -> None:
    torch.manual_seed(0)
    model = Skipping().double()
    twin = copy.deepcopy(model)
    pipe = pipe_of(model)
    for number in range(2):
        tokens, target = batch_of(number)
        pipe.step(tokens, target=target)
        plain_step(twin, tokens, target)
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        if other.grad is None:
            assert one.grad is None
        else:
            torch.testing.assert_close(one.grad, other.grad, **TIGHT)


def test_evaluation_and_a_plain_call_are_those_of_the_model() -> None:
    torch.manual_seed(0)
    model = Skipping(dropout=0.5)
    pipe = pipe_of(model, returns_output=True)
    tokens, target = batch_of(0)
    pipe.step(tokens, target=target)
    model.eval()
    before = state_of(model)
    with torch.no_grad():
        expected = model(tokens)
    result = pipe.evaluate(tokens, target=target)
    assert result.loss is not None
    torch.testing.assert_close(result.loss, loss_fn(expected, target))
    for found in (result.output, pipe(tokens)):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value)
    after = state_of(model)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_constants_defaults_and_frozen_parameters() -> None:
    model = Skipping()
    pipe = pipe_of(model)
    tokens, target = batch_of(0)
    halves = [pipe.step(tokens, target=target, weight=weight).loss for weight in (1.0, 0.5)]
    assert halves[0] != halves[1]
    assert "frozen.weight" in dict(pipe.named_parameters())
    assert model.frozen.weight.grad is None


class Returning(nn.Module):
    """Returns what it is told to."""

    def __init__(self, pack: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.pack = pack

    def forward(self, x: Tensor) -> Any:
        return self.pack(self.layer(x).square().mean())


@pytest.mark.parametrize(
    ("pack", "where"),
    [
        (lambda loss: loss, None),
        (lambda loss: {"loss": loss, "rest": loss + 1}, None),
        (lambda loss: {"cost": loss, "loss": loss + 1}, "cost"),
        (lambda loss: (loss + 1, loss), 1),
    ],
)
def test_the_loss_is_found_in_the_output(pack: Callable[[Tensor], Any], where: str | int | None) -> None:
    torch.manual_seed(0)
    model = Returning(pack)
    x = torch.randn(8, 4)
    result = Pipe(model, PipeOptions(num_micro_batches=2, num_stages=2, loss=where)).step(x)
    assert result.loss is not None
    torch.testing.assert_close(result.loss, model.layer(x).square().mean())


@pytest.mark.parametrize(
    ("pack", "options", "message"),
    [
        (lambda loss: {"cost": loss}, {}, "has no 'loss' to be the loss; it has keys cost"),
        (lambda loss: (loss,), {"loss": 3}, "has no 3 to be the loss; it has 1 entries"),
        (lambda loss: loss.expand(3), {}, "the model returned a tensor of shape"),
        (lambda loss: loss, {"loss_fn": lambda output, target: "?"}, "loss_fn returned a str"),
    ],
)
def test_an_output_without_a_loss_is_refused(pack: Any, options: dict[str, Any], message: str) -> None:
    pipe = Pipe(Returning(pack), PipeOptions(num_micro_batches=2, num_stages=2, **options))
    with pytest.raises(ValueError, match=message):
        pipe.step(torch.randn(8, 4))


def test_batches_that_cannot_be_cut_are_refused() -> None:
    pipe = pipe_of(Skipping())
    tokens, target = batch_of(0, size=3)
    with pytest.raises(PipelineError, match="a batch of 3 rows does not make 4 micro-batches"):
        pipe.step(tokens, target=target)
    with pytest.raises(PipelineError, match="no argument of this step is a tensor"):
        pipe.step(3)
    with pytest.raises(PipelineError, match="has not run yet"):
        _ = pipe.schedule


def test_another_shape_or_mode_is_captured_anew() -> None:
    model = Skipping(dropout=0.5)
    twin = copy.deepcopy(model)
    pipe = pipe_of(model)
    for size in (8, 16, 8):
        pipe.step(batch_of(0, size)[0], target=batch_of(0, size)[1])
    for each in (model, twin):
        each.eval()
        each.zero_grad()
    twin.load_state_dict(model.state_dict())
    tokens, target = batch_of(1)
    pipe.step(tokens, target=target)
    plain_step(twin, tokens, target)
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        if other.grad is not None:
            torch.testing.assert_close(one.grad, other.grad)


def test_the_model_is_left_as_it_is() -> None:
    case = zoo.get("gpt")
    model = case.build()
    before = {name: id(module) for name, module in model.named_modules()}
    names = list(model.state_dict())
    tokens = case.make_batch(8, 0)
    options = PipeOptions(
        num_micro_batches=4,
        num_stages=2,
        loss_fn=lambda out, target: F.cross_entropy(out.flatten(0, 1), target.flatten()),
    )
    Pipe(model, options).step(tokens["tokens"], target=tokens["targets"])
    assert {name: id(module) for name, module in model.named_modules()} == before
    assert list(model.state_dict()) == names
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "options", [{"lower": "inductor"}, {"memory_budget": StepBudget.of(0.0)}], ids=["lowered", "budget"]
)
@pytest.mark.parametrize("name", ["gpt", "resnet"])
def test_stages_may_be_lowered_and_compute_again(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With dropout on: what runs again in the backward draws what it drew in the forward."""
    compile_with(monkeypatch)
    case = in_double(zoo.get(name))
    gradients: list[dict[str, Tensor]] = []
    for chosen in ({}, options):
        torch.manual_seed(0)
        model = case.build()
        batch = case.make_batch(8, 0)
        pipe = Pipe(
            Wrapped(model, case.loss),
            PipeOptions(num_micro_batches=2, num_stages=3, schedule="zb-h1", loss=None, **chosen),
        )
        result = pipe.step(batch)
        assert result.loss is not None
        gradients.append({"loss": result.loss} | {n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, **TIGHT)


class Wrapped(nn.Module):
    """A model with its loss in it."""

    def __init__(self, model: nn.Module, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.loss(self.model, batch)
