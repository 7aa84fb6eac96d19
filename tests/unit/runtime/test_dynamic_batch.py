"""One capture for many batch sizes, and a capture of its own wherever a size is special."""

import logging
from typing import Any

import pytest
import torch
from tests.parity import assert_parity, default_step
from tests.twins import SmallNet, Twins, mse_step, pair, small_world
from torch import Tensor

import wholestep
from wholestep import zoo


def symbolic(step: Any) -> bool:
    """Whether the graph of the most recent call has a symbolic batch size."""
    return bool(step.captured.dynamic_dims)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("name", "optimizer_name"),
    [
        ("mlp", "adam"),
        ("gpt", "adamw_fused"),
        ("resnet", "sgd"),
        ("bert", "adamw_foreach"),
        ("vit", "sgd"),
        ("custom_function", "adamw"),
        ("hf_gpt2", "adamw_fused"),
        ("hf_bert", "sgd"),
    ],
)
def test_three_sizes_run_through_one_capture(name: str, optimizer_name: str) -> None:
    step = assert_parity(
        zoo.get(name), optimizer_name, steps=6, batch_sizes=(4, 7, 16), compile_options={"dynamic_batch": True}
    )
    assert step.num_captures == 1
    assert symbolic(step)


@pytest.mark.parametrize("first", [2, 4, 16, 32])
def test_the_size_at_capture_does_not_matter(first: int) -> None:
    # The mlp has 16 features and a width of 32: sizes that coincide with the batch must not be tied to it.
    step = assert_parity(
        zoo.get("mlp"), "adam", steps=5, batch_sizes=(first, 3, 10, 16, 32), compile_options={"dynamic_batch": True}
    )
    assert step.num_captures == 1


def test_a_symbolic_graph_as_captured_is_eagers_too() -> None:
    step = assert_parity(
        zoo.get("gpt"), "adam", steps=3, batch_sizes=(4, 7), compile_options={"dynamic_batch": True, "passes": ""}
    )
    step.graph.verify(deep=True)
    assert step.num_captures == 1


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["mlp", "gpt", "resnet"])
def test_auto_becomes_symbolic_at_the_second_size(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="wholestep"):
        step = assert_parity(zoo.get(name), "sgd", steps=4, batch_sizes=(4, 7, 16, 4))
    assert step.num_captures == 2
    assert symbolic(step)
    [reason] = step.recompile_reasons
    assert "changed: shape (4" in reason
    assert "-> (7" in reason
    messages = [record.getMessage() for record in caplog.records if record.name.startswith("wholestep")]
    captured = [message for message in messages if message.startswith("captured")]
    recompiled = [message for message in messages if message.startswith("recompiled")]
    assert len(captured) == 1
    assert "dynamic batch" not in captured[0]
    assert len(recompiled) == 1
    assert "with dynamic sizes" in recompiled[0]
    assert reason in recompiled[0]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("name", "dynamic"), [("gpt", True), ("gpt", "auto"), ("mlp", True)])
def test_a_loop_whose_sizes_change_is_eagers_bit_for_bit(name: str, dynamic: bool | str) -> None:
    """Nobody looks in between: the graph of the loop runs first in a later call than the one it was captured for."""
    case = zoo.get(name)
    compiled: Any = wholestep.compile(default_step(case), cross_iteration="all", dynamic_batch=dynamic)
    sides: list[tuple[list[float], torch.nn.Module]] = []
    for step in (default_step(case), compiled):
        torch.manual_seed(0)
        model = case.build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = [case.make_batch(size, seed) for seed, size in enumerate((6, 3, 8, 5, 3, 7))]
        sides.append(([step(model, optimizer, batch).item() for batch in batches], model))
    (expected, eager), (found, ours) = sides
    assert found == expected
    for (key, value), other in zip(eager.named_parameters(), ours.parameters(), strict=True):
        assert torch.equal(value, other), key


@torch.library.custom_op("dynamic_batch::columns", mutates_args=())
def columns(features: Tensor) -> Tensor:
    """A transposed copy that lies in memory as the original does."""
    return features.clone().t().clone(memory_format=torch.preserve_format)


@columns.register_fake
def _(features: Tensor) -> Tensor:
    return features.new_empty(features.shape[1], features.shape[0])  # rows first: not what the kernel does


@pytest.mark.parametrize("cross_iteration", ["none", "all"])
def test_a_layout_that_a_kernel_does_not_keep_is_made_for_every_size(cross_iteration: str) -> None:
    def train_step(model: torch.nn.Linear, optimizer: torch.optim.Optimizer, features: Tensor) -> Tensor:
        optimizer.zero_grad()
        flat = columns(features).reshape(-1)  # a view, if rows come first as promised
        loss = (model(features).mean() * flat.cumsum(0)).mean()
        loss.backward()
        optimizer.step()
        return loss

    compiled: Any = wholestep.compile(train_step, cross_iteration=cross_iteration, dynamic_batch=True)
    losses: list[list[float]] = []
    for step in (train_step, compiled):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses.append([step(model, optimizer, torch.randn(size, 4)).item() for size in (6, 3, 8, 5, 7)])
    assert losses[1] == losses[0]
    assert compiled.num_captures == 1


def test_auto_stays_static_while_the_size_does() -> None:
    step = assert_parity(zoo.get("mlp"), "sgd", steps=4, batch_sizes=(4,))
    assert step.num_captures == 1
    assert not symbolic(step)


