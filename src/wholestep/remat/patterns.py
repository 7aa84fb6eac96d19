"""What can be kept inside one block: a list of choices worth considering, from everything to nothing.

A pattern is judged on its block alone: how many bytes it keeps until the block's late ops run, how high memory goes
then (or in the block's forward), what it costs. Equal blocks (repeated layers) share their patterns.

Choices come from minimum cuts: ops are allowed to run again in the order of what they cost per byte they make, and each
cut keeps the fewest bytes given those. From each cut a walk adds the values that buy the most cost per byte.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from wholestep.remat.blocks import Block
from wholestep.remat.mincut import min_cut
from wholestep.remat.problem import INPUT, Decision, Problem
from wholestep.remat.simulate import Simulator

_MAX_PATTERNS = 24
# Patterns of several blocks together; fewer in long chains, where there are many places for each.
_MAX_TOGETHER, _MAX_TOGETHER_OF_MANY, _MANY_BLOCKS = 6, 3, 60
_MAX_CUTS = 12


@dataclass(frozen=True)
class Pattern:
    """Values to keep in a block (numbers of the whole problem), and what that means.

    `kept_bytes` stay until the block's late ops run; `peak_bytes` is the most that is alive while its own ops run, with
    what it keeps itself and what late ops of others hold, without what other blocks keep. `starts` are the late ops
    that begin a segment.
    """

    kept: frozenset[int]
    starts: frozenset[int]
    kept_bytes: int
    peak_bytes: int
    cost: float


# A value of some blocks in a row, by where it is made: number of the block, of its op there, of the op's result.
Place = tuple[int, int, int]


class PatternBook:
    """Patterns of blocks and of several blocks in a row, each kind of block worked out once."""

    def __init__(self, problem: Problem, blocks: Sequence[Block], context: frozenset[int]) -> None:
        self.problem = problem
        self.blocks = blocks
        self.context = context
        self._kinds = [self._kind(block) for block in blocks]
        self._max_together = _MAX_TOGETHER if len(blocks) <= _MANY_BLOCKS else _MAX_TOGETHER_OF_MANY
        self._known: dict[Any, list[tuple[tuple[Place, ...], bool, int, int, float]]] = {}

    def patterns(self, start: int, count: int = 1) -> list[Pattern]:
        """Patterns of `count` blocks from `start` on; of several blocks, only the last border is kept for sure."""
        blocks = self.blocks[start : start + count]
        key = tuple(self._kinds[start : start + count])
        if key not in self._known:
            self._known[key] = self._worked_out(blocks)
        held = min(block.held_bytes for block in blocks)
        all_starts = [block.late[0] for block in reversed(blocks) if block.late]
        return [
            Pattern(
                frozenset(self.problem.ops[blocks[block].forward[op]].makes[result] for block, op, result in places),
                frozenset(all_starts[:1] if is_joined else all_starts),
                kept_bytes,
                peak_bytes + held,
                cost,
            )
            for places, is_joined, kept_bytes, peak_bytes, cost in self._known[key]
        ]

    def _worked_out(self, blocks: Sequence[Block]) -> list[tuple[tuple[Place, ...], bool, int, int, float]]:
        ops = [op for block in blocks for op in block.forward] + [op for block in reversed(blocks) for op in block.late]
        part, number, position = self.problem.part(list(dict.fromkeys(ops)))
        origin = {local: whole for whole, local in number.items()}
        borders = frozenset(number[value] for value in blocks[-1].borders if value in number)
        context = frozenset(number[value] for value in self.context if value in number)
        found: list[tuple[frozenset[int], bool, int, int, float]] = []
        divisions = [frozenset[int]()]
        if len(blocks) > 1:
            divisions.append(frozenset(position[block.late[0]] for block in blocks if block.late))
        is_thorough = len(blocks) == 1 or len(self.blocks) <= _MANY_BLOCKS
        cuts = _cuts(part, _MAX_CUTS if is_thorough else self._max_together)
        for starts in divisions:
            judge = _Judge(part, borders, context, starts)
            patterns = judge.worthwhile(cuts) if len(blocks) == 1 else judge.sparse(cuts, self._max_together)
            found += [(kept, not starts, kept_bytes, peak, cost) for kept, kept_bytes, peak, cost in patterns]
        place = {
            value: (number, position, result)
            for number, block in enumerate(blocks)
            for position, op in enumerate(block.forward)
            for result, value in enumerate(self.problem.ops[op].makes)
        }
        return [
            (tuple(place[origin[value]] for value in sorted(kept) if origin[value] in place), joined, size, peak, cost)
            for kept, joined, size, peak, cost in found
        ]

    def _kind(self, block: Block) -> Any:
        """Everything that the judgement of a block depends on, with values numbered as they come."""
        problem = self.problem
        number: dict[int, int] = {}
        inside = {*block.forward, *block.late}
        last = max(inside)

        def named(value: int) -> Any:
            if value in number:
                return number[value]
            number[value] = len(number)
            item = problem.values[value]
            return (
                item.num_bytes,
                item.maker in inside,
                item.maker != INPUT and problem.ops[item.maker].is_late,
                value in self.context,
                value in block.borders,
                item.fused_own,
                item.fused_again,
                item.keep_cost,
                value in problem.must_keep,
                value in problem.must_drop,
                value in problem.returned or (problem.readers[value] and problem.readers[value][-1] > last),
            )

        return tuple(
            (
                op.kind,
                op.is_late,
                op.cost,
                op.unrepeatable,
                op.runs,
                tuple([named(value) for value in op.reads]),
                tuple([named(value) for value in op.makes]),
            )
            for op in (problem.ops[index] for index in (*block.forward, *block.late))
        )


def _cuts(part: Problem, num_prices: int) -> list[frozenset[int]]:
    """Minimum cuts for growing sets of ops that may run again: cheap ones per byte first."""

    def price(op: int) -> float:
        return part.ops[op].cost / max(1, part.num_bytes(part.ops[op].makes))

    prices = sorted({price(part.values[value].maker) for value in part.choices})
    limits = [*prices[:: max(1, math.ceil(len(prices) / num_prices))], math.inf]
    cuts = [min_cut(part, lambda op, limit=limit: price(op) <= limit or op in part.forced) for limit in limits]
    for through in (True, False):
        cuts.append(min_cut(part, lambda op: part.ops[op].flops == 0 or op in part.forced, through_unplaced=through))
    return list(dict.fromkeys(cuts))


@dataclass
class _Judge:
    """Tries choices on one part."""

    part: Problem
    borders: frozenset[int]
    context: frozenset[int]
    starts: frozenset[int]

    def __post_init__(self) -> None:
        self.simulator = Simulator(self.part)
        self.forced = frozenset(value for value in self.borders | self.context if self.part.droppable[value])
        self.choices = [value for value in self.part.choices if value not in self.forced]
        self.known: dict[frozenset[int], tuple[int, int, float]] = {}

    def judge(self, kept: frozenset[int]) -> tuple[int, int, float]:
        """Kept bytes, peak bytes and cost."""
        if kept not in self.known:
            outcome = self.simulator.outcome(Decision(kept | self.forced, self.starts))
            unread = [value for value in self.borders if not self._is_read_late(value)]
            self.known[kept] = (
                outcome.kept_bytes + self.part.num_bytes(unread),
                outcome.peak_bytes,
                outcome.cost,
            )
        return self.known[kept]

    def _is_read_late(self, value: int) -> bool:
        return any(self.part.ops[op].is_late for op in self.part.readers[value])

    def worthwhile(self, cuts: list[frozenset[int]]) -> list[tuple[frozenset[int], int, int, float]]:
        starts = [frozenset[int](), frozenset(self.choices), *cuts]
        for start in starts:
            self.judge(start & frozenset(self.choices))
        for start in list(self.known):
            self._walk_up(start)
        return self._pareto(_MAX_PATTERNS)

    def sparse(self, cuts: list[frozenset[int]], limit: int) -> list[tuple[frozenset[int], int, int, float]]:
        """A few choices for several blocks together: nothing, and what minimum cuts keep."""
        for start in (frozenset[int](), *cuts):
            self.judge(start & frozenset(self.choices))
        return self._pareto(limit)

    def _walk_up(self, start: frozenset[int]) -> None:
        """Add values one by one, those first that save the most cost per byte by themselves."""
        kept_bytes, _, cost = self.judge(start)
        gains: list[tuple[float, int]] = []
        for value in self.choices:
            if value not in start and cost > 0:
                more_bytes, _, less_cost = self.judge(start | {value})
                gains.append(((cost - less_cost) / max(1, more_bytes - kept_bytes), value))
        current = start
        for gain, value in sorted(gains, key=lambda item: (-item[0], item[1])):
            if gain > 0:
                current |= {value}
                self.judge(current)

    def _pareto(self, limit: int) -> list[tuple[frozenset[int], int, int, float]]:
        """Choices that no other one beats in kept bytes, peak and cost at once; evenly thinned by kept bytes."""
        found = sorted(
            ((kept_bytes, peak, cost, kept) for kept, (kept_bytes, peak, cost) in self.known.items()),
            key=lambda item: (*item[:3], sorted(item[3])),
        )
        front: list[tuple[int, int, float, frozenset[int]]] = []
        for item in found:
            if not any(
                other[0] <= item[0] and other[1] <= item[1] and other[2] <= item[2] * (1 + 1e-9) for other in front
            ):
                front.append(item)
        if len(front) > limit:
            step = (len(front) - 1) / (limit - 1)
            front = [front[round(index * step)] for index in range(limit)]
        return [(kept | self.forced, kept_bytes, peak, cost) for kept_bytes, peak, cost, kept in front]
