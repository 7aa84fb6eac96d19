"""Measured steps train like any other, and what is noted about them is true."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer

import wholestep
from wholestep.cost import profile_memory
from wholestep.graph import Phase
from wholestep.runtime.measured import Measured, MeasuredStep


def train_step(model: nn.Module, optimizer: Optimizer, x: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def world() -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    return model, SGD(model.parameters(), lr=0.1, momentum=0.9)


def batches(num: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 8, generator=generator) for _ in range(num)]


def losses_of(call: Any, num: int) -> list[float]:
    model, optimizer = world()
    return [call(model, optimizer, x).item() for x in batches(num)]


@pytest.mark.parametrize("way", ["none", "all"])
def test_measured_steps_train_like_others(way: str) -> None:
    step: Any = wholestep.compile(train_step, cross_iteration=way)
    assert losses_of(step.measure, 8) == losses_of(train_step, 8)
    assert step.num_captures == 1
    # One or two calls that run a graph for the first time, one for memory.
    assert len(step.measured.steps) == (5 if way == "all" else 6)


@pytest.mark.parametrize("way", ["none", "all"])
def test_the_peak_is_the_predicted_one(way: str) -> None:
    step: Any = wholestep.compile(train_step, cross_iteration=way)
    losses_of(step.measure, 5)
    assert step.measured.peak_bytes == profile_memory(step.graph).peak_bytes


@pytest.mark.parametrize("way", ["none", "all"])
def test_parts_are_the_phases_in_order_and_no_longer_than_the_step(way: str) -> None:
    step: Any = wholestep.compile(train_step, cross_iteration=way)
    losses_of(step.measure, 6)
    runs: list[str] = []
    for node in step.graph.calls():
        if not runs or runs[-1] != node.meta["phase"]:
            runs.append(node.meta["phase"])
    assert {Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER} == set(runs)
    for taken in step.measured.steps:
        assert [part for part, _ in taken.parts] == runs
        assert all(length_us >= 0 for _, length_us in taken.parts)
        assert 0 < sum(taken.totals.values()) <= taken.step_us


def test_plain_calls_note_nothing_and_run_the_same_code_as_before() -> None:
    step: Any = wholestep.compile(train_step)
    model, optimizer = world()
    for x in batches(3):
        step(model, optimizer, x)
    main = step._require_current().rotation.in_loop
    code = main._step
    for x in batches(3):
        step.measure(model, optimizer, x)
    assert len(step.measured.steps) == 2
    assert main._step is code
    step(model, optimizer, batches(1)[0])
    assert len(step.measured.steps) == 2


def test_a_call_that_captures_is_not_measured_and_each_graph_has_its_own() -> None:
    step: Any = wholestep.compile(train_step, dynamic_batch=False)
    model, optimizer = world()
    for size in (4, 4, 4, 4, 6):
        step.measure(model, optimizer, torch.randn(size, 8))
    assert step.measured == Measured()
    step.measure(model, optimizer, torch.randn(4, 8))  # another graph when it begins
    step(model, optimizer, torch.randn(4, 8))
    assert len(step.measured.steps) == 2


def test_the_last_step_of_a_loop_is_not_measured() -> None:
    step: Any = wholestep.compile(train_step, cross_iteration="all")
    model, optimizer = world()
    for x in batches(5):
        step.measure(model, optimizer, x)
    num_steps = len(step.measured.steps)
    step.measure(model, optimizer, batches(1)[0], last=True)
    assert len(step.measured.steps) == num_steps


def test_checked_steps_are_not_measured() -> None:
    step: Any = wholestep.compile(train_step, verify=3)
    losses_of(step.measure, 3)
    assert step.measured.is_empty


def test_a_step_that_fails_leaves_the_plain_code() -> None:
    step: Any = wholestep.compile(train_step)
    model, optimizer = world()
    for x in batches(4):
        step.measure(model, optimizer, x)
    main = step._require_current().rotation.in_loop
    code = main._step

    def fail(_: Any) -> None:
        raise RuntimeError("on purpose")

    main._timed[1].start = lambda: fail(0)
    with pytest.raises(RuntimeError, match="on purpose"):
        step.measure(model, optimizer, batches(1)[0])
    assert main._step is code
    step(model, optimizer, batches(1)[0])


def test_the_typical_step_is_the_one_in_the_middle() -> None:
    steps = tuple(MeasuredStep(us) for us in (5.0, 1.0, 9.0, 4.0))
    assert Measured(steps).typical == MeasuredStep(4.0)
    assert Measured(peak_bytes=3).typical is None
    assert MeasuredStep(9.0, (("forward", 1.0), ("backward", 2.0), ("forward", 4.0))).totals == {
        "forward": 5.0,
        "backward": 2.0,
    }


def test_a_step_that_was_never_called_says_so() -> None:
    with pytest.raises(wholestep.GuardError, match="has not been called"):
        _ = wholestep.compile(train_step).measured
