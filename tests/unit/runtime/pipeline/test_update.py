"""Updates and clipping as part of a pipelined step, and what is seen of its timing, in one process."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.runtime.pipeline.test_pipe import TIGHT, Skipping, batch_of, loss_fn, plain_step
from torch import nn

import wholestep
from wholestep.api import CompiledPipe
from wholestep.pipe import Kind, StageCosts, build_schedule, simulate
from wholestep.zoo.optimizers import OPTIMIZERS, two_groups

NUM_STEPS = 4


def pipe_of(model: nn.Module, **options: Any) -> CompiledPipe:
    chosen: dict[str, Any] = {"num_micro_batches": 4, "num_stages": 3, "loss_fn": loss_fn} | options
    return wholestep.pipeline(model, **chosen)


@pytest.mark.parametrize("optimizer_name", ["sgd", "adamw", "adamw_fused", "adamw_foreach"])
def test_updates_are_those_of_the_plain_optimizer(optimizer_name: str) -> None:
    """Two groups, a learning rate that changes, gradients clipped: parameters and state at every step."""
    torch.manual_seed(0)
    model = Skipping().double()
    twin = copy.deepcopy(model)
    ours, eager = (OPTIMIZERS[optimizer_name](two_groups(each)) for each in (model, twin))
    pipe = pipe_of(model, optimizer=ours, max_grad_norm=0.5)
    for number in range(NUM_STEPS):
        for optimizer in (ours, eager):
            optimizer.param_groups[0]["lr"] = 0.01 / (number + 1)
        tokens, target = batch_of(number)
        result = pipe.step(tokens, target=target)
        eager.zero_grad()
        plain_step(twin, tokens, target)
        norm = nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
        eager.step()
        torch.testing.assert_close(result.grad_norm, norm, **TIGHT)
        for (name, one), other in zip(model.named_parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(one, other, **TIGHT, msg=lambda text, n=name: f"{n}: {text}")
            assert one.grad is None
            assert ours.state[one].keys() == eager.state[other].keys()
            for key, value in eager.state[other].items():
                torch.testing.assert_close(ours.state[one][key], value, **TIGHT)


def test_gradients_can_be_clipped_by_hand() -> None:
    model = Skipping().double()
    twin = copy.deepcopy(model)
    pipe = pipe_of(model)
    tokens, target = batch_of(0)
    pipe.step(tokens, target=target)
    plain_step(twin, tokens, target)
    torch.testing.assert_close(pipe.clip_grad_norm_(0.1), nn.utils.clip_grad_norm_(twin.parameters(), 0.1), **TIGHT)
    torch.testing.assert_close(model.first.weight.grad, twin.first.weight.grad, **TIGHT)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": "adamw"}, "optimizer is a torch.optim.Optimizer, not a str"),
        ({"max_grad_norm": 0}, "max_grad_norm is a number, more than 0, not 0"),
    ],
)
def test_options_of_another_kind_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(wholestep.WholestepError, match=message):
        pipe_of(Skipping(), **options)


def test_a_step_is_timed_and_shown(tmp_path: Path) -> None:
    pipe = pipe_of(Skipping(), schedule="zb-h1")
    tokens, target = batch_of(0)
    pipe.step(tokens, target=target)
    measured = pipe.measured()
    rows = [[span.action for span in row] for row in measured.spans]
    assert rows == [list(row) for row in pipe.schedule.actions]
    ends = [span.end for row in measured.spans for span in row]
    assert all(row[index].end <= row[index + 1].start for row in measured.spans for index in range(len(row) - 1))
    assert measured.makespan == max(ends)
    text = pipe.explain()
    assert "rank 2 |" in text
    assert "idle as planned" in text
    page = pipe.report(tmp_path / "pipeline.html").read_text()
    assert ">planned<" in page
    assert ">measured<" in page


def test_costs_of_a_timeline_are_those_it_was_made_of() -> None:
    costs = [StageCosts(1, 2, 3, 4), StageCosts(2, 1, 1, 5)]
    for name, kinds in (("zb-h1", (Kind.FORWARD, Kind.INPUT, Kind.WEIGHT)), ("1f1b", (Kind.FORWARD, Kind.BACKWARD))):
        found = simulate(build_schedule(name, 2, 4), costs).costs()
        for one, expected in zip(found, costs, strict=True):
            assert [one.of(kind) for kind in kinds] == [expected.of(kind) for kind in kinds]
