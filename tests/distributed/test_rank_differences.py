"""Ranks that differ end with a `RankError` on every rank, soon, which names the difference (S11, SAFE-1).

One row for each way to differ. Each rank builds and trains as its row says; rank 1 is the odd one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.distributed.ranks import run_ranks
from torch import Tensor, nn
from torch.optim import Optimizer

import wholestep
from wholestep import RankError, WholestepError

pytestmark = pytest.mark.distributed

SOON_S = 10.0
WAIT_S = 4.0
"""The time-out of the group where a rank has to be waited for in vain."""


@dataclass(frozen=True)
class Setup:
    """What one rank builds, and how it calls its step."""

    order: tuple[str, ...] = ("first", "second")
    width: int = 4
    buffer: int | None = 3
    dtype: torch.dtype = torch.float32
    frozen: str = ""
    mode: str = "train"
    optimizer: str = "AdamW"
    lr: float = 0.1
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.99)
    groups: int = 1
    max_norm: float = 1.0
    clips: bool = True
    shrinks: float | None = None
    decay: float = 1.0
    later_norm: float | None = None
    later_mode: str | None = None
    options: tuple[tuple[str, Any], ...] = ()
    stateful: bool = False
    num_calls: int = 6


USUAL = Setup()


class Twin(nn.Module):
    """Two layers of one shape: mixed up, nobody would notice."""

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        for name in setup.order:
            self.add_module(name, nn.Linear(4, setup.width) if name == "second" else nn.Linear(4, 4))
        if setup.buffer is not None:
            self.register_buffer("scale", torch.ones(setup.buffer))

    def forward(self, x: Tensor) -> Tensor:
        return self.get_submodule("second")(torch.tanh(self.get_submodule("first")(x)))


def make_step(setup: Setup, holder: dict[str, float]) -> Callable[..., Tensor]:
    def train_step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        if setup.clips:
            nn.utils.clip_grad_norm_(model.parameters(), holder["max_norm"])
        optimizer.step()
        if setup.shrinks is not None:
            with torch.no_grad():
                for parameter in model.parameters():
                    grad = parameter.grad
                    assert grad is not None
                    parameter.mul_(1 - setup.shrinks * grad.norm().item())
        return loss

    return train_step


def make_optimizer(setup: Setup, model: nn.Module) -> Optimizer:
    parameters = list(model.parameters())
    groups = [{"params": parameters[index :: setup.groups]} for index in range(setup.groups)]
    if setup.optimizer == "SGD":
        return torch.optim.SGD(groups, lr=setup.lr, weight_decay=setup.weight_decay)
    kind: Any = getattr(torch.optim, setup.optimizer)
    optimizer = kind(groups, lr=setup.lr, weight_decay=setup.weight_decay, betas=setup.betas)
    if setup.stateful:
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


@dataclass(frozen=True)
class Ending:
    """How a rank's training ended."""

    kind: str
    text: str
    seconds: float
    num_calls: int
    parameters: dict[str, Tensor]


def train(setups: list[Setup], timeout_s: float | None = None) -> Ending:
    if timeout_s is not None:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s))  # pyright: ignore[reportPrivateUsage]
    setup = setups[dist.get_rank()]
    torch.manual_seed(dist.get_rank())
    model = Twin(setup).to(setup.dtype).train(setup.mode == "train")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name != setup.frozen)
    optimizer = make_optimizer(setup, model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, setup.decay)
    holder = {"max_norm": setup.max_norm}
    step = wholestep.compile(make_step(setup, holder), data_parallel="replicate", **dict(setup.options))
    dist.barrier()
    started, done = time.monotonic(), 0
    kind, text = "none", ""
    try:
        for number in range(setup.num_calls):
            if number == 3:
                holder["max_norm"] = setup.later_norm or setup.max_norm
                model.train((setup.later_mode or setup.mode) == "train")
            step(model, optimizer, torch.randn(3, 4, dtype=setup.dtype))
            done += 1
            scheduler.step()
        step.flush()
    except WholestepError as error:
        kind, text = type(error).__name__, str(error)
    seconds = time.monotonic() - started
    found = {} if kind != "none" else {name: value.detach().clone() for name, value in model.named_parameters()}
    return Ending(kind, text, seconds, done, found)


def endings(odd: Setup, usual: Setup = USUAL, timeout_s: float | None = None) -> list[Ending]:
    return run_ranks(train, 2, [usual, odd], timeout_s, timeout_s=40)


