"""What rematerialization decides about: a program of ops over pieces of memory, as plain numbers.

A `Problem` is what is left of a graph when only time and memory count. *Values* are pieces of memory (storages, not
nodes: a view is its base). *Ops* make values from values, in program order. A forward op may run a second time, for the
sake of later ops; a late op (backward, collectives, optimizer) runs once. Which forward values are *kept* for late ops
is the decision; everything else they need is computed again just in time (`wholestep.remat.simulate`). Late ops come in
segments: what is computed again in one segment is not held for another.

    forward ops   f0 f1 f2 ...            late ops   b0 b1 b2 ...
    kept = {f1}:  f0 f1 f2 ...  [f2 b0] [b1] [f0 b2]         f2 and f0 run again, in front of who needs them
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

INPUT = -1


@dataclass(frozen=True)
class Op:
    """One op: values it reads and makes, what a second run costs, and why there must be none ("" if there may be).

    `reads_again` is read in addition by a second run (the state of a random number generator). `cost` is what decisions
    are made by, `flops` and `moved_bytes` are for reports. An op that works `in_place` may put a result where an
    argument was that nobody needs any more. `runs` is False for an op that only late ops need and that needs none of
    them: it has no place of its own, but runs when it is asked for.
    """

    name: str
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    is_late: bool = False
    cost: float = 0.0
    flops: int = 0
    moved_bytes: int = 0
    unrepeatable: str = ""
    reads_again: tuple[int, ...] = ()
    is_random: bool = False
    in_place: bool = False
    runs: bool = True
    module: str = ""
    kind: str = ""


@dataclass(frozen=True)
class Value:
    """One piece of memory: its size and the op that makes it, `INPUT` for what is there from the start.

    Inputs are resident: parameters, optimizer state, the batch. They are there before and after and not counted. What
    arrives at some moment and goes once it is used (tangents, what the call before has left) is made by an op without
    arguments at that moment.

    A compiler that fuses ops never writes some values to memory: whoever reads such a value reads what it is made from
    instead. `fused_own` says so of the first run (unless the value is kept), `fused_again` of second runs. `keep_cost`
    is what keeping the value costs by itself, for a fused one that it is written at all.
    """

    name: str
    num_bytes: int
    maker: int
    fused_own: bool = False
    fused_again: bool = False
    keep_cost: float = 0.0


@dataclass(frozen=True)
class Decision:
    """Forward values to keep for late ops, and the late ops with which a new segment begins."""

    kept: frozenset[int]
    starts: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Problem:
    """Ops in program order, values, and which values the program returns (they live to the end).

    `must_keep` and `must_drop` are values whose fate is decided already (annotations).
    """

    ops: tuple[Op, ...]
    values: tuple[Value, ...]
    returned: frozenset[int]
    must_keep: frozenset[int] = frozenset()
    must_drop: frozenset[int] = frozenset()
    resident_bytes: int = 0

    @cached_property
    def droppable(self) -> tuple[bool, ...]:
        """By value: whether it may be dropped and computed again."""
        return tuple(
            value.maker != INPUT
            and not self.ops[value.maker].is_late
            and not self.ops[value.maker].unrepeatable
            and index not in self.must_keep
            for index, value in enumerate(self.values)
        )

    @cached_property
    def choices(self) -> tuple[int, ...]:
        """Values that can be kept or dropped and whose fate matters."""
        return tuple(
            value
            for value in self.asked_for()
            if value not in self.must_drop and self.ops[self.values[value].maker].runs
        )

    def asked_for(self, *, through_unplaced: bool = True) -> list[int]:
        """Droppable values that late ops may ask for, directly or by way of repeated ops, in order."""
        asked: set[int] = set()
        for op in reversed(self.ops):
            counts = op.runs or through_unplaced
            if op.is_late or (counts and any(value in asked for value in op.makes)):
                asked.update(value for value in op.reads if self.droppable[value])
        return sorted(asked)

    @cached_property
    def forced(self) -> frozenset[int]:
        """Ops that run again in any case if they are asked for: they have no place of their own, or must be dropped."""
        return frozenset(
            index
            for index, op in enumerate(self.ops)
            if not op.is_late and (not op.runs or any(value in self.must_drop for value in op.makes))
        )

    @cached_property
    def forward_ops(self) -> tuple[int, ...]:
        return tuple(index for index, op in enumerate(self.ops) if not op.is_late)

    @cached_property
    def forward_cost(self) -> float:
        """What all forward ops cost together."""
        return sum(self.ops[index].cost for index in self.forward_ops)

    @cached_property
    def forward_flops(self) -> int:
        return sum(self.ops[index].flops for index in self.forward_ops)

    @cached_property
    def own_reads(self) -> tuple[tuple[int, ...], ...]:
        """By op: what its own run reads from memory, looking through fused values."""
        through: dict[int, tuple[int, ...]] = {}
        reads: list[tuple[int, ...]] = []
        for op in self.ops:
            reads.append(tuple(dict.fromkeys(item for value in op.reads for item in through.get(value, (value,)))))
            through |= {value: reads[-1] for value in op.makes if self.values[value].fused_own}
        return tuple(reads)

    @cached_property
    def is_fused(self) -> bool:
        """Whether any value is."""
        return any(value.fused_own or value.fused_again for value in self.values)

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """By value: ops that read it, in program order."""
        readers: list[list[int]] = [[] for _ in self.values]
        for index, op in enumerate(self.ops):
            for value in op.reads:
                readers[value].append(index)
        return tuple(tuple(indices) for indices in readers)

    def num_bytes(self, values: Iterable[int]) -> int:
        return sum(self.values[value].num_bytes for value in values)

    def part(self, ops: Sequence[int]) -> tuple[Problem, dict[int, int], dict[int, int]]:
        """The problem of some ops alone; returns it with the numbers of its values and ops in it (whole -> part).

        Forward values made elsewhere become resident: who keeps them pays for them. Late ones arrive in front of the
        first late op; those that are needed behind the last one are returned.
        """
        ops = sorted(ops)  # who reads comes behind who makes
        inside, last = set(ops), ops[-1]
        read = dict.fromkeys(value for op in ops for value in (*self.ops[op].reads, *self.ops[op].reads_again))
        entering = [value for value in read if self._is_late(value) and self.values[value].maker not in inside]
        order = [op for op in ops if not self.ops[op].is_late]
        arrival = len(order)
        position = {op: index for index, op in enumerate(order)}
        for op in ops:
            if self.ops[op].is_late:
                position[op] = len(position) + 1
        known = [*read, *(value for op in ops for value in self.ops[op].makes)]
        number = {value: index for index, value in enumerate(dict.fromkeys(known))}
        makers = {value: position.get(self.values[value].maker, INPUT) for value in number}
        makers |= dict.fromkeys(entering, arrival)
        parts = [self._renumbered(op, number) for op in order]
        parts.append(Op("arrival", (), tuple(number[value] for value in entering), is_late=True))
        parts += [self._renumbered(op, number) for op in ops if self.ops[op].is_late]
        returned = {
            number[value]
            for value in number
            if self._is_late(value)
            and (value in self.returned or (self.readers[value] and self.readers[value][-1] > last))
        }
        part = Problem(
            tuple(parts),
            tuple(replace(self.values[value], maker=makers[value]) for value in number),
            frozenset(returned),
            frozenset(number[value] for value in self.must_keep if value in number),
            frozenset(number[value] for value in self.must_drop if value in number),
        )
        return part, number, position

    def _renumbered(self, op: int, number: dict[int, int]) -> Op:
        old = self.ops[op]
        reads, makes, reads_again = (
            tuple(number[value] for value in values) for values in (old.reads, old.makes, old.reads_again)
        )
        return replace(old, reads=reads, makes=makes, reads_again=reads_again)

    def _is_late(self, value: int) -> bool:
        maker = self.values[value].maker
        return maker != INPUT and self.ops[maker].is_late
