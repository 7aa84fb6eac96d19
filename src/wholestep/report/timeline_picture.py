"""The picture of a step's time: what the compute stream and the link do, as predicted, and the stream as measured."""

from __future__ import annotations

from collections.abc import Sequence

from wholestep.graph import Phase
from wholestep.report.axes import Axes, Tick
from wholestep.report.charts import nice_step
from wholestep.report.scene import Box, Scene, Shape, Text, text_width
from wholestep.report.summary import format_bytes, format_seconds
from wholestep.report.timeline import Span, StepTimeline, Travel
from wholestep.runtime.measured import MeasuredStep
from wholestep.runtime.stopwatch import WAITING

_WIDTH = 960.0
_LEFT, _RIGHT = 152.0, _WIDTH - 24.0
_TOP = 44.0
_ROW_HEIGHT = 34.0
_BOX_HEIGHT = 24.0
_AXIS_HEIGHT = 48.0
# Narrower boxes cannot be seen; there may be thousands of them.
_MIN_WIDTH = 0.4

NAMES = {
    str(Phase.FORWARD): "forward",
    str(Phase.BACKWARD): "backward",
    str(Phase.OPTIMIZER): "update",
    str(Phase.COMM): "copies to and from buckets",
    WAITING: "waits for communication",
}


def bucket_anchor(bucket: int) -> str:
    """The id of a bucket's row in the table."""
    return f"bucket-{bucket}"


def timeline_scene(timeline: StepTimeline, measured: MeasuredStep | None, linked: frozenset[int]) -> Scene:
    """A row each for compute and link, and one for what was measured, all in one scale.

    `linked` are buckets that have a row in the table, to which their boxes lead.
    """
    seen = [] if measured is None or not measured.parts else _measured_spans(measured)
    longest = max([timeline.step_us, *(span.end_us for span in seen)])
    num_rows = 1 + bool(timeline.travels) + bool(seen)
    bottom = _TOP + num_rows * _ROW_HEIGHT
    unit, scale = ("ms", 1e3) if longest >= 1e3 else ("us", 1.0)
    axes = Axes(0, max(longest, 1e-9), 0, 1, _LEFT, _RIGHT, _TOP, bottom)
    shapes = _legend(timeline, seen)
    shapes += _row(axes, 0, "compute", timeline.spans, timeline.step_us)
    if timeline.travels:
        shapes += _link_row(axes, 1, timeline, linked)
    if seen:
        shapes += _row(axes, num_rows - 1, "compute, measured", seen, seen[-1].end_us)
    shapes += axes.grid(_ticks(longest / scale, scale), (), f"time since the step began, {unit}", "")
    return Scene("One step in time", _summary(timeline), _WIDTH, bottom + _AXIS_HEIGHT, tuple(shapes))


def _summary(timeline: StepTimeline) -> str:
    parts = ", ".join(f"{NAMES[part]} {_time(us)}" for part, us in timeline.totals.items())
    return f"A step takes {_time(timeline.step_us)}: {parts}."


def _measured_spans(measured: MeasuredStep) -> list[Span]:
    spans: list[Span] = []
    clock = 0.0
    for part, length_us in measured.parts:
        spans.append(Span(part, clock, clock + length_us))
        clock += length_us
    return spans


def _ticks(longest: float, scale: float) -> list[Tick]:
    step = nice_step(longest)
    return [(index * step * scale, f"{index * step:g}") for index in range(int(longest / step + 1e-9) + 1)]


def _legend(timeline: StepTimeline, seen: Sequence[Span]) -> list[Shape]:
    present = {span.part for span in (*timeline.spans, *seen)}
    entries = [(f"{part}-strip", name) for part, name in NAMES.items() if part in present]
    if any(travel.arrives_us > timeline.step_us for travel in timeline.travels):
        entries.append(("before-strip", "sent by the step before"))
    shapes: list[Shape] = []
    x = 24.0
    for look, text in entries:
        shapes += [Box(x, 8, 16, 14, look, 3.0), Text(x + 22, 20, text, "caption")]
        x += 42 + text_width(text)
    return shapes


def _row(axes: Axes, row: int, name: str, spans: Sequence[Span], end_us: float) -> list[Shape]:
    y = _TOP + row * _ROW_HEIGHT
    shapes = _ground(axes, y, name, end_us)
    for span in spans:
        title = f"{NAMES[span.part]}: {_time(span.end_us - span.start_us)}, from {_time(span.start_us)}"
        text = NAMES[span.part] if span.part != WAITING else "waits"
        shapes += _box(axes, y, span.start_us, span.end_us, f"{span.part}-strip", title, text)
    return shapes


def _link_row(axes: Axes, row: int, timeline: StepTimeline, linked: frozenset[int]) -> list[Shape]:
    """Buckets while they travel; what arrives in the next step is drawn at the left as that of the step before.

    The longer of the two boxes leads to the table.
    """
    y = _TOP + row * _ROW_HEIGHT
    shapes = _ground(axes, y, "link", timeline.step_us)
    for travel in timeline.travels:
        title, text = _travel_title(travel), str(travel.bucket) if travel.bucket >= 0 else ""
        anchor = bucket_anchor(travel.bucket) if travel.bucket in linked else ""
        end_us = min(travel.arrives_us, timeline.step_us)
        late_start_us = max(0.0, travel.departs_us - timeline.step_us)
        late_end_us = min(travel.arrives_us - timeline.step_us, timeline.step_us)
        is_late = late_end_us - late_start_us > end_us - travel.departs_us
        shapes += _box(axes, y, travel.departs_us, end_us, "comm-strip", title, text, anchor="" if is_late else anchor)
        title = f"{title}; this is the one of the step before"
        shapes += _box(
            axes, y, late_start_us, late_end_us, "before-strip", title, text, anchor=anchor if is_late else ""
        )
    return shapes


def _travel_title(travel: Travel) -> str:
    name = f"bucket {travel.bucket}" if travel.bucket >= 0 else "a collective"
    text = f"{name}: {format_bytes(travel.num_bytes)}, leaves at {_time(travel.departs_us)}, "
    text += f"arrives at {_time(travel.arrives_us)}"
    return f"{text}, is waited for {_time(travel.waited_us)}" if travel.waited_us > 0 else text


def _ground(axes: Axes, y: float, name: str, end_us: float) -> list[Shape]:
    return [
        Text(24, y + 16, name, "caption"),
        Box(axes.left, y, axes.x(end_us) - axes.left, _BOX_HEIGHT, "track-bar", 2.0),
    ]


def _box(
    axes: Axes, y: float, start_us: float, end_us: float, look: str, title: str, text: str, anchor: str = ""
) -> list[Shape]:
    left, right = axes.x(start_us), axes.x(end_us)
    # A hairline between neighbours, as long as there is room for one.
    width = right - left - (0.8 if right - left > 3 else 0.0)
    if width < _MIN_WIDTH:
        return []
    box = Box(left, y, width, _BOX_HEIGHT, look, 2.0, title, anchor)
    if not text or text_width(text) + 6 > width:
        return [box]
    look = "name" if look == "before-strip" else "strip-text"
    return [box, Text(left + width / 2, y + 16, text, look, "middle")]


def _time(us: float) -> str:
    return format_seconds(us / 1e6) if us >= 100 else f"{us:.0f} us"
