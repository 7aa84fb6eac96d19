"""Ranks of a pipeline that differ end with a `RankError` on every rank, soon, which names the difference (F1, F3).

One row for each way to differ; rank 1 is the odd one. A peer that hangs is waited for as long as the group waits (F2).
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.distributed.ranks import RanksFailed, run_ranks
from torch import Tensor, nn

import wholestep
from wholestep import RankError, WholestepError

pytestmark = pytest.mark.distributed

SOON_S = 10.0
WAIT_S = 4.0


@dataclass(frozen=True)
class Setup:
    """What one rank builds, and what it calls: letters of `calls` are steps, evaluations and clipping by hand."""

    depth: int = 4
    width: int = 4
    dtype: torch.dtype = torch.float32
    frozen: str = ""
    order: int = 1
    lr: float = 0.1
    optimizer: str = "AdamW"
    decay: float = 1.0
    calls: str = "sss"
    rows: str = "888888"
    modes: str = "tttttt"
    max_norm: float = 1.0
    options: tuple[tuple[str, Any], ...] = ()


USUAL = Setup()


class Tower(nn.Module):
    """Layers in a row, which may be registered in either order."""

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        self.depth = setup.depth
        for index in range(setup.depth)[:: setup.order]:
            self.add_module(f"layer{index}", nn.Linear(4, setup.width if index == setup.depth - 1 else 4))

    def forward(self, x: Tensor) -> Tensor:
        for index in range(self.depth):
            x = torch.tanh(self.get_submodule(f"layer{index}")(x))
        return x.square().mean()


@dataclass(frozen=True)
class Ending:
    """How a rank's training ended; its parameters if nothing ended it."""

    kind: str
    text: str
    seconds: float
    num_calls: int
    first_weight: Tensor


def train(setups: list[Setup], timeout_s: float | None = None) -> Ending:
    if timeout_s is not None:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s))  # pyright: ignore[reportPrivateUsage]
    setup = setups[dist.get_rank()]
    torch.manual_seed(dist.get_rank())
    model = Tower(setup).to(setup.dtype)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name != setup.frozen)
    kind: Any = getattr(torch.optim, setup.optimizer)
    optimizer = kind(model.parameters(), lr=setup.lr)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, setup.decay)
    options = {"num_stages": 2, "num_micro_batches": 2, "optimizer": optimizer} | dict(setup.options)
    pipe = wholestep.pipeline(model, **options)
    dist.barrier()
    started, done, ended, text = time.monotonic(), 0, "none", ""
    try:
        for call, rows, mode in zip(setup.calls, setup.rows, setup.modes, strict=False):
            one_call(pipe, setup, call, torch.randn(int(rows), 4, dtype=setup.dtype), mode)
            done += 1
            if call == "s":
                scheduler.step()
    except WholestepError as error:
        ended, text = type(error).__name__, str(error)
    seconds = time.monotonic() - started
    return Ending(ended, text, seconds, done, model.get_parameter("layer0.weight").detach().clone())


def one_call(pipe: Any, setup: Setup, call: str, batch: Tensor, mode: str) -> None:
    pipe.model.train(mode == "t")
    if call == "s":
        pipe.step(batch)
    elif call == "e":
        pipe.evaluate(batch)
    else:
        pipe.clip_grad_norm_(setup.max_norm)


def endings(odd: Setup, usual: Setup = USUAL, timeout_s: float | None = None) -> list[Ending]:
    return run_ranks(train, 2, [usual, odd], timeout_s, timeout_s=60)


def assert_refused(found: list[Ending], *named: str) -> None:
    for ending in found:
        assert ending.kind == RankError.__name__, ending
        assert ending.seconds < SOON_S, ending
        assert "\n" not in ending.text, ending
        for name in named:
            assert name in ending.text, ending


def with_options(**options: Any) -> Setup:
    return Setup(options=tuple(options.items()))


