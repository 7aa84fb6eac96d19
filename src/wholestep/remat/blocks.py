"""A program as a chain of blocks: where the forward narrows to few bytes, and which late ops belong to which block.

Between two layers of a network little more than one tensor is alive. Such places count, and those where the bytes alive
have been, and will be, a good deal more (`_CONTRAST`). What lives across most of the forward (masks, rotary tables, an
encoder's output) is context and ignored, and so is what is very small.

    forward      [ block 0 ]x1[ block 1 ]x2[ block 2 ]
    late         [ segment 2 ][ segment 1 ][ segment 0 ]  (optimizer)

A late op belongs to the segment of the last block that it, or a late op behind it, reads from.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from wholestep.remat.problem import INPUT, Problem

_LARGE_SHARE = 0.1
_CONTRAST = 1.25
# A value that lives across more of the forward than this is context; a forward shorter than that is not cut.
_CONTEXT_SHARE = 0.6
_MIN_RUN_SHARE = 0.05
# Blocks of less than this share of an average block's cost are joined to the next.
_MIN_COST_SHARE = 0.1
# A value this small beside the largest one is not worth a thought.
_SMALL_SHARE = 1e-3


@dataclass(frozen=True)
class Block:
    """Forward ops between two narrow places, the late ops that belong to them, and the values that leave the block.

    `borders` are its values that later blocks read in the forward; `held_bytes` is what late ops of other segments hold
    while this one's run.
    """

    forward: tuple[int, ...]
    late: tuple[int, ...]
    borders: frozenset[int]
    held_bytes: int


@dataclass(frozen=True)
class Chain:
    """Blocks of one forward and the late ops behind it; `context` are values to keep whatever happens."""

    blocks: tuple[Block, ...]
    context: frozenset[int]

    @property
    def starts(self) -> frozenset[int]:
        """The late ops with which segments begin, if every block has its own."""
        return frozenset(block.late[0] for block in self.blocks if block.late)


def find_chains(problem: Problem) -> list[Chain]:
    """All chains of a program: one for each forward that late ops follow (one per micro-batch)."""
    chains: list[Chain] = []
    for forward, late in _runs(problem):
        cutter = _Cutter(problem, forward, late)
        chains.append(Chain(cutter.blocks(), cutter.context))
    return chains


def _runs(problem: Problem) -> list[tuple[list[int], list[int]]]:
    """Forward ops and the late ops behind them, as often as they alternate; few forward ops in between do not count."""
    total_bytes = sum(problem.num_bytes(problem.ops[op].makes) for op in problem.forward_ops)
    stretches: list[tuple[bool, list[int]]] = []
    for index, op in enumerate(problem.ops):
        if not op.runs:
            continue
        if not stretches or stretches[-1][0] != op.is_late:
            stretches.append((op.is_late, []))
        stretches[-1][1].append(index)
    runs: list[tuple[list[int], list[int]]] = []
    for is_late, ops in stretches:
        if is_late:
            if runs:
                runs[-1][1].extend(ops)
            continue
        made_bytes = sum(problem.num_bytes(problem.ops[op].makes) for op in ops)
        if not runs or (runs[-1][1] and made_bytes >= _MIN_RUN_SHARE * total_bytes):
            runs.append((ops, []))
        elif not runs[-1][1]:
            runs[-1][0].extend(ops)
    return runs


def _valleys(live: list[int]) -> list[int]:
    """Places before and behind which a good deal more is alive."""
    cuts: list[int] = []
    lowest, lowest_at, highest_before, is_open = 0, -1, 0, False
    for position, num_bytes in enumerate(live):
        if is_open and num_bytes >= _CONTRAST * max(lowest, 1):
            cuts.append(lowest_at)
            is_open, highest_before = False, num_bytes
        if not is_open:
            highest_before = max(highest_before, num_bytes)
            if num_bytes * _CONTRAST <= highest_before and num_bytes > 0:
                is_open, lowest, lowest_at = True, num_bytes, position
        elif 0 < num_bytes < lowest:
            lowest, lowest_at = num_bytes, position
    return cuts


def _low_ones(cuts: list[int], live: list[int]) -> list[int]:
    """Without cuts that lie a good deal higher than both their neighbours: those are inside a layer."""
    cuts = list(cuts)
    while True:
        excess = [
            live[cut]
            / max(1, max((live[cuts[i]] for i in (index - 1, index + 1) if 0 <= i < len(cuts)), default=live[cut]))
            for index, cut in enumerate(cuts)
        ]
        highest = max(range(len(cuts)), key=excess.__getitem__, default=None)
        if highest is None or excess[highest] <= _CONTRAST:
            return cuts
        del cuts[highest]


class _Cutter:
    """Cuts one run. `cuts` are positions in its forward: a cut at `p` lies behind the op at `p`."""

    def __init__(self, problem: Problem, forward: Sequence[int], late: Sequence[int]) -> None:
        self.problem = problem
        self.forward = forward
        self.late = late
        self.position = {op: index for index, op in enumerate(forward)}
        self.last_read = {
            value: index
            for index, op in enumerate(forward)
            for value in problem.ops[op].makes
            if not problem.values[value].fused_own
        }
        for index, op in enumerate(forward):
            self.last_read |= {value: index for value in problem.own_reads[op] if value in self.last_read}

    @cached_property
    def context(self) -> frozenset[int]:
        values = self.problem.values
        long = _CONTEXT_SHARE * len(self.forward)
        small_bytes = _SMALL_SHARE * max((values[value].num_bytes for value in self.last_read), default=0)
        made = [value for op in self.forward for value in self.problem.ops[op].makes]
        return frozenset(
            value
            for value in made
            if values[value].num_bytes <= small_bytes
            or self.last_read.get(value, 0) - self.position[values[value].maker] > long
        )

    @cached_property
    def cuts(self) -> list[int]:
        live = self._live_bytes()
        found = sorted({*self._narrow(), *_valleys(live)})
        allowed = [cut for cut in found if cut < len(live) - 1 and self._may_be_kept(cut)]
        return self._not_too_near(_low_ones(self._not_too_near(allowed, live), live), live)

    def _narrow(self) -> list[int]:
        """Places with one large value alive beside small ones: for each such value the one with the fewest bytes."""
        num_bytes = {value: self.problem.values[value].num_bytes for value in self.last_read}
        lowest: dict[int, tuple[int, int]] = {}
        alive: set[int] = set()
        for position, op in enumerate(self.forward):
            made = [value for value in self.problem.ops[op].makes if value in self.last_read]
            alive.update(value for value in made if value not in self.context)
            alive = {value for value in alive if self.last_read[value] > position}
            large_bytes = _LARGE_SHARE * max((num_bytes[value] for value in alive), default=0)
            large = [value for value in alive if num_bytes[value] > large_bytes]
            if len(large) == 1:
                total = sum(num_bytes[value] for value in alive)
                lowest[large[0]] = min(lowest.get(large[0], (total, position)), (total, position))
        return sorted(position for _, position in lowest.values())

    def _not_too_near(self, cuts: list[int], live: list[int]) -> list[int]:
        """Without cuts between which next to nothing is computed: of two such the lower one stays."""
        costs = [self.problem.ops[op].cost for op in self.forward]
        enough = _MIN_COST_SHARE * sum(costs) / (len(cuts) + 1)
        chosen: list[int] = []
        for cut in cuts:
            if chosen and sum(costs[chosen[-1] + 1 : cut + 1]) < enough:
                if live[cut] < live[chosen[-1]]:
                    chosen[-1] = cut
            else:
                chosen.append(cut)
        return chosen

    def _may_be_kept(self, cut: int) -> bool:
        """Whether the values across a cut may be kept; inside a checkpoint region they may not."""
        return all(
            value not in self.problem.must_drop
            for value, last in self.last_read.items()
            if self.position[self.problem.values[value].maker] <= cut < last and value not in self.context
        )

    def _live_bytes(self) -> list[int]:
        """Bytes that are still to be read in the forward, behind each op."""
        change = [0] * (len(self.forward) + 1)
        for value, last in self.last_read.items():
            made = self.position[self.problem.values[value].maker]
            if value not in self.context and last > made:
                change[made] += self.problem.values[value].num_bytes
                change[last] -= self.problem.values[value].num_bytes
        live: list[int] = []
        for difference in change[:-1]:
            live.append((live[-1] if live else 0) + difference)
        return live

    @cached_property
    def _block_of(self) -> list[int]:
        """By position in the forward."""
        return [bisect.bisect_left(self.cuts, position) for position in range(len(self.forward))]

    @cached_property
    def segments(self) -> list[int]:
        """By position among the late ops: the last block that this one or any behind it reads from."""
        segments: list[int] = []
        current = 0
        for op in reversed(self.late):
            current = max(current, *(self._block_read(value) for value in self.problem.own_reads[op]), 0)
            segments.append(current)
        return segments[::-1]

    def _block_read(self, value: int) -> int:
        """The block a value comes from, by way of ops that have no place of their own; 0 for all others."""
        maker = self.problem.values[value].maker
        if maker == INPUT or value in self.context or self.problem.ops[maker].is_late:
            return 0
        if maker in self.position:
            return self._block_of[self.position[maker]]
        return max((self._block_read(source) for source in self.problem.ops[maker].reads), default=0)

    def blocks(self) -> tuple[Block, ...]:
        num_blocks = len(self.cuts) + 1
        forward: list[list[int]] = [[] for _ in range(num_blocks)]
        late: list[list[int]] = [[] for _ in range(num_blocks)]
        for position, op in enumerate(self.forward):
            forward[self._block_of[position]].append(op)
        for op, segment in zip(self.late, self.segments):
            late[segment].append(op)
        helpers = self._helpers(late)
        held = self._held_bytes(late)
        return tuple(
            Block(
                tuple(sorted({*helpers[block], *forward[block]})), tuple(late[block]), self._borders(block), held[block]
            )
            for block in range(num_blocks)
        )

    def _borders(self, block: int) -> frozenset[int]:
        block_of = self._block_of
        return frozenset(
            value
            for value, last in self.last_read.items()
            if block_of[self.position[self.problem.values[value].maker]] == block and block_of[last] > block
        )

    def _helpers(self, late: list[list[int]]) -> list[list[int]]:
        """Ops without a place of their own, with every block whose late ops ask for them."""
        helpers: list[list[int]] = []
        for ops in late:
            found: set[int] = set()
            stack = [value for op in ops for value in self.problem.ops[op].reads]
            while stack:
                maker = self.problem.values[stack.pop()].maker
                if maker != INPUT and not self.problem.ops[maker].runs and maker not in found:
                    found.add(maker)
                    stack += self.problem.ops[maker].reads
            helpers.append(sorted(found))
        return helpers

    def _held_bytes(self, late: list[list[int]]) -> list[int]:
        """By block: bytes of late values that live all through its segment without being read there."""
        problem = self.problem
        held: list[int] = []
        for ops in late:
            if not ops:
                held.append(0)
                continue
            touched = {value for op in ops for value in (*problem.ops[op].reads, *problem.ops[op].makes)}
            held.append(
                problem.num_bytes(
                    value
                    for value, item in enumerate(problem.values)
                    if item.maker != INPUT
                    and problem.ops[item.maker].is_late
                    and item.maker < ops[0]
                    and value not in touched
                    and (value in problem.returned or (problem.readers[value] and problem.readers[value][-1] > ops[-1]))
                )
            )
        return held
