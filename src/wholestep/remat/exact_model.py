"""The simulation of a choice (`wholestep.remat.simulate`) as formulas over bits, for CP-SAT.

Late ops stay in their order and segments are given, so that all that happens is a function of what is kept:

    keep(v)              value v is kept for late ops                                           the decision
    done(o, t)           op o has run again for its segment when late op t runs:
                         some v it makes is not kept, and read in the segment up to t,          (`_advanced`)
                         by a late op or by an op that is done itself
    live(v, e)           v is there, and read by event e or one behind it             (`_live_original`, `_live_again`)
    bytes of e           sum of live(v, e) * bytes(v) <= limit                                  (`add_event`)
    cost                 sum of done(o, last t of a segment) * cost(o), and of what keeping costs     (`_set_cost`)

Events are ops that run in their own place, and ops that run again in front of late op t. All of this is exact but for
ops that work in place: what they save is said too kindly if they have several results.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from wholestep.remat.formula import FALSE, TRUE, Formula
from wholestep.remat.problem import INPUT, Problem
from wholestep.remat.simulate import Event, Outcome, Simulator

# Costs become whole numbers: this many units are the dearest op. The cheapest is the cheapest but for a millionth.
_UNITS = 10**10
_SAME_COST = 1e-6

# An op that runs: the one at that time in its own place (None), or an op again, in front of the late op at that time.
Moment = tuple[int, int | None]


@dataclass(frozen=True)
class Limits:
    """What a choice has to keep to: the peak, and if that is said, the bytes it keeps."""

    peak_bytes: int
    kept_bytes: int | None

    def hold_for(self, outcome: Outcome) -> bool:
        return outcome.fits(self.peak_bytes) and (self.kept_bytes is None or outcome.kept_bytes <= self.kept_bytes)


@dataclass(frozen=True)
class Solution:
    """What CP-SAT says: choices kept (None: there is no solution, or none was found), final or not, and work done."""

    kept: frozenset[int] | None
    is_final: bool
    work: float


def moments_of(events: Sequence[Event]) -> list[Moment]:
    """When each of the simulator's events is."""
    moments: list[Moment] = []
    time = -1
    for op, segment in reversed(events):
        if segment is None:
            time = op
        moments.append((time, None if segment is None else op))
    return moments[::-1]


