"""The simulator against a slow one that asks for values recursively and counts what is alive at every event."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.random_programs import problems

from wholestep.remat.problem import INPUT, Decision, Op, Problem, Value
from wholestep.remat.simulate import Event, Simulator


def slow_events(problem: Problem, decision: Decision) -> list[Event]:
    """Before each late op, compute what it needs: by asking for it, sorted by program order."""
    kept, segment_of = decision.kept, Simulator(problem).segments(decision.starts)

    def missing(value: int, segment: int, there: set[tuple[int, int]]) -> set[int]:
        maker = problem.values[value].maker
        if not problem.droppable[value] or value in kept or (maker, segment) in there:
            return set()
        return {maker}.union(*(missing(source, segment, there) for source in problem.ops[maker].reads))

    events: list[Event] = []
    there: set[tuple[int, int]] = set()
    for index, op in enumerate(problem.ops):
        if op.is_late:
            segment = segment_of[index]
            for again in sorted(set[int]().union(*(missing(value, segment, there) for value in op.reads))):
                events.append(Event(again, segment))
                there.add((again, segment))
        events.append(Event(index))
    return events


def slow_peak(problem: Problem, decision: Decision, events: list[Event]) -> tuple[int, float]:
    """Name every value that every event reads and makes, and count those between first and last mention.

    Returns the most bytes, and what keeping costs: of each forward value that someone reads behind the forward.
    """
    kept, segment_of = decision.kept, Simulator(problem).segments(decision.starts)

    def instance(event: Event, value: int) -> tuple[int, int | None]:
        op = problem.ops[event.op]
        if event.segment is None and not op.is_late:
            return value, None
        if not problem.droppable[value] or value in kept:
            return value, None
        return value, segment_of[event.op] if event.segment is None else event.segment

    def from_memory(event: Event, value: int, reader: int) -> list[int]:
        """The value itself, or what it is computed from if it is fused into whoever reads it."""
        item = problem.values[value]
        if item.maker == INPUT:
            return [value]
        maker = problem.ops[item.maker]
        is_first_run = event.segment is None and not problem.ops[event.op].is_late
        if is_first_run or maker.is_late:
            is_fused = item.fused_own and (is_first_run or segment_of[item.maker] == segment_of[reader])
        else:
            is_fused = item.fused_again and instance(event, value)[1] is not None
        if not is_fused:
            return [value]
        return [read for source in maker.reads for read in from_memory(event, source, item.maker)]

    def is_behind_the_forward(event: Event) -> bool:
        return event.segment is not None or problem.ops[event.op].is_late

    kept_for_late: set[int] = set()
    first: dict[tuple[int, int | None], int] = {}
    last: dict[tuple[int, int | None], int] = {}
    for time, event in enumerate(events):
        for value in problem.ops[event.op].makes:
            first[value, event.segment] = time
            item = problem.values[value]
            if not (item.fused_own if event.segment is None else item.fused_again):
                last[value, event.segment] = time
        for read in problem.ops[event.op].reads:
            for value in from_memory(event, read, event.op):
                if problem.values[value].maker != INPUT:
                    last[instance(event, value)] = time
                    if instance(event, value)[1] is None and is_behind_the_forward(event):
                        kept_for_late.add(value)
    for value in problem.returned:
        last[value, None] = len(events)

    def num_bytes(keys: Iterable[tuple[int, int | None]]) -> list[int]:
        return [problem.values[key[0]].num_bytes for key in keys]

    def live_bytes(time: int, op: Op) -> int:
        live = [key for key in first if first[key] <= time <= last.get(key, -1)]
        dying = max(num_bytes(key for key in live if first[key] < time == last[key]), default=0)
        born = max(num_bytes(key for key in live if first[key] == time < last[key]), default=0)
        return sum(num_bytes(live)) - (born if op.in_place and born <= dying else 0)

    peak = max(live_bytes(time, problem.ops[event.op]) for time, event in enumerate(events))
    forward = [value for value in kept_for_late if not problem.ops[problem.values[value].maker].is_late]
    return peak, sum(problem.values[value].keep_cost for value in forward if value not in problem.returned)


@settings(max_examples=400, deadline=None)
@given(st.one_of(problems(), problems(fused=True)), st.data())
def test_events_and_peak_are_those_of_the_slow_simulation(problem: Problem, data: st.DataObject) -> None:
    kept = set(data.draw(st.lists(st.sampled_from(problem.choices), unique=True)) if problem.choices else [])
    late = [index for index, op in enumerate(problem.ops) if op.is_late]
    decision = Decision(frozenset(kept), frozenset(data.draw(st.lists(st.sampled_from(late)))))
    simulator = Simulator(problem)
    events = slow_events(problem, decision)
    assert simulator.events(decision) == events
    outcome = simulator.outcome(decision)
    peak_bytes, keep_cost = slow_peak(problem, decision, events)
    assert outcome.peak_bytes == peak_bytes
    assert max(simulator.timeline(decision)) == outcome.peak_bytes
    again = sum(problem.ops[event.op].cost for event in events if event.segment is not None)
    assert outcome.cost == again + keep_cost


def test_in_place_work_needs_no_room_of_its_own() -> None:
    """f0 -> f1 -> b0 in three places: f1 takes the place of f0, b0 (larger than what dies) needs its own."""
    values = (Value("x", 0, INPUT), Value("f0", 8, 0), Value("f1", 8, 1), Value("b0", 9, 2))
    ops = [Op("f0", (0,), (1,)), Op("f1", (1,), (2,)), Op("b0", (2,), (3,), is_late=True)]
    plain = Problem(tuple(ops), values, frozenset({3}))
    everything = Decision(frozenset(plain.choices))
    assert Simulator(plain).timeline(everything) == [8, 16, 17]
    in_place = Problem(tuple(replace(op, in_place=True) for op in ops), values, frozenset({3}))
    assert Simulator(in_place).timeline(everything) == [8, 8, 17]


def chain(*sizes: int) -> Problem:
    """f0 -> f1 -> ... and late ops in reverse that each read one forward value and the one before."""
    values = [Value("x", 0, INPUT)]
    ops = []
    for index, size in enumerate(sizes):
        values.append(Value(f"f{index}", size, index))
        ops.append(Op(f"f{index}", (index,), (index + 1,), cost=1.0))
    gradient = None
    for index in reversed(range(len(sizes))):
        reads = (index + 1,) if gradient is None else (index + 1, gradient)
        gradient = len(values)
        values.append(Value(f"b{index}", 1, len(ops)))
        ops.append(Op(f"b{index}", reads, (gradient,), is_late=True))
    assert gradient is not None
    return Problem(tuple(ops), tuple(values), frozenset({gradient}))


def test_a_chain_by_hand() -> None:
    simulator = Simulator(chain(10, 10, 10))
    everything = simulator.outcome(Decision(frozenset({1, 2, 3})))
    assert (everything.peak_bytes, everything.kept_bytes, everything.num_again) == (31, 30, 0)
    nothing = simulator.outcome(Decision(frozenset()))
    # f0 f1 f2 [f0 f1 f2 b2] [b1] [b0]: two of three are alive when one is made, all three while they are needed later
    assert (nothing.peak_bytes, nothing.num_again) == (31, 3)
    assert [problem_op.op for problem_op in simulator.events(Decision(frozenset())) if problem_op.is_again] == [0, 1, 2]


def test_another_segment_computes_anew() -> None:
    problem = chain(10, 10, 10)
    outcome = Simulator(problem).outcome(Decision(frozenset(), frozenset({4, 5})))
    assert outcome.num_again == 3 + 2 + 1
    assert outcome.peak_bytes == 21


def test_returned_values_live_to_the_end() -> None:
    problem = chain(10, 10)
    kept_output = Problem(problem.ops, problem.values, problem.returned | {2})
    assert Simulator(kept_output).timeline(Decision(frozenset({1, 2})))[-1] == 10 + 10 + 1 + 1
    assert all(
        Simulator(kept_output).outcome(Decision(frozenset(kept))).peak_bytes >= 20
        for size in range(3)
        for kept in itertools.combinations((1, 2), size)
    )
