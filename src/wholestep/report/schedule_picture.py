"""The picture of a pipeline schedule: a row for each rank, a box for each action, and what is left is idle time."""

from __future__ import annotations

from collections.abc import Sequence

from wholestep.pipe import Kind, Span, Timeline
from wholestep.report.axes import Axes, Tick
from wholestep.report.charts import nice_step
from wholestep.report.scene import Box, Scene, Shape, Text, file_svg, text_width

_WIDTH = 960.0
_RIGHT = _WIDTH - 24.0
_LEFT = 152.0
_LEGEND_HEIGHT = 34.0
_TITLE_HEIGHT = 26.0
_ROW_HEIGHT = 26.0
_BOX_HEIGHT = 20.0
_AXIS_HEIGHT = 48.0
_TEXT_MARGIN = 3.0
# Boxes narrower than this say nothing, and more of them than this only make the file larger.
_MIN_WIDTH = 0.4
_MAX_COLUMNS = 160

_NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward, whole",
    Kind.INPUT: "gradients of inputs",
    Kind.WEIGHT: "gradients of weights",
}
_LOOKS = {
    Kind.FORWARD: "forward-strip",
    Kind.BACKWARD: "backward-strip",
    Kind.INPUT: "comm-strip",
    Kind.WEIGHT: "optimizer-strip",
}


def schedule_picture(timeline: Timeline, measured: Timeline | None = None) -> str:
    """The picture of a timeline as SVG text; a second, measured one of the same schedule is drawn below, in scale."""
    return file_svg(schedule_scene(timeline, measured))


def schedule_scene(timeline: Timeline, measured: Timeline | None = None) -> Scene:
    """Rows are ranks, boxes actions with their micro-batch, the ground behind them is idle time.

    Two timelines share the scale if their unit is the same; otherwise each fills the width.
    """
    shown = [timeline] if measured is None else [timeline, measured]
    shapes: list[Shape] = _legend({span.action.kind for line in shown for row in line.spans for span in row})
    is_one_scale = len({line.unit for line in shown}) == 1
    longest = max(line.makespan for line in shown)
    top = _LEGEND_HEIGHT
    captions = [""] if measured is None else ["planned", "measured"]
    for line, caption in zip(shown, captions):
        shapes += _chart(line, caption, longest if is_one_scale else line.makespan, top)
        top += _height(line)
    summary = "; ".join(": ".join(filter(None, (caption, _summary(line)))) for line, caption in zip(shown, captions))
    return Scene(f"Pipeline schedule: {timeline.name}", f"{summary}.", _WIDTH, top, tuple(shapes))


def _height(timeline: Timeline) -> float:
    return _TITLE_HEIGHT + _ROW_HEIGHT * timeline.num_ranks + _AXIS_HEIGHT


def _summary(timeline: Timeline) -> str:
    text = f"{timeline.num_ranks} ranks, {timeline.makespan:.4g} {timeline.unit}, {timeline.bubble:.1%} idle"
    return f"{text}, at most {max(timeline.peaks):g} held by a rank" if any(timeline.peaks) else text


def _legend(kinds: set[Kind]) -> list[Shape]:
    shapes: list[Shape] = []
    x = 24.0
    entries = [(_LOOKS[kind], _NAMES[kind]) for kind in Kind if kind in kinds]
    for look, text in [*entries, ("track-bar", "idle")]:
        shapes += [Box(x, 10, 16, 14, look, 3.0), Text(x + 22, 22, text, "caption")]
        x += 44 + text_width(text)
    return shapes


def _chart(timeline: Timeline, caption: str, longest: float, top: float) -> list[Shape]:
    """The rows of one timeline with their axis, from `top` down."""
    first = top + _TITLE_HEIGHT
    bottom = first + _ROW_HEIGHT * timeline.num_ranks
    axes = Axes(0, max(longest, 1e-9), 0, 1, _LEFT, _RIGHT, first, bottom)
    shapes: list[Shape] = [Text(24, top + 18, "rank"), Text(_LEFT - 12, top + 18, "idle", anchor="end")]
    if caption:
        shapes.append(Text(_LEFT, top + 18, caption, "name"))
    end = axes.x(timeline.makespan)
    for rank, row in enumerate(timeline.spans):
        y = first + _ROW_HEIGHT * rank
        title = f"rank {rank}: {timeline.rank_bubble(rank):.1%} idle"
        shapes.append(Text(24, y + 15, str(rank), "caption"))
        shapes.append(Text(_LEFT - 12, y + 15, f"{timeline.rank_bubble(rank):.1%}", anchor="end"))
        shapes.append(Box(_LEFT, y, max(end - _LEFT, 0.0), _BOX_HEIGHT, "track-bar", 0.0, title))
        shapes += _boxes(axes, row, y)
    return [*shapes, *axes.grid(_ticks(axes.x_max), (), f"time, {timeline.unit}", "")]


def _ticks(longest: float) -> list[Tick]:
    step = nice_step(longest)
    return [(index * step, f"{index * step:g}") for index in range(int(longest / step + 1e-9) + 1)]


def _boxes(axes: Axes, row: Sequence[Span], y: float) -> list[Shape]:
    shapes: list[Shape] = []
    for span in row:
        left, right = axes.x(span.start), axes.x(span.end)
        # A hairline between neighbours, as long as there is room for one.
        width = right - left - (0.8 if right - left > 3 else 0.0)
        if width < _MIN_WIDTH:
            continue
        action = span.action
        title = f"{action}: {_NAMES[action.kind]} of stage {action.stage}, micro-batch {action.micro_batch}"
        shapes.append(Box(left, y, width, _BOX_HEIGHT, _LOOKS[action.kind], 2.0, title))
        label = str(action.micro_batch)
        if text_width(label) + _TEXT_MARGIN <= width:
            shapes.append(Text(left + width / 2, y + 14, label, "strip-text", "middle"))
    return shapes


def schedule_text(timeline: Timeline, *, max_columns: int = _MAX_COLUMNS) -> str:
    """The timeline for a terminal, a line for each rank: letter and micro-batch where something runs, dots where not.

    At most `max_columns` are used, and fewer if the shortest action has room for its text in fewer. An action that is
    too short for its text shows its letter only, or nothing.
    """
    spans = [span for row in timeline.spans for span in row]
    shortest = min((span.end - span.start for span in spans if span.end > span.start), default=1.0)
    # Room for the letter, the micro-batch and a gap.
    digits = max((len(str(span.action.micro_batch)) for span in spans), default=1)
    num_columns = min(max(max_columns, 1), max(1, round(timeline.makespan / shortest * (digits + 2))))
    scale = num_columns / timeline.makespan if timeline.makespan else 0.0
    width = len(str(timeline.num_ranks - 1))
    lines = [f"{timeline.name}: {_summary(timeline)}"]
    for rank, row in enumerate(timeline.spans):
        cells = ["."] * num_columns
        for span in row:
            _write(cells, span, scale)
        lines.append(f"rank {rank:>{width}} |{''.join(cells)}| {timeline.rank_bubble(rank):6.1%} idle")
    return "\n".join(lines) + "\n"


def _write(cells: list[str], span: Span, scale: float) -> None:
    """An action over its columns: letter and micro-batch if they fit, and blanks for the rest of its time."""
    start, end = round(span.start * scale), min(len(cells), round(span.end * scale))
    text = f"{span.action.kind.value}{span.action.micro_batch}"
    if len(text) > end - start:
        text = text[:1]
    for offset, letter in enumerate(text.ljust(end - start)[: end - start]):
        cells[start + offset] = letter
