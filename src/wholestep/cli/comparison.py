"""Train the same model several times, in eager and compiled, and keep what there is to compare."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR

from wholestep.api import CompiledStep
from wholestep.cost import measure_peak, profile_memory
from wholestep.zoo.case import Batch

TrainStep = Callable[[nn.Module, Optimizer, Batch], torch.Tensor]
Window = list[tuple[Batch, int]]
"""Consecutive steps: the batch of each, and the seed its dropout draws from."""

# The first step captures. The next two are measured together: a call may leave work for the one behind it. None of them
# is timed.
_NUM_UNTIMED = 3
_MEASURED_TURN = 1
_WINDOW_STEPS = 8
MIN_STEPS = _NUM_UNTIMED + 1

# What float32 results may differ by before they count as different: the defaults of torch.testing.assert_close.
_RELATIVE_TOLERANCE = 1.3e-6
_ABSOLUTE_TOLERANCE = 1e-5
# Sums of more than two ranks are rounded in an order that depends on the buckets, and training magnifies what differs.
_RELATIVE_TOLERANCE_OF_MANY = 1e-3


@dataclass
class Side:
    """One of the trainings: its own model, optimizer and schedule."""

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

    @property
    def compiled(self) -> CompiledStep:
        """The step, of a side that is compiled."""
        assert isinstance(self.step, CompiledStep)
        return self.step

    def train(self, window: Window, *, is_measured: bool = False) -> None:
        """Take some steps; nothing is pending behind them."""
        if is_measured:
            self.peak_bytes = measure_peak(self._train, window, held=(self.model, self.optimizer)).peak_bytes
        else:
            self._train(window)

    def _train(self, window: Window) -> None:
        for number, (batch, seed) in enumerate(window, start=1):
            torch.manual_seed(seed)
            started = time.perf_counter()
            loss = self.step(self.model, self.optimizer, batch)
            if number == len(window) and isinstance(self.step, CompiledStep):
                self.step.flush()
            self.seconds.append(time.perf_counter() - started)
            self.losses.append(loss.item())
            self.schedule.step()

    @property
    def median_seconds(self) -> float:
        """The median time of a step, without those that capture or are measured."""
        return statistics.median(self.seconds[_NUM_UNTIMED:])

    @property
    def predicted_peak_bytes(self) -> int:
        """Of a compiled side, in the worst of the calls that were measured."""
        graphs = self.compiled.iteration
        return max(profile_memory(graph).peak_bytes for graph in (graphs.setup, graphs.main))


@dataclass(frozen=True)
class Difference:
    """How far a training is from the eager one; on several ranks, on the rank where it is farthest."""

    loss: float
    parameters: float

    @staticmethod
    def between(eager: Side, other: Side) -> Difference:
        losses = [abs(a - b) for a, b in zip(eager.losses, other.losses, strict=True)]
        pairs = zip(eager.model.parameters(), other.model.parameters(), strict=True)
        parameters = [float((a.detach() - b.detach()).abs().max()) for a, b in pairs]
        farthest = torch.tensor([_worst(losses), _worst(parameters)], dtype=torch.float64)
        if dist.is_initialized():
            dist.all_reduce(farthest, dist.ReduceOp.MAX)
        return Difference(*farthest.tolist())


def _worst(gaps: Sequence[float]) -> float:
    return max(gap if math.isfinite(gap) else math.inf for gap in gaps)


@dataclass(frozen=True)
class Comparison:
    """The trainings after their last step: the eager one first, then one or more compiled ones, by name."""

    sides: dict[str, Side]
    num_ranks: int
    differences: dict[str, Difference]

    @property
    def eager(self) -> Side:
        return next(iter(self.sides.values()))

    @property
    def compiled(self) -> dict[str, Side]:
        return dict(list(self.sides.items())[1:])

    @property
    def main(self) -> Side:
        """The compiled training with nothing but defaults."""
        return next(iter(self.compiled.values()))

    @property
    def agrees(self) -> bool:
        """Whether every loss of every compiled training is eager's but for rounding."""
        relative = _RELATIVE_TOLERANCE if self.num_ranks <= 2 else _RELATIVE_TOLERANCE_OF_MANY
        smallest = min(abs(loss) for loss in self.eager.losses)
        limit = max(_ABSOLUTE_TOLERANCE, relative * smallest)
        return all(difference.loss <= limit for difference in self.differences.values())


def compare(
    sides: dict[str, Side], make_batch: Callable[[int], tuple[Batch, int]], num_steps: int, on_step: Callable[..., None]
) -> Comparison:
    """Train all sides on the same batches and random numbers, some steps each in turn.

    Taking turns, and changing who goes first, lets whatever else the machine does slow down all alike. A turn has
    several steps, since what one leaves travelling must not travel at the expense of another side.
    """
    is_parallel = dist.is_initialized()
    for turn, numbers in enumerate(_turns(num_steps)):
        window = [make_batch(number) for number in numbers]
        order = list(sides.values())
        for _ in range(turn % len(order)):
            order.append(order.pop(0))
        for side in order:
            if is_parallel:
                dist.barrier()
            side.train(window, is_measured=turn == _MEASURED_TURN)
        for loss in order[0].losses[-len(window) :]:
            on_step(loss)
    eager, *others = sides
    differences = {name: Difference.between(sides[eager], sides[name]) for name in others}
    return Comparison(sides, dist.get_world_size() if is_parallel else 1, differences)


def _turns(num_steps: int) -> Iterator[range]:
    """Numbers of the steps of each turn."""
    yield range(1)
    yield range(1, _NUM_UNTIMED)
    for start in range(_NUM_UNTIMED, num_steps, _WINDOW_STEPS):
        yield range(start, min(start + _WINDOW_STEPS, num_steps))