@pytest.mark.parametrize("dynamic_batch", [True, "auto"])
def test_a_batch_of_one_is_captured_apart(dynamic_batch: bool | str) -> None:
    twins = Twins(small_world(), mse_step, dynamic_batch=dynamic_batch)
    for size in (4, 7):
        twins.step(*pair(size))
    before = twins.num_captures
    twins.step(*pair(1))
    assert twins.num_captures == before + 1
    assert "size 1 is captured apart" in twins.reasons[-1]
    assert not symbolic(twins.compiled)
    for size in (1, 9, 4, 1, 7):
        twins.step(*pair(size))
    assert twins.num_captures == before + 1


def test_a_batch_of_one_comes_first() -> None:
    twins = Twins(small_world(), mse_step, dynamic_batch=True)
    for size in (1, 4, 7, 1):
        twins.step(*pair(size))
    assert twins.num_captures == 2


def test_an_empty_batch_is_captured_apart() -> None:
    def step(model: Any, optimizer: Any, features: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = (model(features) - targets).square().sum()
        loss.backward()
        optimizer.step()
        return loss

    twins = Twins(small_world(), step, dynamic_batch=True)
    for size in (4, 0, 7, 0):
        twins.step(*pair(size))
    assert twins.num_captures == 2


def test_false_captures_every_size_apart() -> None:
    twins = Twins(small_world(), mse_step, dynamic_batch=False)
    for size in (4, 7, 16, 4, 7, 16):
        twins.step(*pair(size))
        assert not symbolic(twins.compiled)
    assert twins.num_captures == 3


class Halved(SmallNet):
    """Small batches and large ones are different computations."""

    def forward(self, features: Tensor) -> Tensor:
        output = super().forward(features)
        return output * 2 if features.shape[0] > 10 else output


def test_a_model_that_branches_on_the_size_recompiles_with_a_reason() -> None:
    twins = Twins(small_world(Halved), mse_step, dynamic_batch=True)
    for size in (4, 7, 10):
        twins.step(*pair(size))
    assert twins.num_captures == 1
    twins.step(*pair(11))
    assert twins.num_captures == 2
    [reason] = twins.reasons
    assert "sizes [11] break what the captured step assumes" in reason
    for size in (16, 5, 10, 11):
        twins.step(*pair(size))
    assert twins.num_captures == 2


class Paired(SmallNet):
    """Works on pairs of examples, so it needs an even batch."""

    def forward(self, features: Tensor) -> Tensor:
        pairs = features.view(features.shape[0] // 2, 8)
        return super().forward(pairs.view(-1, 4) * features.shape[0])


def test_the_size_as_a_number_in_the_computation() -> None:
    twins = Twins(small_world(Paired), mse_step, dynamic_batch=True)
    for size in (4, 6, 16):
        twins.step(*pair(size))
    assert twins.num_captures == 1


def test_a_step_that_needs_the_size_as_an_int_is_captured_for_each_size() -> None:
    def step(model: Any, optimizer: Any, features: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        weights = torch.tensor([1.0 / (index + 1) for index in range(len(features))])
        return mse_step(model, optimizer, features * weights[:, None], targets), len(features)

    twins = Twins(small_world(), step, dynamic_batch=True)
    for size in (4, 7, 4, 7):
        twins.step(*pair(size))
    assert twins.num_captures == 2
    assert len(twins.reasons) == 1


def test_the_size_can_be_returned() -> None:
    def step(model: Any, optimizer: Any, features: Tensor, targets: Tensor) -> dict[str, Any]:
        loss = mse_step(model, optimizer, features, targets)
        return {"loss": loss, "size": features.shape[0], "elements": features.numel(), "half": features.shape[0] // 2}

    twins = Twins(small_world(), step, dynamic_batch=True)
    for size in (4, 7, 16):
        output = twins.step(*pair(size))
        assert (output["size"], output["elements"], output["half"]) == (size, 4 * size, size // 2)
        assert type(output["size"]) is int
    assert twins.num_captures == 1


def test_arguments_without_a_batch_may_be_of_the_batch_size_by_chance() -> None:
    def step(model: Any, optimizer: Any, features: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        return mse_step(model, optimizer, features * weights, targets)

    twins = Twins(small_world(), step, dynamic_batch=True)
    weights = torch.rand(4)
    for size in (4, 7, 16, 4):
        twins.step(*pair(size), weights)
    assert twins.num_captures <= 3


def test_a_recurrent_model_falls_back_to_fixed_sizes(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="wholestep"):
        step = assert_parity(
            zoo.get("lstm"), "adam", steps=4, batch_sizes=(4, 7), compile_options={"dynamic_batch": True}
        )
    assert step.num_captures == 2
    warnings = [
        record.getMessage() for record in caplog.records if "cannot have a dynamic batch" in record.getMessage()
    ]
    assert len(warnings) == 1
    assert "'recurrent' is a LSTM" in warnings[0]


@pytest.mark.parametrize("dynamic_batch", ["yes", None, 3])
def test_other_values_are_refused(dynamic_batch: Any) -> None:
    with pytest.raises(wholestep.WholestepError, match=r"dynamic_batch is True, False or 'auto', not"):
        wholestep.compile(mse_step, dynamic_batch=dynamic_batch)


def test_gradient_accumulation_over_a_symbolic_batch() -> None:
    def step(model: Any, optimizer: Any, features: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        total = torch.zeros(())
        for part, wanted in zip(features.chunk(2), targets.chunk(2), strict=True):
            loss = (model(part) - wanted).square().sum() / features.shape[0]
            loss.backward()
            total = total + loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return total

    twins = Twins(small_world(), step, dynamic_batch=True)
    for size in (4, 8, 16):
        twins.step(*pair(size))
    assert twins.num_captures == 1