class ExactModel:
    """The formulas of one problem and its limits."""

    def __init__(self, problem: Problem, simulator: Simulator, starts: frozenset[int], limits: Limits) -> None:
        self.problem = problem
        self.formula = Formula()
        self.keep = [TRUE if is_kept else FALSE for is_kept in simulator.kept_flags(())]
        for value in problem.choices:
            self.keep[value] = self.formula.new_bit()
        self.segment = simulator.segments(starts)
        self._unit_bytes = math.gcd(*(value.num_bytes for value in problem.values)) or 1
        self._limit = limits.peak_bytes // self._unit_bytes
        self._states, self._ran = self._all_states()
        self._later = self._all_later()
        self._find_readers()
        self._events: set[Moment] = set()
        used = {value: self._is_used(value) for value in self._forward_values()}
        if limits.kept_bytes is not None:
            kept = [(self._size(value), bit) for value, bit in used.items()]
            self.formula.add_limit(kept, limits.kept_bytes // self._unit_bytes)
        self._set_cost(used)

    def _size(self, value: int) -> int:
        return self.problem.values[value].num_bytes // self._unit_bytes

    def _forward_values(self) -> list[int]:
        return [v for op in self.problem.forward_ops if self.problem.ops[op].runs for v in self.problem.ops[op].makes]

    def _all_states(self) -> tuple[list[dict[int, int]], list[dict[int, int]]]:
        """By op in its own place: what has run again for its segment by then. By segment: what has run in the end."""
        states: list[dict[int, int]] = []
        ran: list[dict[int, int]] = [{} for _ in range(self.segment[-1] + 1)]
        asked: set[int] = set()
        for index, op in enumerate(self.problem.ops):
            segment = self.segment[index]
            if not index or segment != self.segment[index - 1]:
                asked = set()
            if op.is_late:
                new = {value for value in op.reads if self.keep[value] != TRUE} - asked
                asked |= new
                ran[segment] = self._advanced(ran[segment], asked, new)
            states.append(ran[segment])
        return states, ran

    def _advanced(self, before: dict[int, int], asked: set[int], new: set[int]) -> dict[int, int]:
        """What has run again once late ops have asked for `new`, too."""
        if not new:
            return before
        problem, formula = self.problem, self.formula
        state = dict(before)
        changed = {problem.values[value].maker for value in new}
        for index in range(max(changed), -1, -1):
            if index not in changed:
                continue
            reasons: list[int] = []
            for value in problem.ops[index].makes:
                readers = [state[reader] for reader in problem.readers[value] if reader in state]
                needed = TRUE if value in asked else formula.either(*readers)
                reasons.append(formula.both(-self.keep[value], needed))
            done = formula.either(*reasons)
            if done in (FALSE, state.get(index, FALSE)):
                continue
            state[index] = done
            changed |= {problem.values[v].maker for v in problem.ops[index].reads if self.keep[v] != TRUE}
        return state

    def _all_later(self) -> list[dict[int, int]]:
        """By segment: what runs again in a segment behind it."""
        later: list[dict[int, int]] = [{} for _ in self._ran]
        for segment in range(len(later) - 2, -1, -1):
            for op in {*self._ran[segment + 1], *later[segment + 1]}:
                here, behind = self._ran[segment + 1].get(op, FALSE), later[segment + 1].get(op, FALSE)
                later[segment][op] = self.formula.either(here, behind)
        return later

    def _find_readers(self) -> None:
        """By value: who reads it from memory, and under which condition."""
        problem = self.problem
        self._own_readers: list[list[int]] = [[] for _ in problem.values]
        self._late_readers: list[list[tuple[int, int]]] = [[] for _ in problem.values]
        self._again_readers: list[list[tuple[int, int]]] = [[] for _ in problem.values]
        self._memory_reads: list[dict[int, int]] = []
        repeated = set[int]().union(*self._ran)
        for index, op in enumerate(problem.ops):
            reads = self._reads_from_memory(index)
            self._memory_reads.append(reads)
            if op.is_late:
                for value, condition in reads.items():
                    self._late_readers[value].append((index, condition))
                continue
            if op.runs:
                for value in problem.own_reads[index]:
                    self._own_readers[value].append(index)
            if index in repeated:
                for value, condition in (reads | dict.fromkeys(op.reads_again, TRUE)).items():
                    self._again_readers[value].append((index, condition))

    def _reads_from_memory(self, index: int) -> dict[int, int]:
        """What a late op or one that runs again reads, looking through fused values that are not kept."""
        ways: dict[int, list[int]] = {}
        for value in self.problem.ops[index].reads:
            item = self.problem.values[value]
            if item.maker == INPUT:
                continue
            is_late = self.problem.ops[item.maker].is_late
            direct, through = TRUE, FALSE
            if is_late and item.fused_own and self.segment[item.maker] == self.segment[index]:
                direct, through = FALSE, TRUE
            elif not is_late and item.fused_again:
                direct, through = self.keep[value], -self.keep[value]
            ways.setdefault(value, []).append(direct)
            if through != FALSE:
                for source, condition in self._memory_reads[item.maker].items():
                    ways.setdefault(source, []).append(self.formula.both(through, condition))
        reads = {value: self.formula.either(*conditions) for value, conditions in ways.items()}
        return {value: condition for value, condition in reads.items() if condition != FALSE}

    def knows(self, moment: Moment) -> bool:
        return moment in self._events

    def add_event(self, moment: Moment) -> None:
        """Bytes alive at an event are within the limit."""
        self._events.add(moment)
        time, again = moment
        problem = self.problem
        index = time if again is None else again
        terms: list[tuple[int, int]] = []
        for value, item in enumerate(problem.values):
            if item.num_bytes:
                terms.append((self._size(value), self._live_original(value, moment)))
                terms.append((self._size(value), self._live_again(value, moment)))
        for value in problem.ops[index].makes:
            item = problem.values[value]
            if not (item.fused_own if again is None else item.fused_again):
                terms.append((self._size(value), TRUE))
            elif again is None:
                terms.append((self._size(value), self._live_original(value, moment, behind=True, is_made=True)))
        if problem.ops[index].in_place:
            terms += self._in_place(moment)
        conditions = (
            () if again is None else (self._states[time].get(again, FALSE), -self._before(time).get(again, FALSE))
        )
        self.formula.add_limit(terms, self._limit, conditions)

    def _before(self, time: int) -> dict[int, int]:
        """What has run again for the segment before anything runs for the op at `time`."""
        return self._states[time - 1] if time and self.segment[time - 1] == self.segment[time] else {}

    def _live_original(self, value: int, moment: Moment, *, behind: bool = False, is_made: bool = False) -> int:
        """Whether what the own run of a value's op has made is needed at a moment, or (`behind`) after it."""
        problem, (time, again) = self.problem, moment
        maker = problem.values[value].maker
        if maker == INPUT or not problem.ops[maker].runs:
            return TRUE if value in problem.returned else FALSE
        if maker > time or (maker == time and not is_made):
            return FALSE
        first = time + (behind and again is None)
        if value in problem.returned or any(reader >= first for reader in self._own_readers[value]):
            return TRUE
        keep = self.keep[value]
        reasons = [(keep, condition) for reader, condition in self._late_readers[value] if reader >= first]
        reasons += [(keep, *reason) for reason in self._again_reasons(value, moment, behind)]
        later = self._later[self.segment[time]]
        reasons += [(keep, condition, later[op]) for op, condition in self._again_readers[value] if op in later]
        return self.formula.at_least(reasons)

    def _live_again(self, value: int, moment: Moment, *, behind: bool = False, is_made: bool = False) -> int:
        """Whether what a second run for the segment has made is needed at a moment, or (`behind`) after it."""
        time, again = moment
        maker = self.problem.values[value].maker
        state = self._states[time] if again is None or maker < again else self._before(time)
        made = TRUE if is_made else FALSE if maker == again else state.get(maker, FALSE)
        absent = -self.keep[value]
        if FALSE in (made, absent):
            return FALSE
        first, segment = time + (behind and again is None), self.segment[time]
        reasons = [
            (absent, made, condition)
            for reader, condition in self._late_readers[value]
            if reader >= first and self.segment[reader] == segment
        ]
        reasons += [(absent, made, *reason) for reason in self._again_reasons(value, moment, behind)]
        return self.formula.at_least(reasons)

    def _again_reasons(self, value: int, moment: Moment, behind: bool) -> list[tuple[int, ...]]:
        """Conditions under which an op that runs again in this segment, now or later, reads a value."""
        time, again = moment
        ran, state, before = self._ran[self.segment[time]], self._states[time], self._before(time)
        reasons: list[tuple[int, ...]] = []
        for op, condition in self._again_readers[value]:
            if op in ran:
                is_past = again is None or op < again + behind
                reasons.append((condition, ran[op], -(state if is_past else before).get(op, FALSE)))
        return reasons

    def _in_place(self, moment: Moment) -> list[tuple[int, int]]:
        """What an op saves by putting its result where an argument was that nobody needs any more."""
        time, again = moment
        formula, index = self.formula, time if again is None else again
        live = self._live_original if again is None else self._live_again
        makes = self.problem.ops[index].makes
        sizes = [self._size(value) for value in makes if self._size(value)]
        if not sizes:
            return []
        rooms: list[int] = []
        for value, condition in self._read_at(moment).items():
            if self.problem.values[value].maker != INPUT and self._size(value) >= min(sizes):
                original = self._live_original(value, moment, behind=True)
                is_read = (
                    condition
                    if again is None and not self.problem.ops[index].is_late
                    else formula.both(condition, self.keep[value])
                )
                rooms.append(formula.both(is_read, -original))
                rooms.append(formula.both(condition, -is_read, -self._live_again(value, moment, behind=True)))
        reuse = formula.new_bit()
        formula.add_clause([-reuse, *rooms])
        formula.add_clause([-reuse, *(live(value, moment, behind=True, is_made=True) for value in makes)])
        return [(-max(sizes), reuse)]

    def _read_at(self, moment: Moment) -> dict[int, int]:
        time, again = moment
        if again is not None:
            return self._memory_reads[again] | dict.fromkeys(self.problem.ops[again].reads_again, TRUE)
        if self.problem.ops[time].is_late:
            return self._memory_reads[time]
        return dict.fromkeys(self.problem.own_reads[time], TRUE)

    def _is_used(self, value: int) -> int:
        """Whether a forward value stays for late ops, and for nobody else."""
        if value in self.problem.returned:
            return FALSE
        last = max(self._own_readers[value], default=self.problem.values[value].maker)
        return self._live_original(value, (last, None), behind=True, is_made=True)

    def _set_cost(self, used: dict[int, int]) -> None:
        problem = self.problem
        costs = [(problem.ops[op].cost, bit) for ran in self._ran for op, bit in ran.items()]
        costs += [(problem.values[value].keep_cost, bit) for value, bit in used.items()]
        highest = max((cost for cost, _ in costs), default=0.0)
        is_whole = highest < _UNITS and all(cost == int(cost) for cost, _ in costs)
        self._units = 1.0 if is_whole else _UNITS / highest
        self._cost = [(round(cost * self._units), bit) for cost, bit in costs if cost > 0]
        self._rounding = 0 if is_whole else len(self._cost)
        self.formula.minimize(self._cost)

    def try_first(self, kept: frozenset[int]) -> None:
        self.formula.hint((self.keep[value], value in kept) for value in self.problem.choices)

    def limit_cost(self, max_cost: float) -> None:
        """Nothing dearer, but for what rounding to units may add."""
        self.formula.add_limit(self._cost, math.ceil(max_cost * self._units) + self._rounding)

    def exclude(self, kept: frozenset[int]) -> None:
        """Not this choice."""
        self.formula.add_clause([-self.keep[v] if v in kept else self.keep[v] for v in self.problem.choices])

    def solve(self, effort: float) -> Solution:
        found, is_final, work = self.formula.solve([self.keep[v] for v in self.problem.choices], effort, _SAME_COST)
        kept = None if found is None else frozenset(v for v, is_kept in zip(self.problem.choices, found) if is_kept)
        return Solution(kept, is_final, work)
