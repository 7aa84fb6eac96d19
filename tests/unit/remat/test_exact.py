"""CP-SAT's choices against all there are on small problems, and joint graphs that are cut by it."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.joint import Joint, trace_joint
from tests.random_programs import problems
from tests.unit.remat.test_partition import network
from tests.unit.remat.test_search import every_outcome, layers

import wholestep
from wholestep import WholestepError
from wholestep.remat import partition_joint
from wholestep.remat.exact import solve_exactly
from wholestep.remat.exact_model import ExactModel, Limits, Moment, moments_of
from wholestep.remat.formula import FALSE, TRUE, Formula
from wholestep.remat.problem import INPUT, Decision, Op, Problem, Value
from wholestep.remat.search import Planner
from wholestep.remat.simulate import Simulator


@settings(max_examples=150, deadline=None)
@given(st.data(), st.booleans(), st.booleans())
def test_no_choice_is_cheaper(data: st.DataObject, fused: bool, bounds_kept: bool) -> None:
    problem = data.draw(problems(max_forward=6, max_late=5, fused=fused))
    late = [index for index, op in enumerate(problem.ops) if op.is_late]
    starts = frozenset(data.draw(st.lists(st.sampled_from(late), max_size=2)))
    possible = every_outcome(problem, starts)
    peaks = [outcome.peak_bytes for outcome in possible]
    limit = data.draw(st.integers(max(0, min(peaks) - 1), max(peaks)))
    kept_limit = max(outcome.kept_bytes for outcome in possible)
    if bounds_kept:
        kept_limit = data.draw(st.integers(0, kept_limit))
    fitting = [item.cost for item in possible if item.peak_bytes <= limit and item.kept_bytes <= kept_limit]
    answer = solve_exactly(problem, limit, starts=starts, kept_bytes=kept_limit if bounds_kept else None)
    assert answer is not None
    assert answer.is_proven
    assert (answer.decision is None) == (answer.outcome is None) == (not fitting)
    if answer.decision is not None and answer.outcome is not None:
        assert answer.decision.starts == starts
        assert answer.outcome == Simulator(problem).outcome(answer.decision)
        assert answer.outcome.peak_bytes <= limit
        assert answer.outcome.kept_bytes <= kept_limit
        assert answer.outcome.cost == min(fitting)


def is_possible(problem: Problem, decision: Decision, limits: Limits, moments: list[Moment], max_cost: float) -> bool:
    """Whether the formulas of these events and limits allow a decision."""
    model = ExactModel(problem, Simulator(problem), decision.starts, limits)
    for value in problem.choices:
        model.formula.add_clause([model.keep[value] if value in decision.kept else -model.keep[value]])
    for moment in moments:
        model.add_event(moment)
    model.limit_cost(max_cost)
    solution = model.solve(1.0)
    assert solution.is_final
    return solution.kept is not None


@settings(max_examples=150, deadline=None)
@given(st.data(), st.booleans())
def test_formulas_say_what_the_simulation_does(data: st.DataObject, fused: bool) -> None:
    problem = data.draw(problems(max_forward=6, max_late=5, fused=fused))
    late = [index for index, op in enumerate(problem.ops) if op.is_late]
    starts = frozenset(data.draw(st.lists(st.sampled_from(late), max_size=2)))
    kept = frozenset(value for value in problem.choices if data.draw(st.booleans()))
    decision, simulator = Decision(kept, starts), Simulator(problem)
    outcome, live = simulator.outcome(decision), simulator.timeline(decision)
    events = simulator.events(decision)
    moments = moments_of(events)
    every_moment = [
        *((index, None) for index in range(len(problem.ops))),
        *itertools.product(late, problem.forward_ops),
    ]
    peak, kept_bytes, cost = outcome.peak_bytes, outcome.kept_bytes, outcome.cost
    assert is_possible(problem, decision, Limits(peak, kept_bytes), every_moment, cost)
    assert not is_possible(problem, decision, Limits(peak, kept_bytes - 1), [], cost)
    assert not is_possible(problem, decision, Limits(peak, kept_bytes), [], cost - 1)
    index = data.draw(st.sampled_from(range(len(events))))
    assert is_possible(problem, decision, Limits(live[index], None), [moments[index]], cost)
    if not problem.ops[events[index].op].in_place:
        assert not is_possible(problem, decision, Limits(live[index] - 1, None), [moments[index]], cost)


@settings(max_examples=60, deadline=None)
@given(problems(max_forward=6, max_late=5), st.floats(0.0, 1.0))
def test_plans_are_never_cheaper_than_a_proven_choice(problem: Problem, share: float) -> None:
    planner = Planner(problem)
    low, high = planner.smallest.outcome.peak_bytes, planner.everything.outcome.peak_bytes
    limit = low + round(share * (high - low))
    planned, exact = planner.plan(limit), planner.exactly(limit)
    assert planned is not None
    assert exact is not None
    assert exact.is_proven
    assert exact.outcome.peak_bytes <= limit
    divisions = {planned.decision.starts, frozenset[int](), *(chain.starts for chain in planner.chains)}
    possible = [item.cost for starts in divisions for item in every_outcome(problem, starts) if item.fits(limit)]
    assert exact.outcome.cost == min(possible) <= planned.outcome.cost


def test_costs_that_are_no_whole_numbers() -> None:
    problem = layers(3, dear=4.7)
    possible = every_outcome(problem, frozenset())
    for limit in range(min(item.peak_bytes for item in possible), max(item.peak_bytes for item in possible), 15):
        answer = solve_exactly(problem, limit)
        assert answer is not None
        assert answer.is_proven
        assert answer.outcome is not None
        assert answer.outcome.cost == pytest.approx(min(item.cost for item in possible if item.fits(limit)), rel=1e-5)


def test_a_block_of_a_program() -> None:
    planner = Planner(layers(6))
    block = planner.chains[0].blocks[3]
    part, number, _ = planner.problem.part([*block.forward, *block.late])
    part = replace(part, must_keep=frozenset(number[value] for value in block.borders))
    possible = every_outcome(part, frozenset())
    assert len(possible) > 2
    for limit in sorted({item.peak_bytes for item in possible}):
        answer = solve_exactly(part, limit)
        assert answer is not None
        assert answer.outcome is not None
        assert answer.outcome.cost == min(item.cost for item in possible if item.fits(limit))


def test_what_is_decided_already_stays_so() -> None:
    problem = layers(4)
    names = {value.name: index for index, value in enumerate(problem.values)}
    annotated = replace(
        problem, must_keep=frozenset({names["bent_1"]}), must_drop=frozenset({names["wide_2"], names["bent_2"]})
    )
    answer = solve_exactly(annotated, 200)
    assert answer is not None
    assert answer.decision is not None
    again = {annotated.ops[event.op].name for event in Simulator(annotated).events(answer.decision) if event.is_again}
    assert "bent_1" not in again
    assert {"wide_2", "bent_2"} <= again


def test_ops_between_late_ops_and_ops_without_a_place() -> None:
    values = [Value("input", 0, INPUT), *(Value(f"v{index}", 7 + index, index) for index in range(8))]
    reads = [(0,), (1,), (1, 2), (3,), (2,), (3, 4), (5, 1), (6, 7)]
    late = (3, 6, 7)
    ops = [
        Op(f"op{index}", item, (index + 1,), is_late=index in late, cost=float(3 + index), runs=index != 2)
        for index, item in enumerate(reads)
    ]
    problem = Problem(tuple(ops), tuple(values), frozenset({8}))
    for starts in (frozenset[int](), frozenset({6}), frozenset({6, 7})):
        possible = every_outcome(problem, starts)
        assert len({item.peak_bytes for item in possible}) > 1
        for limit in range(min(item.peak_bytes for item in possible) - 1, max(item.peak_bytes for item in possible)):
            answer = solve_exactly(problem, limit, starts=starts)
            assert answer is not None
            fitting = [item.cost for item in possible if item.fits(limit)]
            assert (None if answer.outcome is None else answer.outcome.cost) == min(fitting, default=None)


def test_no_end_in_sight() -> None:
    problem = layers(8)
    planner = Planner(problem)
    limit = planner.everything.outcome.peak_bytes // 3
    assert solve_exactly(problem, limit, effort=1e-9) is None
    known = planner.plan(limit)
    assert known is not None
    answer = solve_exactly(problem, limit, starts=known.decision.starts, known=known.decision, effort=1e-9)
    assert answer is not None
    assert not answer.is_proven
    assert answer.outcome == known.outcome


def test_nothing_that_cheap() -> None:
    problem = layers(3)
    limit = min(item.peak_bytes for item in every_outcome(problem, frozenset()))
    cheapest = solve_exactly(problem, limit)
    assert cheapest is not None
    assert cheapest.outcome is not None
    below = solve_exactly(problem, limit, max_cost=cheapest.outcome.cost - 0.05)
    assert below is not None
    assert below.is_proven
    assert below.decision is None


def exact_answers() -> str:
    """Choices for chains of layers, as text."""
    planner = Planner(layers(6, dear=4.7))
    high = planner.everything.outcome.peak_bytes
    choices = [planner.exactly(int(share * high)) for share in (0.7, 0.4)]
    assert all(choice is not None and choice.is_proven for choice in choices)
    return "\n".join(
        f"{sorted(choice.decision.kept)} {sorted(choice.decision.starts)} {choice.outcome}"
        for choice in choices
        if choice is not None
    )


@pytest.mark.slow
def test_answers_are_the_same_each_time_and_in_other_processes() -> None:
    script = "from tests.unit.remat.test_exact import exact_answers\nprint(exact_answers())\n"
    other = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONHASHSEED": "1", "PYTHONPATH": "tests:."},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert exact_answers() == exact_answers() == other.strip()


# Formulas


def test_formulas_mean_what_they_say() -> None:
    for values in itertools.product((False, True), repeat=3):
        formula = Formula()
        bits = [formula.new_bit() for _ in values]
        for bit, value in zip(bits, values):
            formula.add_clause([bit if value else -bit])
        a, b, c = bits
        wanted = [formula.both(a, -b, TRUE), formula.either(a, b, -c), formula.at_least([(a, b), (c, TRUE)])]
        formula.minimize([(1, wanted[2])])
        found, is_final, _ = formula.solve(wanted, 1.0, 0.0)
        assert is_final
        assert found == [
            values[0] and not values[1],
            values[0] or values[1] or not values[2],
            (values[0] and values[1]) or values[2],
        ]


def test_formulas_are_folded() -> None:
    formula = Formula()
    a, b = formula.new_bit(), formula.new_bit()
    assert formula.both(a, -a) == FALSE
    assert formula.both() == TRUE
    assert formula.either() == FALSE
    assert formula.either(a, TRUE) == TRUE
    assert formula.both(a, b) == formula.both(b, TRUE, a)
    assert formula.at_least([(a, FALSE), (b,)]) == b
    assert formula.at_least([()]) == TRUE


# Joint graphs


@pytest.fixture(scope="module")
def joint() -> Joint:
    model = network(layers=3)
    return trace_joint(lambda x: model(x).square().sum(), model, torch.randn(32, 16))


@pytest.mark.parametrize("budget", [1.0, 0.5, 0.2, 0.0])
def test_the_halves_do_what_the_joint_graph_does_bit_for_bit(joint: Joint, budget: float) -> None:
    joint.check(*wholestep.partition(joint.module, num_fwd_outputs=1, memory_budget=budget, solver="exact"))


@pytest.mark.parametrize("fusing", [False, True])
def test_joint_graphs_are_cut_at_no_higher_cost_than_planned(joint: Joint, fusing: bool) -> None:
    problem = partition_joint(
        joint.module, num_fwd_outputs=1, estimator="roofline", solver="default", fusing=fusing
    ).joint.problem
    planner = Planner(problem)
    low, high = planner.smallest.outcome.peak_bytes, planner.everything.outcome.peak_bytes
    for limit in (low, (low + high) // 2):
        planned, exact = planner.plan(limit), planner.exactly(limit)
        assert planned is not None
        assert exact is not None
        assert exact.is_proven
        assert not planned.is_proven
        assert exact.outcome.fits(limit)
        assert exact.outcome.cost <= planned.outcome.cost
        assert exact.outcome == Simulator(problem).outcome(exact.decision)


def test_whoever_asks_is_told_that_there_was_no_end(
    joint: Joint, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("wholestep.remat.search.solve_exactly", partial(solve_exactly, effort=1e-9))
    planned, exact = (
        partition_joint(joint.module, num_fwd_outputs=1, memory_budget=0.3, solver=solver).choice
        for solver in ("auto", "exact")
    )
    assert not exact.is_proven
    assert exact == planned
    assert "the exact solver did not come to an end" in caplog.text


def test_graphs_that_are_too_large_are_refused(joint: Joint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wholestep.remat.partition._MAX_EXACT_OPS", 50)
    with pytest.raises(WholestepError, match="the solver 'exact' takes graphs of up to 50 ops and this one has"):
        wholestep.partition(joint.module, num_fwd_outputs=1, memory_budget=0.5, solver="exact")
