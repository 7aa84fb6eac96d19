"""Ranks of a pipeline that update the same parameters stay alike or end with a `RankError`, and tell of failures.

Tied parameters live on two ranks, replicas have all of theirs in common, a stage may have none at all.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.distributed.ranks import run_ranks
from torch import Tensor, nn

import wholestep
from wholestep import WholestepError

pytestmark = pytest.mark.distributed

SOON_S = 10.0
NUM_STEPS = 6


class Tied(nn.Module):
    """The first and the last layer have one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.middle = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


@dataclass(frozen=True)
class Ending:
    """How a rank's training ended, after how many steps, and what its model was then."""

    kind: str
    text: str
    seconds: float
    num_steps: int
    weights: list[Tensor]


def square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def batch_of(number: int) -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(number))


def train(way: str) -> Ending:
    """Rank 1 is the odd one, in one way."""
    torch.manual_seed(0)
    is_odd = dist.get_rank() == 1
    model = Tied() if way != "no parameters" else nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Tanh(), nn.Tanh())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if way == "state":
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 4.0 if is_odd else 1.0)
        optimizer.step()
        optimizer.zero_grad()
    options: dict[str, Any] = {"num_stages": 2, "split": ["2" if way == "no parameters" else "middle"]}
    options = {"num_stages": 1} if way == "replicas" else options
    pipe = wholestep.pipeline(model, num_micro_batches=2, loss_fn=square, optimizer=optimizer, **options)
    dist.barrier()
    started, done, kind, text = time.monotonic(), 0, "none", ""
    try:
        for number in range(NUM_STEPS):
            is_now = is_odd and number == 4
            if way in ("rate", "replicas"):
                optimizer.param_groups[0]["lr"] = 0.2 if is_now else 0.1
            if way == "weights" and is_odd and number == 2:
                model.get_parameter("first.weight").data.mul_(2)
            if way == "hook" and is_now:
                model.get_submodule("middle").register_forward_hook(doubled)
            if way == "update" and is_now:
                optimizer.register_step_pre_hook(fail)
            pipe.step(batch_of(number), target=batch_of(number))
            done += 1
    except (WholestepError, ArithmeticError) as error:
        kind, text = type(error).__name__, str(error)
    seconds = time.monotonic() - started
    return Ending(kind, text, seconds, done, [value.detach().clone() for value in model.parameters()])


def doubled(_module: nn.Module, _args: object, output: Tensor) -> Tensor:
    return output * 2


def fail(*_: object) -> None:
    raise ArithmeticError("no update today")


def test_a_stage_without_parameters_just_runs() -> None:
    first, second = run_ranks(train, 2, "no parameters", timeout_s=60)
    assert (first.kind, second.kind) == ("none", "none"), (first, second)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Tanh(), nn.Tanh())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for number in range(NUM_STEPS):
        optimizer.zero_grad()
        for part in batch_of(number).chunk(2):
            (square(model(part), part) / 2).backward()
        optimizer.step()
    torch.testing.assert_close(first.weights, [value.detach() for value in model.parameters()])


slow = pytest.mark.slow
WAYS: dict[str, tuple[int, list[str]]] = {
    "state": (0, ["exp_avg of first.weight", "rank 0 and rank 1"]),
    "rate": (4, ["['lr'] is 0.1 on rank 0 and 0.2 on rank 1 in call 5"]),
    "replicas": (4, ["['lr'] is 0.1 on rank 0 and 0.2 on rank 1 in call 5"]),
    "weights": (3, ["the value of first.weight", "rank 0 and rank 1"]),
    "hook": (4, ["what it runs", "'a known capture' on rank 0 and 'a new capture' on rank 1 in call 5"]),
}


@pytest.mark.parametrize("way", [way if way == "rate" else pytest.param(way, marks=slow) for way in WAYS])
def test_ranks_that_would_drift_apart(way: str) -> None:
    num_steps, named = WAYS[way]
    for ending in run_ranks(train, 2, way, timeout_s=60):
        assert ending.kind == "RankError", ending
        assert ending.num_steps == num_steps, ending
        assert ending.seconds < SOON_S, ending
        for name in named:
            assert name in ending.text, ending


@slow
def test_tied_parameters_stay_the_same() -> None:
    first, second = run_ranks(train, 2, "usual", timeout_s=60)
    assert (first.kind, second.kind) == ("none", "none"), (first, second)
    assert torch.equal(first.weights[0], second.weights[0])


def test_a_rank_whose_update_fails_tells_the_others() -> None:
    first, second = run_ranks(train, 2, "update", timeout_s=60)
    assert (second.kind, second.text) == ("ArithmeticError", "no update today"), second
    assert first.kind == "PipelineError", first
    assert "rank 1 failed" in first.text, first
    assert "no update today" in first.text, first
    assert first.seconds < SOON_S, first