def assert_refused(found: list[Ending], *named: str) -> None:
    for ending in found:
        assert ending.kind == RankError.__name__, ending
        assert ending.seconds < SOON_S, ending
        assert "\n" not in ending.text, ending
        for name in named:
            assert name in ending.text, ending


slow = pytest.mark.slow
DIFFERENCES: dict[str, tuple[Setup, Setup, list[str]]] = {
    "another shape": (Setup(), Setup(width=5), ["second.weight", "(4, 4)", "(5, 4)"]),
    "another dtype": (Setup(), Setup(dtype=torch.float64), ["float32", "float64"]),
    "a frozen parameter": (Setup(), Setup(frozen="first.bias"), ["first.bias", "frozen"]),
    "an extra parameter": (Setup(), Setup(order=("first", "second", "third")), ["third.weight", "missing"]),
    "another buffer": (Setup(), Setup(buffer=4), ["scale", "(3,)", "(4,)"]),
    "no buffer": (Setup(), Setup(buffer=None), ["scale", "missing"]),
    "another mode": (Setup(), Setup(mode="eval"), ["mode", "'train'", "'eval'"]),
    "another optimizer": (Setup(), Setup(optimizer="SGD"), ["class of optimizer", "AdamW", "SGD"]),
    "a relative of the optimizer": (Setup(), Setup(optimizer="Adam"), ["class of optimizer", "Adam'"]),
    "another learning rate": (Setup(), Setup(lr=0.2), ["['lr']", "0.1", "0.2"]),
    "another weight decay": (Setup(), Setup(weight_decay=0.5), ["['weight_decay']", "0.01", "0.5"]),
    "other betas": (Setup(), Setup(betas=(0.5, 0.99)), ["['betas']", "0.9", "0.5"]),
    "other groups": (Setup(groups=2), Setup(groups=1), ["param_groups[1]"]),
    "state on one rank": (Setup(), Setup(stateful=True), ["state of first.weight", "missing"]),
    "another norm to clip to": (Setup(), Setup(max_norm=2.0), ["clipping", "1.0", "2.0"]),
    "another number in the update": (
        Setup(shrinks=0.01),
        Setup(shrinks=0.02),
        ["clipping", "(0.01)", "(0.02)"],
    ),
    "no clipping": (Setup(), Setup(clips=False), ["clipping"]),
    "another order, where it matters": (Setup(), Setup(order=("second", "first")), ["clipping and updates"]),
    "another schedule of the rate": (Setup(), Setup(decay=0.5), ["lr", "0.05"]),
    "other passes": (Setup(), Setup(options=(("passes", "cse,dce,reinplace"),)), ["passes"]),
    "checks on one rank": (Setup(), Setup(options=(("verify", 1),)), ["verify"]),
}
QUICK = ("another shape", "another optimizer", "another learning rate", "another norm to clip to", "another mode")


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=slow) for name in DIFFERENCES])
def test_data_parallel_ranks_that_differ(name: str) -> None:
    usual, odd, named = DIFFERENCES[name]
    assert_refused(endings(odd, usual), "rank 0", "rank 1", *named)


def test_parameters_in_another_order_are_matched_by_name() -> None:
    """S11: without clipping, whose sum depends on the order, ranks train one model."""
    usual = Setup(clips=False)
    first, second = endings(replace(usual, order=("second", "first")), usual)
    assert (first.kind, second.kind) == ("none", "none"), (first, second)
    assert first.parameters.keys() == second.parameters.keys()
    for name, value in first.parameters.items():
        assert torch.equal(value, second.parameters[name]), name


@pytest.mark.parametrize(
    "odd",
    [
        pytest.param(Setup(later_norm=2.0), id="another norm later", marks=slow),
        pytest.param(Setup(later_mode="eval"), id="another mode later", marks=slow),
        pytest.param(Setup(num_calls=4), id="a rank that stops calling"),
        pytest.param(Setup(num_calls=0), id="a rank that never calls", marks=slow),
    ],
)
def test_what_only_one_rank_does_later_ends_within_the_time_out_of_the_group(odd: Setup) -> None:
    """The others are in a collective by then, or agree on nothing new: they learn what they waited for in vain."""
    found = endings(odd, timeout_s=WAIT_S)
    waiting = [ending for ending, setup in zip(found, (Setup(), odd), strict=True) if setup.num_calls == 6]
    assert_refused(waiting)
    is_new = odd.num_calls == 6
    said = ("must change on all of them in the same call",) if is_new else ("called the step", "equally often")
    assert any(text in ending.text for ending in waiting for text in said)
