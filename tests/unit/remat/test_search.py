"""Plans against every possible plan on small problems, on chains of layers, and in processes with other hash seeds."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.random_programs import problems

from wholestep.remat.blocks import find_chains
from wholestep.remat.problem import INPUT, Decision, Op, Problem, Value
from wholestep.remat.search import Planner
from wholestep.remat.simulate import Outcome, Simulator


def every_outcome(problem: Problem, starts: frozenset[int]) -> list[Outcome]:
    simulator = Simulator(problem)
    return [
        simulator.outcome(Decision(frozenset(kept), starts))
        for size in range(len(problem.choices) + 1)
        for kept in itertools.combinations(problem.choices, size)
    ]


@settings(max_examples=150, deadline=None)
@given(problems(max_forward=6, max_late=5), st.floats(0.0, 1.0))
def test_plans_fit_and_are_never_better_than_the_best(problem: Problem, share: float) -> None:
    planner = Planner(problem)
    divisions = {frozenset[int](), frozenset[int]().union(*(chain.starts for chain in planner.chains))}
    possible = [outcome for starts in divisions for outcome in every_outcome(problem, starts)]
    high = planner.everything.outcome.peak_bytes
    low = planner.smallest.outcome.peak_bytes
    assert low <= high
    assert low >= min(outcome.peak_bytes for outcome in possible)
    budget = low + round(share * (high - low))
    found = planner.plan(budget)
    assert found is not None
    assert found.outcome == Simulator(problem).outcome(found.decision)
    assert found.outcome.peak_bytes <= budget
    best = min(outcome.cost for outcome in possible if outcome.peak_bytes <= budget)
    assert found.outcome.cost >= best


def layers(count: int, *, dear: float = 4.0) -> Problem:
    """Residual layers: a wide cheap value and a dear one each, and a backward that reads both."""
    values = [Value("x", 0, INPUT)]
    ops: list[Op] = []

    def add(name: str, num_bytes: int, reads: tuple[int, ...], cost: float, *, is_late: bool = False) -> int:
        values.append(Value(name, num_bytes, len(ops)))
        flops = int(cost) if cost >= 1 else 0
        ops.append(
            Op(name, reads, (len(values) - 1,), is_late=is_late, cost=cost, flops=flops, kind=name.split("_")[0])
        )
        return len(values) - 1

    stream = add("start", 10, (0,), 0.1)
    made: list[tuple[int, int, int]] = []
    for index in range(count):
        wide = add(f"wide_{index}", 40, (stream,), dear)
        bent = add(f"bent_{index}", 40, (wide,), 0.1)
        after = add(f"after_{index}", 10, (bent, stream), dear)
        made.append((wide, bent, stream))
        stream = after
    gradient = add("loss_grad", 10, (stream,), 0.1, is_late=True)
    for index, (wide, bent, before) in reversed(list(enumerate(made))):
        inner = add(f"inner_{index}", 40, (gradient, bent), dear, is_late=True)
        gradient = add(f"grad_{index}", 10, (inner, wide, before, gradient), dear, is_late=True)
    return Problem(tuple(ops), tuple(values), frozenset({gradient}))


def test_layers_are_found_and_their_late_ops_with_them() -> None:
    [chain] = find_chains(layers(6))
    assert len(chain.blocks) in (6, 7)
    middle = chain.blocks[2:5]
    assert {len(block.forward) for block in middle} == {3}
    assert {len(block.late) for block in middle} == {2}
    assert all(len(block.borders) == 1 for block in middle)


@pytest.mark.parametrize("count", [4, 12])
def test_plans_for_layers_are_close_to_the_best_there_is(count: int) -> None:
    problem = layers(count)
    planner = Planner(problem)
    everything, free = planner.everything.outcome, planner.without_flops.outcome
    assert free.flops == 0
    assert free.peak_bytes < everything.peak_bytes
    enough = planner.plan(free.peak_bytes)
    assert enough is not None
    assert enough.outcome.flops == 0  # dropping what is cheap to have again is enough
    smallest = planner.smallest.outcome
    assert smallest.peak_bytes < everything.peak_bytes / (2 if count == 4 else 3)
    peaks = [planner.plan(budget) for budget in range(smallest.peak_bytes, everything.peak_bytes, 20)]
    costs = [choice.outcome.cost for choice in peaks if choice is not None]
    assert len(costs) == len(peaks)
    assert all(later <= earlier * 1.05 for earlier, later in itertools.pairwise(costs))


def test_exact_on_a_small_chain() -> None:
    problem = layers(3)
    planner = Planner(problem)
    starts = frozenset[int]().union(*(chain.starts for chain in planner.chains))
    possible = [outcome for division in (starts, frozenset[int]()) for outcome in every_outcome(problem, division)]
    for budget in (100, 120, 140, 160, 200):
        fitting = [outcome.cost for outcome in possible if outcome.peak_bytes <= budget]
        found = planner.plan(budget)
        assert (found is None) == (not fitting)
        if found is not None:
            assert found.outcome.cost <= 1.1 * min(fitting) + 1e-9


def test_what_must_be_kept_or_dropped_is() -> None:
    problem = layers(4)
    names = {value.name: index for index, value in enumerate(problem.values)}
    annotated = replace(
        problem, must_keep=frozenset({names["bent_1"]}), must_drop=frozenset({names["wide_2"], names["bent_2"]})
    )
    planner = Planner(annotated)
    for choice in (planner.everything, planner.smallest):
        again = {
            annotated.ops[event.op].name for event in Simulator(annotated).events(choice.decision) if event.is_again
        }
        assert "bent_1" not in again
        assert {"wide_2", "bent_2"} <= again


@pytest.mark.slow
def test_plans_do_not_depend_on_hash_seeds() -> None:
    script = (
        "from tests.unit.remat.test_search import layers\n"
        "from wholestep.remat.search import Planner\n"
        "planner = Planner(layers(6))\n"
        "for share in (0.7, 0.4, 0.25):\n"
        "    choice = planner.plan(int(share * planner.everything.outcome.peak_bytes))\n"
        "    print(sorted(choice.decision.kept), sorted(choice.decision.starts), choice.outcome)\n"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", script],
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": "tests:."},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1")
    }
    assert len(outputs) == 1
