"""Values of the batch that a step looks at: eager's branch at capture, and the right graph for every later call."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.twins import SmallNet, Twins, World, mse_step, pair, small_world
from torch import Tensor, nn
from torch.fx import _symbolic_trace
from torch.optim import Optimizer

import wholestep

X, Y = pair()
MASKS = [torch.ones(6, dtype=torch.bool), torch.arange(6) > 2, torch.ones(6, dtype=torch.bool), torch.arange(6) > 3]


def asks_all(mask: Tensor) -> Any:
    return bool(mask.all())


def asks_item(mask: Tensor) -> Any:
    return (~mask).long().cumsum(0).max().clamp(max=1).item() == 0


def asks_list(mask: Tensor) -> Any:
    return all((mask.long() * 2).tolist())


def asks_equal(mask: Tensor) -> Any:
    return torch.equal(mask, torch.ones_like(mask))


def asks_close(mask: Tensor) -> Any:
    return torch.allclose(mask.float(), torch.ones(mask.shape[0]))


def asks_by_or(mask: Tensor) -> Any:
    return bool(mask.all() or mask.sum() == 0)


def branching(asks: Callable[[Tensor], Any]) -> Callable[..., Tensor]:
    def step(model: nn.Module, optimizer: Optimizer, features: Tensor, mask: Tensor) -> Tensor:
        optimizer.zero_grad()
        output = model(features)
        loss = output.mean() if asks(mask) else F.dropout(output * mask[:, None], 0.5).square().sum()
        loss.backward()
        optimizer.step()
        return loss

    return step


@pytest.mark.parametrize("asks", [asks_all, asks_item, asks_list, asks_equal, asks_close, asks_by_or])
def test_a_branch_on_the_batch(asks: Callable[[Tensor], Any]) -> None:
    twins = Twins(small_world(), branching(asks))
    for mask in MASKS:
        twins.step(X, mask)
    assert twins.num_captures == 2
    assert "looks at a value of its batch at test_questions.py" in twins.reasons[0]


@pytest.mark.parametrize("dynamic_batch", ["auto", True])
def test_a_branch_on_a_batch_of_any_size(dynamic_batch: Any) -> None:
    twins = Twins(small_world(), branching(asks_all), dynamic_batch=dynamic_batch)
    for size in (6, 4, 5, 3):
        for mask in MASKS[:2]:
            twins.step(X[:size], mask[:size])
    assert twins.num_captures == (2 if dynamic_batch is True else 4), twins.reasons


def test_values_that_the_step_derives_from_the_batch_in_place() -> None:
    def step(model: nn.Module, optimizer: Optimizer, features: Tensor, mask: Tensor) -> Tensor:
        flags = mask.clone()
        first = bool(flags[0])
        flags[0] = ~flags[0]
        assert bool(flags[0]) is not first
        return mse_step(model, optimizer, features * (2 if flags[0] else 3), Y)

    twins = Twins(small_world(), step)
    for mask in MASKS:
        twins.step(X, mask)
    assert twins.num_captures == 2


class Remembering(SmallNet):
    """Looks at a buffer that it changes itself."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, features: Tensor) -> Tensor:
        scale = 2 if self.count < 2 else 3
        self.count += 1
        return super().forward(features) * scale


def test_a_branch_on_a_buffer_is_looked_at_before_every_step() -> None:
    twins = Twins(small_world(Remembering), mse_step)
    twins.steps(5, X, Y)
    assert twins.num_captures == 2, twins.reasons


def test_what_depends_on_parameters_is_refused_still() -> None:
    def step(model: SmallNet, optimizer: Optimizer, features: Tensor) -> Tensor:
        if (model.first(features) > 0).all():
            features = features * 2
        return mse_step(model, optimizer, features, Y)

    world = small_world()()
    with pytest.raises(wholestep.CaptureError, match="only known when the step runs"):
        wholestep.compile(step)(world.model, world.optimizer, X)


def test_too_many_questions_are_refused() -> None:
    def step(model: nn.Module, optimizer: Optimizer, features: Tensor) -> Tensor:
        return mse_step(model, optimizer, features * sum(features.view(-1).repeat(10).tolist()), Y)

    world = small_world()()
    with pytest.raises(wholestep.CaptureError, match="looks at more than 200 values"):
        wholestep.compile(step)(world.model, world.optimizer, X)


def test_nobody_can_tell_that_it_is_captured() -> None:
    seen: list[Any] = []

    class Asking(SmallNet):
        def forward(self, features: Tensor) -> Tensor:
            seen.append(
                (
                    torch.compiler.is_compiling(),
                    torch.compiler.is_dynamo_compiling(),
                    torch.compiler.is_exporting(),
                    torch.jit.is_tracing(),  # pyright: ignore[reportPrivateImportUsage]
                    _symbolic_trace.is_fx_symbolic_tracing(),
                    isinstance(features, torch._subclasses.FakeTensor),
                    isinstance(features, Tensor),
                    isinstance(self.first.weight, nn.Parameter),
                )
            )
            return super().forward(features)

    def build() -> World:
        return small_world(Asking)()

    twins = Twins(build, mse_step)
    twins.step(X, Y)
    assert seen[0] == seen[1] == (False, False, False, False, False, False, True, True)
    assert not torch.compiler.is_compiling()


class Encoder(nn.Module):
    """Torch's own encoder, which looks whether its mask is causal."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1)

    def forward(self, features: Tensor, mask: Tensor) -> Tensor:
        return self.encoder(features, mask=mask)


def test_torch_looks_whether_a_mask_is_causal() -> None:
    def step(model: nn.Module, optimizer: Optimizer, features: Tensor, mask: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(features, mask).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    twins = Twins(small_world(Encoder), step)
    features = torch.randn(2, 5, 8)
    causal = nn.Transformer.generate_square_subsequent_mask(5)
    for mask in (causal, torch.zeros(5, 5), causal):
        twins.step(features, mask)
    assert twins.num_captures == 2, twins.reasons


def test_a_certain_answer_is_not_asked_for_again() -> None:
    def asks(mask: Tensor) -> bool:
        positions = torch.arange(len(mask))
        return bool((positions.diff() == 1).all()) and bool(mask.all())

    twins = Twins(small_world(), branching(asks))
    for mask in MASKS:
        twins.step(X, mask)
        asked = twins.compiled.captured.asked
        assert asked is not None
        assert len(asked.answers) == 1


def test_answers_that_are_all_certain_cost_nothing() -> None:
    twins = Twins(small_world(), branching(lambda mask: bool((torch.arange(len(mask)).diff() == 1).all())))
    for mask in MASKS:
        twins.step(X, mask)
    assert twins.compiled.captured.asked is None
