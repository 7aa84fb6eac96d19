"""The timeline of a report: it is what a slow walk through the loop says and what the plan expects, and is drawn."""

from __future__ import annotations

import functools
import re
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import fx

from dry_steps import planned_step
from wholestep.api import CompiledStep
from wholestep.cost import Link
from wholestep.graph import StepGraph, ops
from wholestep.report import step_report
from wholestep.report.scene import Box, Scene, Text
from wholestep.report.timeline import StepTimeline, predicted_timeline, simulate_graph
from wholestep.report.timeline_picture import timeline_scene
from wholestep.runtime.measured import MeasuredStep
from wholestep.runtime.stopwatch import WAITING

WAYS = ("none", "all", "auto")


@functools.cache
def planned(way: str) -> CompiledStep:
    return planned_step(way)


def issued(graph: StepGraph) -> list[fx.Node]:
    return [node for node in graph.calls() if "bucket" in node.meta and node.target is not ops.WAIT]


def slow_step_us(graph: StepGraph, times: dict[fx.Node, float], link: Link, num_steps: int) -> float:
    """The length of the last of some steps, by asking each event when those it needs have happened."""
    calls, sent = list(graph.calls()), issued(graph)
    position = {node.meta["bucket"]: index for index, node in enumerate(sent)}

    @functools.cache
    def ends(number: int, index: int) -> float:
        if index < 0:
            return ends(number - 1, len(calls) - 1) if number > 0 else 0.0
        node, before = calls[index], ends(number, index - 1)
        if node.target is not ops.WAIT:
            return before + times[node]
        order = position[node.meta["bucket"]]
        is_own = calls.index(sent[order]) < index
        return max(before, arrives(number if is_own else number - 1, order))

    @functools.cache
    def arrives(number: int, order: int) -> float:
        if number < 0:
            return 0.0
        free = arrives(number, order - 1) if order else arrives(number - 1, len(sent) - 1)
        length = link.time_us(sent[order].meta["val"].numel() * 4)
        return max(ends(number, calls.index(sent[order]) - 1), free) + length

    last = len(calls) - 1
    return ends(num_steps - 1, last) - ends(num_steps - 2, last)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(way=st.sampled_from(WAYS), seed=st.randoms(use_true_random=False), rate=st.sampled_from((40.0, 400.0, 4000.0)))
def test_the_walk_through_the_graph_is_right(way: str, seed: object, rate: float) -> None:
    graph, link = planned(way).graph, Link(50.0, rate)
    times = {
        node: 0.0 if node.target is ops.WAIT or node in issued(graph) else float(seed.randint(0, 900))  # type: ignore[attr-defined]
        for node in graph.calls()
    }
    found = simulate_graph(graph, times, link)
    assert found.step_us == pytest.approx(slow_step_us(graph, times, link, 4))


@pytest.mark.parametrize("way", WAYS)
def test_the_planner_expects_the_same(way: str) -> None:
    step = planned(way)
    plan, found = step.plan.communication, predicted_timeline(step)
    assert plan is not None
    assert found.step_us == pytest.approx(plan.predicted_us, rel=0.05)
    assert len(found.travels) == len(plan.buckets)
    assert sum(travel.arrives_us - travel.departs_us for travel in found.travels) == pytest.approx(plan.travel_us)
    assert sum(found.totals[part] for part in ("forward", "backward")) == pytest.approx(plan.compute_us)


@pytest.mark.parametrize("way", WAYS)
def test_spans_and_travels_fit_together(way: str) -> None:
    found = predicted_timeline(planned(way))
    assert found.spans[0].start_us == 0
    assert found.spans[-1].end_us == pytest.approx(found.step_us)
    assert all(one.end_us == pytest.approx(other.start_us) for one, other in pairwise(found.spans))
    assert all(one.part != other.part for one, other in pairwise(found.spans))
    assert all(one.arrives_us <= other.departs_us + 1e-6 for one, other in pairwise(found.travels))
    waited = sum(travel.waited_us for travel in found.travels)
    assert found.totals.get(WAITING, 0.0) == pytest.approx(waited)
    is_over = [travel.arrives_us > found.step_us for travel in found.travels]
    assert any(is_over) == (way != "none")


def test_without_a_link_nothing_travels() -> None:
    step = planned_step("none", link=None)
    found = predicted_timeline(step)
    assert found.travels == ()
    assert WAITING not in found.totals
    assert "Nothing is known about the link" in step_report(step).to_text()
    assert 'href="#bucket-' not in step_report(step).to_html()


def boxes(scene: Scene, look: str) -> list[Box]:
    """Boxes of a look, the one of the legend left out."""
    return [shape for shape in scene.shapes if isinstance(shape, Box) and shape.look == look and shape.y > 30]


def test_the_picture_shows_compute_link_and_what_was_measured() -> None:
    found = predicted_timeline(planned("auto"))
    measured = MeasuredStep(9e3, (("forward", 2e3), ("backward", 5e3), ("optimizer", 1e3)))
    scene = timeline_scene(found, measured, frozenset({0, 1}))
    rows = {shape.text for shape in scene.shapes if isinstance(shape, Text)}
    assert {"compute", "link", "compute, measured", "forward", "waits for communication"} <= rows
    sent = boxes(scene, "comm-strip")
    late = boxes(scene, "before-strip")
    assert {box.anchor for box in (*sent, *late)} == {"bucket-0", "bucket-1", ""}
    assert all(box.title.endswith("; this is the one of the step before") for box in late)
    assert max(box.y for box in boxes(scene, "forward-strip")) > max(box.y for box in sent)
    scale = 784 / found.step_us
    waits = sum(box.width for box in boxes(scene, "waiting-strip"))
    assert waits == pytest.approx(found.totals[WAITING] * scale, abs=2 * len(boxes(scene, "waiting-strip")))


def test_a_plain_step_has_one_row() -> None:
    scene = timeline_scene(StepTimeline(0.0, (), ()), None, frozenset())
    assert "link" not in {shape.text for shape in scene.shapes if isinstance(shape, Text)}


def test_boxes_of_the_picture_lead_to_rows_of_the_table() -> None:
    page = step_report(planned("auto")).to_html()
    plan = planned("auto").plan.communication
    assert plan is not None
    rows = re.findall(r'<tr id="(bucket-\d+)">', page)
    assert rows == [f"bucket-{index}" for index in range(len(plan.buckets))]
    links = re.findall(r'<a href="#(bucket-\d+)" aria-label="bucket', page)
    assert set(links) == set(rows)
    for bucket in plan.buckets:
        assert bucket.reason in page
    assert 'role="group"' in page


def test_what_was_planned_for_another_device_is_not_measured_here() -> None:
    titles = [section.title for section in step_report(planned("auto")).sections]
    assert "Timeline" in titles
    assert "Predicted and measured" not in titles
