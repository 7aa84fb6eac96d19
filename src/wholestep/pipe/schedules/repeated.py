"""Schedules made of one block that repeats itself, chosen for how little it holds; V-Half and V-Min are two of them.

Every micro-batch does the same as the one before it, a period of T later. Steady state works if no two actions of a
rank overlap modulo T, which takes T >= the work of a rank for one micro-batch. A block is the time of each action of
micro-batch 0, laid along the way that a micro-batch takes (`lay_block`):

    each forward and then, on the way back, each input gradient as soon as its inputs are there and `step` - 1 slots
    later, or after that in the first gap of its rank, modulo T; then each weight gradient in the first gap after its
    input gradient

(a slot is T over the number of actions of a rank). A stage holds a micro-batch from its forward at f to the end of its
weight gradient at w, so a rank holds about (sum over its stages of w - f) / T: small steps for little memory, larger
ones for fewer gaps when ranks start and end. Each rank's actions, sorted by time, are the schedule. At its begin and
end ranks run ahead of the block's times, which shortens it and does not change what is held.

With two stages per rank, down and up again, F = I = W = 1 and T = 6:

             steps (F down, F up, I down, I up)   held, in 1F1B's micro-batches   bubble against 1F1B's
    V-Min    1 1 1 1                              (p+4)//3 of p                   0.5 to 0.7
    V-Half   1 2 1 1, and 2 1 2 1 if p is odd     (p+2)//2 of p                   0.42 to 0.58

for 2 to 33 ranks and at least as many micro-batches. (V-Min is never more than one slot above two thirds.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from wholestep.pipe.schedule import Action, Kind, Schedule, v_placement
from wholestep.pipe.schedules.shape import check_shape
from wholestep.pipe.simulate import StageCosts, arrivals
from wholestep.pipe.validate import Edge

# Sums of measured times are not exact; this share of a period is no overlap.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Block:
    """When micro-batch 0 starts on each stage; micro-batch i does so `period * i` later."""

    period: float
    forward: tuple[float, ...]
    input: tuple[float, ...]
    weight: tuple[float, ...]


def v_half(num_ranks: int, num_micro_batches: int) -> Schedule:
    """Half the activations of 1F1B at about half its bubble: (p+2)//2 micro-batches of both stages."""
    return _equal_stages("v-half", num_ranks, num_micro_batches, (2, 1, 2, 1) if num_ranks % 2 else (1, 2, 1, 1))


def v_min(num_ranks: int, num_micro_batches: int) -> Schedule:
    """A third of the activations of 1F1B at two thirds of its bubble: (p+4)//3 micro-batches of both stages."""
    return _equal_stages("v-min", num_ranks, num_micro_batches, (1, 1, 1, 1))


def _equal_stages(name: str, num_ranks: int, num_micro_batches: int, steps: tuple[float, ...]) -> Schedule:
    check_shape(name, num_ranks, num_micro_batches, 2)
    stage_ranks = v_placement(num_ranks)
    block = lay_block(stage_ranks, [StageCosts()] * len(stage_ranks), None, 6.0, steps)
    assert block is not None, "slots of equal length leave no gap that is too short"
    return repeat_block(name, block, stage_ranks, num_micro_batches)


def repeat_block(name: str, block: Block, stage_ranks: tuple[int, ...], num_micro_batches: int) -> Schedule:
    """The schedule of so many blocks, one after the other.

    Actions due at the same time (they take none) are in the order of data: F before I before W, the stages of F
    upwards, those of I downwards.
    """
    timed: list[list[tuple[float, Kind, int, Action]]] = [[] for _ in range(max(stage_ranks) + 1)]
    rows = ((Kind.FORWARD, block.forward, 1), (Kind.INPUT, block.input, -1), (Kind.WEIGHT, block.weight, -1))
    for kind, times, direction in rows:
        for stage, time in enumerate(times):
            for index in range(num_micro_batches):
                due = time + block.period * index
                timed[stage_ranks[stage]].append((due, kind, direction * stage, Action(kind, stage, index)))
    actions = (tuple(entry[3] for entry in sorted(row, key=lambda entry: entry[:3])) for row in timed)
    return Schedule(name, tuple(actions), stage_ranks, num_micro_batches)


def lay_block(
    stage_ranks: tuple[int, ...],
    costs: Sequence[StageCosts],
    transfers: Mapping[Edge, float] | None,
    period: float,
    steps: Sequence[float],
) -> Block | None:
    """The times of one micro-batch, or None if some action finds no gap that is long enough.

    `steps` are those of the forwards of each rank's first, second ... stage, then those of the input gradients of the
    last, the last but one ... stage.
    """
    num_stages, num_ranks = len(stage_ranks), max(stage_ranks) + 1
    forward_from, backward_from = arrivals(stage_ranks, transfers)
    slot = period * num_ranks / (3 * num_stages)
    ranks = [_Cycle(period) for _ in range(num_ranks)]
    forward, backward, weight = ([0.0] * num_stages for _ in range(3))
    for stage, sources in enumerate(forward_from):
        ready = max((forward[s] + costs[s].forward + travel for s, travel in sources), default=0.0)
        wait = slot * (steps[stage // num_ranks] - 1) if stage else 0.0
        forward[stage] = ranks[stage_ranks[stage]].place(ready + wait, costs[stage].forward)
    for stage in reversed(range(num_stages)):
        arrived = (backward[t] + costs[t].input + travel for t, travel in backward_from[stage])
        ready = max([forward[stage] + costs[stage].forward, *arrived])
        wait = slot * (steps[-1 - stage // num_ranks] - 1) if stage < num_stages - 1 else 0.0
        backward[stage] = ranks[stage_ranks[stage]].place(ready + wait, costs[stage].input)
    for stage in reversed(range(num_stages)):
        weight[stage] = ranks[stage_ranks[stage]].place(backward[stage] + costs[stage].input, costs[stage].weight)
    if not all(rank.has_fitted for rank in ranks):
        return None
    return Block(period, tuple(forward), tuple(backward), tuple(weight))


class _Cycle:
    """The actions of a rank in one period, which closes in a ring."""

    def __init__(self, period: float) -> None:
        self._period = period
        self._busy: list[tuple[float, float]] = []
        self.has_fitted = True

    def place(self, earliest: float, duration: float) -> float:
        """Where an action starts: as early as it may in a gap; `has_fitted` turns false if there is none."""
        ends = (earliest + (start + length - earliest) % self._period for start, length in self._busy)
        free = (start for start in sorted([earliest, *ends]) if self._is_free(start, duration))
        start = next(free, None)
        self.has_fitted = self.has_fitted and start is not None
        self._busy.append((earliest if start is None else start, duration))
        return self._busy[-1][0]

    def _is_free(self, start: float, duration: float) -> bool:
        slack = _ROUNDING * self._period
        for other, length in self._busy:
            # A start that is a hair before the other one must not count as nearly a period after it.
            offset = (other - start + slack) % self._period - slack
            if offset < duration - slack or offset + length > self._period + slack:
                return False
        return True
