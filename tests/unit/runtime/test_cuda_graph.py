"""The logic of CUDA graphs without a device: a stand-in records which memory a step reads and writes it again."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import wholestep
from wholestep import WholestepError
from wholestep.runtime.cuda_graph import (
    DeviceNumber,
    RecordedStep,
    copied_inputs,
    take_rates_from_device,
    why_not_recorded,
    written_inputs,
)


class Recorder:
    """Runs a function again on each replay, and puts what it returns where the first run had it, like a device does."""

    def __init__(self) -> None:
        self.num_recorded = 0

    def __call__(self, function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        self.num_recorded += 1
        state = weights.clone()
        returned = function()
        weights.copy_(state)  # recording does not run

        def replay() -> None:
            for group, again in zip(returned, function(), strict=True):
                for old, new in zip(group, again, strict=True):
                    if isinstance(old, Tensor) and old is not new:
                        old.copy_(new)

        return replay, returned


weights = torch.zeros(3)


def step(inputs: list[Any]) -> Any:
    """In place on a weight: `w += x * n`; returns the sum, the batch itself and a number."""
    weight, x, frozen, number = inputs
    inputs.clear()
    weight += x * number * frozen
    return (weight.sum(), x, number), (), (x * 2,)


@pytest.fixture(name="recorder")
def _recorder() -> Recorder:
    weights.zero_()
    return Recorder()


def recorded(recorder: Recorder) -> RecordedStep:
    return RecordedStep(step, frozenset({1}), frozenset({0}), recorder)


def test_each_call_is_one_step_and_what_it_returns_is_kept(recorder: Recorder) -> None:
    run = recorded(recorder)
    frozen = torch.ones(3)
    batches = [torch.full((3,), float(number)) for number in range(1, 5)]
    outputs = [run([weights, batch, frozen, 2])[0] for batch in batches]
    assert [float(total) for total, *_ in outputs] == [6, 18, 36, 60]
    assert all(given is batch for (_, given, _), batch in zip(outputs, batches, strict=True))
    assert recorder.num_recorded == 1


def test_results_stay_where_they_are(recorder: Recorder) -> None:
    run = recorded(recorder)
    frozen = torch.ones(3)
    gradients = [run([weights, torch.full((3,), float(number)), frozen, 1])[2][0] for number in range(4)]
    assert gradients[2] is gradients[3]
    assert gradients[3].tolist() == [6, 6, 6]


def test_other_sizes_and_numbers_are_recorded_apart(recorder: Recorder) -> None:
    run = recorded(recorder)
    frozen = torch.ones(3)
    for number in (1, 2, 1, 2, 2, 1):
        run([weights, torch.ones(3), frozen, number])
    assert recorder.num_recorded == 2
    assert weights.tolist() == [9, 9, 9]


def test_what_has_moved_is_copied_from_then_on_unless_it_is_written(recorder: Recorder) -> None:
    run = recorded(recorder)
    for number in range(1, 7):
        run([weights, torch.ones(3), torch.full((3,), float(number)), 1])  # another frozen tensor each time
    assert recorder.num_recorded == 2
    assert weights.tolist() == [21, 21, 21]
    moved = torch.zeros(3)
    for _ in range(2):
        run([moved, torch.ones(3), torch.ones(3), 1])
    assert recorder.num_recorded == 3
    assert moved.tolist() == [3, 3, 3]  # the stand-in runs while it records


def test_too_many_recordings_end_them(recorder: Recorder, caplog: pytest.LogCaptureFixture) -> None:
    run = recorded(recorder)
    with caplog.at_level(logging.WARNING, "wholestep"):
        for number in range(12):
            run([weights, torch.ones(3), torch.ones(3), number])
    assert recorder.num_recorded == 8
    assert weights.tolist() == [66, 66, 66]
    assert caplog.text.count("runs without CUDA graphs now") == 1


def train(**options: Any) -> Any:
    model = torch.nn.Linear(4, 2)
    torch.manual_seed(0)
    chosen = torch.optim.AdamW(model.parameters(), fused=True)

    def train_step(model: Any, optimizer: Any, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    compiled = wholestep.compile(train_step, **options)
    compiled(model, chosen, torch.randn(8, 4))
    return compiled


def test_learning_rates_of_fused_optimizers_become_tensors() -> None:
    graph = train().graph.copy()
    index = list(graph.placeholders()).index("lr.0")
    [(found, number)] = take_rates_from_device(graph).items()
    assert found == index
    assert isinstance(number, DeviceNumber)
    [update] = [node for node in graph.calls() if "_fused_adamw" in str(node.target)]
    assert update.kwargs["lr"] is list(graph.placeholders().values())[index]
    first = number.holding(0.5)
    assert number.holding(0.25) is first
    assert float(first) == 0.25


def test_inputs_are_told_apart() -> None:
    graph = train().graph
    names = list(graph.placeholders())
    assert {names[index] for index in copied_inputs(graph)} == {"batch.x"}
    written = {names[index] for index in written_inputs(graph)}
    assert {"param.weight", "state.weight.exp_avg", "state.bias.step"} <= written
    assert not any(name.startswith(("batch", "lr")) for name in written)


def test_a_step_without_a_device_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "wholestep"):
        compiled = train(cuda_graphs=True)
    reason = "nothing in it runs on a CUDA device"
    assert f"runs without CUDA graphs: {reason}" in caplog.text
    assert reason in compiled.explain()
    assert why_not_recorded(compiled.graph) == reason


@pytest.mark.parametrize("value", [1, "yes", None])
def test_a_wrong_option_is_refused(value: Any) -> None:
    with pytest.raises(WholestepError, match="cuda_graphs is True or False"):
        wholestep.compile(lambda: None, cuda_graphs=value)
