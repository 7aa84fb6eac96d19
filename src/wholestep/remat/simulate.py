"""What a choice of kept values means: which ops run again, when, and how many bytes are alive at each moment.

Ops run again just in time: in front of the first late op that needs them (by way of other repeated ops or directly),
in program order among themselves. Within one segment of late ops a value is computed again at most once and lives
until its last use there; another segment computes it anew.

The simulation walks the events backwards once. A value comes to life (seen from the end) at its last reader and is gone
before its maker; the bytes alive at an event are those that live across it, its arguments, and its results. An op that
works in place puts a result where the largest argument was that nobody needs any more, if it is large enough.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from wholestep.remat.problem import INPUT, Decision, Problem


class Event(NamedTuple):
    """One op that runs: in its own place (`segment` None) or again, for late ops of that segment."""

    op: int
    segment: int | None = None

    @property
    def is_again(self) -> bool:
        return self.segment is not None


@dataclass(frozen=True)
class Outcome:
    """What a choice leads to. Bytes are without resident ones; `cost`, `flops`, `moved_bytes` are of repeated ops."""

    peak_bytes: int
    kept_bytes: int
    cost: float
    flops: int
    moved_bytes: int
    num_again: int

    def fits(self, budget_bytes: float) -> bool:
        return self.peak_bytes <= budget_bytes


class Simulator:
    """Judges choices on one problem; made once, asked often."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.num_calls = 0
        self._reads = [op.reads for op in problem.ops]
        self._reads_again = [op.reads_again for op in problem.ops]
        self._makes = [op.makes for op in problem.ops]
        self._is_late = [op.is_late for op in problem.ops]
        self._in_place = [op.in_place for op in problem.ops]
        self._num_bytes = [value.num_bytes for value in problem.values]
        self._maker = [value.maker for value in problem.values]
        self._starts: frozenset[int] = frozenset()
        self._segment = [0] * len(problem.ops)
        self._is_counted = [value.maker != INPUT for value in problem.values]
        self._is_forward = [maker != INPUT and not problem.ops[maker].is_late for maker in self._maker]
        self._fused_own = [value.fused_own for value in problem.values]
        self._fused_again = [value.fused_again for value in problem.values]
        self._keep_cost = [value.keep_cost for value in problem.values]
        self._own_reads = problem.own_reads if problem.is_fused else self._reads
        self._own_place = [(index, (index, None)) for index, op in enumerate(problem.ops) if op.runs]
        self._never = [not droppable for droppable in problem.droppable]
        for value, maker in enumerate(self._maker):
            if maker != INPUT and not problem.ops[maker].runs:
                self._never[value] = False

    def outcome(self, decision: Decision) -> Outcome:
        """Peak and cost of keeping these values (and those that cannot be dropped) for late ops."""
        self.num_calls += 1
        is_kept = self.kept_flags(decision.kept)
        self._divide(decision.starts)
        events = self._events(is_kept)
        ops = self.problem.ops
        again = [ops[op] for op, segment in events if segment is not None]
        peak_bytes, kept_bytes, keep_cost, _ = self._walk(events, is_kept, None)
        return Outcome(
            peak_bytes,
            kept_bytes,
            keep_cost + sum(op.cost for op in again),
            sum(op.flops for op in again),
            sum(op.moved_bytes for op in again),
            len(again),
        )

    def events(self, decision: Decision) -> list[Event]:
        """Everything that runs, in order."""
        self._divide(decision.starts)
        return [Event(*event) for event in self._events(self.kept_flags(decision.kept))]

    def timeline(self, decision: Decision) -> list[int]:
        """Bytes alive at each event, without resident ones."""
        is_kept = self.kept_flags(decision.kept)
        self._divide(decision.starts)
        live: list[int] = []
        self._walk(self._events(is_kept), is_kept, live)
        return live[::-1]

    def segments(self, starts: Collection[int]) -> list[int]:
        """By op: the number of its segment."""
        numbers: list[int] = []
        current = 0
        for index in range(len(self._reads)):
            current += index in starts
            numbers.append(current)
        return numbers

    def live_values(self, decision: Decision, at: int) -> list[int]:
        """Values alive at an event, each as often as it is held."""
        is_kept = self.kept_flags(decision.kept)
        self._divide(decision.starts)
        return self._walk(self._events(is_kept), is_kept, None, at)[3]

    def _divide(self, starts: frozenset[int]) -> None:
        if starts != self._starts:
            self._starts, self._segment = starts, self.segments(starts)

    def kept_flags(self, kept: Iterable[int]) -> list[bool]:
        """By value: whether late ops read the original, because it is kept or cannot be dropped."""
        is_kept = list(self._never)
        for value in kept:
            is_kept[value] = True
        for value in self.problem.must_drop:
            is_kept[value] = False
        return is_kept

    def _events(self, is_kept: list[bool]) -> list[tuple[int, int | None]]:
        reads, maker, segment_of, is_late = self._reads, self._maker, self._segment, self._is_late
        first_need: list[dict[int, int] | None] = [None] * len(reads)
        for index in range(len(reads) - 1, -1, -1):
            if is_late[index]:
                segment = segment_of[index]
                for value in reads[index]:
                    if not is_kept[value]:
                        source = maker[value]
                        needs = first_need[source]
                        if needs is None:
                            first_need[source] = {segment: index}
                        else:
                            needs[segment] = index
                continue
            own = first_need[index]
            if own is None:
                continue
            for value in reads[index]:
                if not is_kept[value]:
                    source = maker[value]
                    needs = first_need[source]
                    if needs is None:
                        first_need[source] = dict(own)
                        continue
                    for segment, time in own.items():
                        known = needs.get(segment)
                        if known is None or time < known:
                            needs[segment] = time
        return self._merged(first_need)

    def _merged(self, first_need: list[dict[int, int] | None]) -> list[tuple[int, int | None]]:
        again_at: dict[int, list[tuple[int, int | None]]] = {}
        for index, needs in enumerate(first_need):
            if needs:
                for segment, time in needs.items():
                    again_at.setdefault(time, []).append((index, segment))
        events: list[tuple[int, int | None]] = []
        for index, event in self._own_place:
            if index in again_at:
                events += again_at[index]
            events.append(event)
        return events

    def _walk(
        self, events: list[tuple[int, int | None]], is_kept: list[bool], live_bytes: list[int] | None, at: int = -1
    ) -> tuple[int, int, float, list[int]]:
        """Peak bytes, kept bytes, what keeping costs, values alive at event `at`; bytes of events go to `live_bytes`.

        An instance of a value is its number, plus a multiple of their count for what a segment has computed again.
        """
        reads, makes, num_bytes, is_late = self._reads, self._makes, self._num_bytes, self._is_late
        segment_of, is_counted, count = self._segment, self._is_counted, len(self._num_bytes)
        is_forward, reads_again, in_place = self._is_forward, self._reads_again, self._in_place
        late_reads = self._late_reads(is_kept) if self.problem.is_fused else reads.__getitem__
        fused_own, fused_again, keep_costs, own_reads = (
            self._fused_own,
            self._fused_again,
            self._keep_cost,
            self._own_reads,
        )
        keep_cost = 0.0
        alive = set(self.problem.returned)
        current = sum(num_bytes[value] for value in alive)
        peak = kept_bytes = 0
        for position in range(len(events) - 1, -1, -1):
            index, segment = events[position]
            late_or_again = segment is not None or is_late[index]
            offset = 0
            if late_or_again:
                offset = ((segment_of[index] if segment is None else segment) + 1) * count
            read = late_reads(index) if late_or_again else own_reads[index]
            room = 0
            for value in read if segment is None else read + reads_again[index]:
                if not is_counted[value]:
                    continue
                is_original = not late_or_again or is_kept[value]
                key = value if is_original else value + offset
                if key not in alive:
                    alive.add(key)
                    current += num_bytes[value]
                    room = max(room, num_bytes[value])
                    if is_original and late_or_again and is_forward[value]:
                        kept_bytes += num_bytes[value]
                        keep_cost += keep_costs[value]
            is_fused = fused_own if segment is None else fused_again
            unread = 0
            made = 0
            largest = 0
            for value in makes[index]:
                key = value if segment is None else value + offset
                if key in alive:
                    alive.remove(key)
                    made += num_bytes[value]
                    largest = max(largest, num_bytes[value])
                elif not is_fused[value]:
                    unread += num_bytes[value]
            now = current + unread - (largest if in_place[index] and largest <= room else 0)
            if position == at:
                return peak, kept_bytes, keep_cost, [key % count for key in (*alive, *makes[index])]
            current -= made
            if live_bytes is not None:
                live_bytes.append(now)
            if now > peak:
                peak = now
        return peak, kept_bytes, keep_cost, []

    def _late_reads(self, is_kept: list[bool]) -> Callable[[int], tuple[int, ...]]:
        """What a late op, or one that runs again, reads from memory, looking through fused values.

        A late value that another segment reads is written: what it is made from may be gone by then.
        """
        reads, maker, is_late, segment_of = self._reads, self._maker, self._is_late, self._segment
        known: dict[int, tuple[int, ...]] = {}

        def of_op(index: int) -> tuple[int, ...]:
            if index not in known:
                known[index] = tuple(dict.fromkeys(item for value in reads[index] for item in of_value(value, index)))
            return known[index]

        def of_value(value: int, reader: int) -> tuple[int, ...]:
            source = maker[value]
            if source == INPUT:
                return (value,)
            if is_late[source]:
                is_near = segment_of[source] == segment_of[reader]
                return of_op(source) if self._fused_own[value] and is_near else (value,)
            return of_op(source) if self._fused_again[value] and not is_kept[value] else (value,)

        return of_op
