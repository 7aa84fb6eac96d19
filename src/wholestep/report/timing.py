"""What a report says about time: the predicted timeline of a step, and what was measured beside what was predicted."""

from __future__ import annotations

from collections.abc import Callable

from wholestep.graph import Phase
from wholestep.report.document import Cell, Figure, Prose, Section, Table
from wholestep.report.parallel import MAX_BUCKETS
from wholestep.report.scene import page_svg
from wholestep.report.summary import format_bytes, format_seconds, format_share
from wholestep.report.timeline import StepTimeline
from wholestep.report.timeline_picture import NAMES, timeline_scene
from wholestep.runtime import StepRunner
from wholestep.runtime.measured import Measured, MeasuredStep
from wholestep.runtime.stopwatch import WAITING

_PARTS = (str(Phase.FORWARD), str(Phase.BACKWARD), str(Phase.OPTIMIZER), str(Phase.COMM), WAITING)


def timeline_section(step: StepRunner, timeline: StepTimeline) -> Section:
    """Compute, communication and waiting in one picture."""
    plan = step.plan.communication
    num_buckets = 0 if plan is None else len(plan.buckets)
    scene = timeline_scene(timeline, step.measured.typical, frozenset(range(min(num_buckets, MAX_BUCKETS))))
    source = "the device that was planned for" if step.options.dry_run is not None else "the device that is here"
    text = f"Predicted from the ops that run, in their order, with times estimated for {source}"
    if plan is not None and plan.compute_us:
        text += "; forward and backward take as long as the plan assumes"
    if timeline.travels:
        text += ". Numbers on the link are buckets, and lead to what was decided about them"
    elif plan is not None:
        text += ". Nothing is known about the link: with cross_iteration='auto' it is measured"
    return Section("Timeline", (Prose(f"{text}."), Figure(page_svg(scene), scene.description)))


def measured_section(measured: Measured, timeline: StepTimeline, peak_bytes: int) -> Section:
    """Predictions and what came of them, or how to measure."""
    title = "Predicted and measured"
    if measured.is_empty:
        text = "Nothing has been measured. Call step.measure(...) in place of step(...) for a few steps, after the "
        text += "first two: they train like any other, and what they take stands here."
        return Section(title, (Prose(text),))
    rows = [*_time_rows(timeline, measured.typical), _row("peak memory", format_bytes, peak_bytes, measured.peak_bytes)]
    table = Table(("", "predicted", "measured", "difference"), tuple(rows), caption=_caption(measured))
    return Section(title, (table,))


def _time_rows(timeline: StepTimeline, step: MeasuredStep | None) -> list[tuple[Cell, ...]]:
    predicted, found = timeline.totals, {} if step is None else step.totals
    rows = [_row("step", _time, timeline.step_us, None if step is None else step.step_us)]
    for part in _PARTS:
        if part in predicted or part in found:
            seen_us = found.get(part, 0.0) if found else None
            rows.append(_row(NAMES[part], _time, predicted.get(part, 0.0), seen_us))
    if step is not None and found:
        rows.append(("before and after the graph", "–", _time(step.step_us - sum(found.values())), "–"))
    return rows


def _row(name: str, show: Callable[[float], str], predicted: float, measured: float | None) -> tuple[Cell, ...]:
    if measured is None:
        return (name, show(predicted), "–", "–")
    difference = format_share(measured - predicted, predicted) if predicted else "–"
    return (name, show(predicted), show(measured), f"+{difference}" if difference[0].isdigit() else difference)


def _caption(measured: Measured) -> str:
    num_steps = len(measured.steps)
    if not num_steps:
        return "One step was measured for its memory; those that follow will be timed."
    text = "One step was" if num_steps == 1 else f"Of {num_steps} steps that were timed, the one in the middle is"
    text += " timed." if num_steps == 1 else " shown."
    return f"{text} Predicted are the ops alone, with nothing else going on on the machine."


def _time(us: float) -> str:
    return format_seconds(us / 1e6)
