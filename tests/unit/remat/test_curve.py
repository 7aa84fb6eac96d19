"""Curves hold the best plans and nothing else, and a study is the plan that runs, among others."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.parity import default_step
from tests.random_programs import problems

import wholestep
from wholestep import zoo
from wholestep.cost import profile_memory
from wholestep.remat import CurvePoint, MemoryStudy, Survey, fit
from wholestep.remat.curve import best_points, planned_curve
from wholestep.remat.mincut import NoCutError, min_cut
from wholestep.remat.problem import INPUT, Op, Problem, Value
from wholestep.remat.search import Planner
from wholestep.zoo.case import ZooCase

CASE = zoo.get("gpt")


def compiled(case: ZooCase = CASE, **options: Any) -> Any:
    """A step that has been called once."""
    model = case.build()
    step = wholestep.compile(default_step(case), **options)
    step(model, torch.optim.AdamW(model.parameters(), fused=True), case.make_batch(32, 1))
    return step


@pytest.fixture(name="step", scope="module")
def _step() -> Any:
    return compiled(memory_budget=0.3)


points = st.lists(st.builds(CurvePoint, st.integers(1, 12), st.integers(0, 12).map(float)), min_size=1, max_size=20)


@settings(max_examples=300, deadline=None)
@given(points)
def test_the_best_points_are_those_that_no_other_beats(listed: list[CurvePoint]) -> None:
    def beats(one: CurvePoint, other: CurvePoint) -> bool:
        return one != other and one.peak_bytes <= other.peak_bytes and one.repeated_share <= other.repeated_share

    expected = sorted({point for point in listed if not any(beats(other, point) for other in listed)})
    assert list(best_points(listed)) == expected


@settings(max_examples=15, deadline=None)
@given(problems(max_forward=6))
def test_a_planned_curve_falls_from_the_smallest_peak_to_no_limit(problem: Problem) -> None:
    planner = Planner(problem)
    curve = planned_curve(planner, planner.everything)
    for left, right in itertools.pairwise(curve.points):
        assert left.peak_bytes < right.peak_bytes
        assert left.repeated_share > right.repeated_share
    assert curve.points[0].peak_bytes <= planner.smallest.outcome.peak_bytes + problem.resident_bytes
    assert curve.points[-1].repeated_share <= curve.chosen.repeated_share
    assert curve.chosen.peak_bytes == planner.everything.outcome.peak_bytes + problem.resident_bytes


def test_a_study_is_of_the_plan_that_runs(step: Any) -> None:
    study, plan = step.memory_study, step.plan.memory
    assert study.plan == plan
    assert study.after == profile_memory(step.graph)
    assert study.before.peak_bytes == plan.unlimited_peak_bytes
    assert study.before.live_bytes == profile_memory(compiled().graph).live_bytes
    assert study.curve.chosen == CurvePoint(plan.peak_bytes, plan.repeated_share)
    assert study.budget_bytes is not None
    assert plan.peak_bytes <= study.budget_bytes
    assert {value.module for value in plan.kept} | {op.module for op in plan.repeated} <= set(study.modules)
    assert sum(op.share for op in plan.repeated) == pytest.approx(plan.repeated_share)
    assert step.memory_study is study


def test_the_curve_has_the_ends_the_plan_and_points_between(step: Any) -> None:
    curve, plan = step.memory_study.curve, step.plan.memory
    assert len(curve.points) >= 6
    assert curve.points == best_points(curve.points)
    assert curve.points[-1] == CurvePoint(plan.unlimited_peak_bytes, 0.0)
    assert curve.points[0].peak_bytes < curve.chosen.peak_bytes
    assert curve.chosen in curve.points or curve.chosen not in best_points([*curve.points, curve.chosen])
    middle = curve.points[len(curve.points) // 2]
    again = compiled(memory_budget=middle.peak_bytes).plan.memory
    assert again.peak_bytes <= middle.peak_bytes
    assert again.repeated_share <= 1.05 * middle.repeated_share


@pytest.mark.parametrize(
    ("options", "has_limit"),
    [({"memory_budget": 1.0}, False), ({"memory_budget": 0.5, "dynamic_batch": True}, True)],
)
def test_other_steps_have_a_study_too(options: dict[str, Any], has_limit: bool) -> None:
    step = compiled(zoo.get("mlp"), **options)
    study = step.memory_study
    assert (study.budget_bytes is not None) == has_limit
    assert study.plan == step.plan.memory
    assert study.curve.chosen.peak_bytes == study.after.peak_bytes


def test_checkpoint_regions_alone_have_a_study() -> None:
    study = compiled(zoo.get("checkpointed")).memory_study
    assert study.budget_bytes is None
    assert study.before == study.after
    assert study.curve.points[0].peak_bytes < study.curve.chosen.peak_bytes


def test_without_a_plan_there_is_no_study() -> None:
    assert compiled(zoo.get("mlp")).memory_study is None


def test_nothing_is_planned_before_it_is_asked_for(monkeypatch: pytest.MonkeyPatch, step: Any) -> None:
    calls: list[int] = []
    survey = Survey(lambda: calls.append(1) or step.memory_study)
    assert not calls
    assert isinstance(survey.study, MemoryStudy)
    assert survey.study is step.memory_study
    assert calls == [1]

    def refuse(*_: Any) -> Any:
        raise AssertionError("planned for nothing")

    monkeypatch.setattr(fit, "spread_choices", refuse)
    fresh = compiled(zoo.get("mlp"), memory_budget=0.5)
    assert "ops run again" in fresh.explain()
    with pytest.raises(AssertionError, match="planned for nothing"):
        fresh.report("never_written.html")


def test_a_failing_cut_says_why_each_value_is_no_way_out() -> None:
    values = (Value("x", 0, INPUT), Value("a", 1, 0), Value("b", 2, 1), Value("c", 3, 2), Value("g", 1, 3))
    ops = (
        Op("a", (0,), (1,), module="first"),
        Op("b", (1,), (2,), module="second"),
        Op("c", (2,), (3,), runs=False),
        Op("g", (3,), (4,), is_late=True),
    )
    problem = Problem(ops, values, frozenset({4}), must_drop=frozenset({1, 2}))
    with pytest.raises(NoCutError) as caught:
        min_cut(problem, lambda op: op != 0)
    error = caught.value
    assert error.late_op == "g"
    assert [(stop.value, stop.num_bytes, stop.module) for stop in error.way] == [
        ("c", 3, ""),
        ("b", 2, "second"),
        ("a", 1, "first"),
    ]
    assert [stop.not_kept for stop in error.way] == [
        "the forward does not compute it",
        *["it is to be dropped, by annotation"] * 2,
    ]
    assert [bool(stop.not_repeated) for stop in error.way] == [False, False, True]
    assert min_cut(problem, lambda op: op != 0, through_unplaced=False) == frozenset()