slow = pytest.mark.slow
DIFFERENCES: dict[str, tuple[Setup, Setup, list[str]]] = {
    "another model": (Setup(), Setup(depth=5), ["layer4.weight", "missing"]),
    "another shape": (Setup(), Setup(width=5), ["layer3.weight", "(4, 4)", "(5, 4)"]),
    "another dtype": (Setup(), Setup(dtype=torch.float64), ["float32", "float64"]),
    "a frozen parameter": (Setup(), Setup(frozen="layer1.bias"), ["frozen", "layer1.bias"]),
    "another learning rate": (Setup(), Setup(lr=0.2), ["['lr']", "0.1", "0.2"]),
    "another optimizer": (Setup(), Setup(optimizer="SGD"), ["class of optimizer", "SGD"]),
    "another number of stages": (Setup(), with_options(num_stages=4), ["num_stages", "2", "4"]),
    "a number of stages that does not fit": (Setup(), with_options(num_stages=3), ["num_stages", "2", "3"]),
    "another schedule": (Setup(), with_options(schedule="gpipe"), ["schedule", "1f1b", "gpipe"]),
    "other micro-batches": (Setup(), with_options(num_micro_batches=4), ["argument 0"]),
    "clipping on one rank": (Setup(), with_options(max_grad_norm=1.0), ["max_grad_norm"]),
    "another seed": (Setup(), with_options(seed=1), ["seed"]),
    "other rows": (Setup(), Setup(rows="444"), ["rows", "8", "4"]),
    "another mode": (Setup(), Setup(modes="eee"), ["mode of model", "'train'", "'eval'"]),
    "an evaluation on one rank": (Setup(), Setup(calls="ess"), ["the call", "'step'", "'evaluate'"]),
    "other rows later": (Setup(), Setup(rows="884"), ["rows", "8", "4", "call 3"]),
    "another mode later": (Setup(), Setup(modes="tte"), ["mode of model", "call 3"]),
    "an evaluation later": (Setup(calls="eses"), Setup(calls="esee"), ["the call", "'step'", "'evaluate'", "call 4"]),
    "clipping by hand on one rank": (Setup(calls="sss"), Setup(calls="scs"), ["clip_grad_norm_", "call 2"]),
    "another norm by hand": (Setup(calls="scs"), Setup(calls="scs", max_norm=2.0), ["clipped", "1.0", "2.0"]),
    "another schedule of the rate": (Setup(), Setup(decay=0.5), ["['lr']", "0.05"]),
    "too few rows": (Setup(), Setup(rows="118"), ["does not make 2 micro-batches"]),
}
QUICK = ("another model", "another number of stages", "other rows", "an evaluation later", "another mode later")


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=slow) for name in DIFFERENCES])
def test_pipeline_ranks_that_differ(name: str) -> None:
    usual, odd, named = DIFFERENCES[name]
    found = endings(odd, usual)
    if name == "too few rows":  # it knows itself what is wrong
        assert found[1].kind == "PipelineError"
        found = found[:1]
    assert_refused(found, *named)


def test_layers_in_another_order_are_matched_by_name() -> None:
    """F1: rank 0's weights are shared by name. Rank 1, which began with others, ends with rank 0's first layer."""
    once = Setup(calls="e")
    first, second = endings(replace(once, order=-1), once)
    assert (first.kind, second.kind) == ("none", "none"), (first, second)
    assert torch.equal(first.first_weight, second.first_weight)


@slow
@pytest.mark.parametrize(("usual", "odd"), [(USUAL, Setup(calls="s")), (USUAL, Setup(calls=""))])
def test_a_rank_that_does_not_call_is_waited_for_as_long_as_the_group_waits(usual: Setup, odd: Setup) -> None:
    assert_refused(endings(odd, usual, timeout_s=WAIT_S)[:1], "rank 1")


def hang() -> None:
    """Rank 1 stops in the middle of training, as a process in a debugger does."""
    if dist.get_rank() == 0:
        found = train([Setup(calls="ssssss"), USUAL], WAIT_S)
    else:
        found = train([USUAL, Setup(calls="ss")], WAIT_S)
        os.kill(os.getpid(), signal.SIGSTOP)
    raise RuntimeError(f"{found.kind} after {found.num_calls} calls: {found.text}")


@slow
def test_a_peer_that_hangs_ends_the_step_within_the_time_out_of_the_group() -> None:
    """F2: not after half an hour."""
    with pytest.raises(RanksFailed) as caught:
        run_ranks(hang, 2, timeout_s=20)
    assert "RankError after 2 calls: rank 0 has waited in vain for rank 1" in caught.value.failures[0]
