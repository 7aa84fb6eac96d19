"""Train the same model twice, in eager and compiled, and keep what there is to compare."""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR

import wholestep
from wholestep._settings import Settings
from wholestep.api import CompiledStep
from wholestep.cost import measure_peak, profile_memory
from wholestep.errors import WholestepError
from wholestep.zoo import gpt
from wholestep.zoo.case import Batch

TrainStep = Callable[[nn.Module, Optimizer, Batch], torch.Tensor]

# The first step captures, the next runs the graph for the first time, this one is measured: none of them is timed.
_MEASURED_STEP = 2
MIN_STEPS = _MEASURED_STEP + 2

# What float32 results may differ by before they count as different: the defaults of torch.testing.assert_close.
_RELATIVE_TOLERANCE = 1.3e-6
_ABSOLUTE_TOLERANCE = 1e-5


def train_step(model: nn.Module, optimizer: Optimizer, batch: Batch) -> torch.Tensor:
    """What is compiled: everything between two batches."""
    optimizer.zero_grad()
    loss = gpt.loss(model, batch)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


@dataclass
class Side:
    """One of the two trainings: its own model, optimizer and schedule."""

    step: TrainStep
    model: nn.Module
    optimizer: Optimizer
    schedule: CosineAnnealingLR
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0

    @staticmethod
    def of(step: TrainStep, model: nn.Module, num_steps: int) -> Side:
        optimizer = AdamW(model.parameters(), lr=1e-3)
        return Side(step, model, optimizer, CosineAnnealingLR(optimizer, num_steps))

    def train(self, batch: Batch, seed: int) -> None:
        """Take one step; dropout draws from `seed`."""
        torch.manual_seed(seed)
        started = time.perf_counter()
        if len(self.losses) == _MEASURED_STEP:
            measured = measure_peak(self.step, self.model, self.optimizer, batch)
            loss, self.peak_bytes = measured.result, measured.peak_bytes
        else:
            loss = self.step(self.model, self.optimizer, batch)
        self.seconds.append(time.perf_counter() - started)
        self.losses.append(loss.item())
        self.schedule.step()

    @property
    def median_seconds(self) -> float:
        """The median time of a step, without those that capture or measure."""
        return statistics.median(self.seconds[_MEASURED_STEP + 1 :])


@dataclass(frozen=True)
class Comparison:
    """Both trainings after their last step."""

    eager: Side
    compiled: Side
    step: CompiledStep

    @property
    def max_loss_difference(self) -> float:
        pairs = zip(self.eager.losses, self.compiled.losses, strict=True)
        return max(abs(a - b) if math.isfinite(a - b) else math.inf for a, b in pairs)

    @property
    def max_parameter_difference(self) -> float:
        pairs = zip(self.eager.model.parameters(), self.compiled.model.parameters(), strict=True)
        gaps = [float((a.detach() - b.detach()).abs().max()) for a, b in pairs]
        return max(gap if math.isfinite(gap) else math.inf for gap in gaps)

    @property
    def predicted_peak_bytes(self) -> int:
        return profile_memory(self.step.graph).peak_bytes

    @property
    def agrees(self) -> bool:
        """Whether every loss is the same but for rounding."""
        pairs = zip(self.eager.losses, self.compiled.losses, strict=True)
        return all(math.isclose(a, b, rel_tol=_RELATIVE_TOLERANCE, abs_tol=_ABSOLUTE_TOLERANCE) for a, b in pairs)


def compare(
    model: nn.Module, make_batch: Callable[[int], Batch], num_steps: int, on_step: Callable[[float], None]
) -> Comparison:
    """Train two copies of `model` on the same batches and random numbers, step by step in turn.

    Taking turns, and changing who goes first, lets whatever else the machine does slow down both alike.
    """
    if Settings.from_environ().disable:
        raise WholestepError("there is nothing to compare with eager while WHOLESTEP_DISABLE is set; unset it")
    step = wholestep.compile(train_step)
    eager = Side.of(train_step, copy.deepcopy(model), num_steps)
    compiled = Side.of(step, copy.deepcopy(model), num_steps)
    for number in range(num_steps):
        batch = make_batch(number)
        for side in (eager, compiled) if number % 2 == 0 else (compiled, eager):
            side.train(batch, seed=number)
        on_step(compiled.losses[-1])
    return Comparison(eager, compiled, step)
