"""The picture of a minimum cut that there is not: the way from a late op back to what must not run again."""

from __future__ import annotations

from pathlib import Path

from wholestep.remat.mincut import NoCutError, WayStop
from wholestep.report.document import Figure, Prose, Report, Section, Table
from wholestep.report.scene import Box, Outline, Scene, Shape, Text, page_svg, save_scene
from wholestep.report.summary import OUTSIDE_MODULES, format_bytes

_WIDTH = 720.0
_LEFT = 24.0
_BOX_WIDTH = _WIDTH - 2 * _LEFT
_BOX_HEIGHT = 68.0
_GAP = 30.0
# Of a long way both ends tell the story.
_MAX_STOPS = 9
_MAX_TEXT = 84


def cut_picture(error: NoCutError) -> Scene:
    """Values as boxes from late to early, with their bytes and why each may neither be kept nor repeated."""
    first = Text(_LEFT + 14, 38, _clipped(f"{error.late_op} runs after the forward and needs"), "name")
    shapes: list[Shape] = [Box(_LEFT, 16, _BOX_WIDTH, 36, "box", 6.0), first]
    y = 52.0
    for stop in _ends(error.way):
        shapes += _arrow(y)
        y += _GAP
        if isinstance(stop, int):
            shapes.append(
                Text(_WIDTH / 2, y + 14, f"… {stop} more values, none of which may be kept …", "note", "middle")
            )
            y += 22
            continue
        shapes += _stop(stop, y)
        y += _BOX_HEIGHT
    total = sum(stop.num_bytes for stop in error.way)
    summary = (
        f"No value on the way back from {error.late_op} may be kept: {len(error.way)} values, {format_bytes(total)}."
    )
    return Scene("Why there is no cut", summary, _WIDTH, y + 16, tuple(shapes))


def cut_report(error: NoCutError) -> Report:
    """The failing way as a report: picture and table."""
    rows = tuple(
        (stop.value, format_bytes(stop.num_bytes), stop.not_kept, stop.not_repeated or "it may") for stop in error.way
    )
    columns = ("value", "bytes", "not kept because", "its op does not run again because")
    scene = cut_picture(error)
    blocks = (Prose(scene.description), Figure(page_svg(scene), "From late to early"), Table(columns, rows))
    return Report("No minimum cut", str(error), sections=(Section(scene.title, blocks),))


def save_failing_cut(error: NoCutError, path: str | Path) -> Path:
    """Write the failing way as its file's suffix says: `.svg`, `.png` (with matplotlib) or `.html`."""
    path = Path(path)
    return cut_report(error).write(path) if path.suffix == ".html" else save_scene(cut_picture(error), path)


def _ends(way: tuple[WayStop, ...]) -> list[WayStop | int]:
    """The stops, or those at both ends with the number of those between."""
    if len(way) <= _MAX_STOPS:
        return list(way)
    half = _MAX_STOPS // 2
    return [*way[:half], len(way) - 2 * half, *way[-half:]]


def _arrow(y: float) -> list[Shape]:
    x, end = _WIDTH / 2, y + _GAP - 3
    head = ((x - 5, end - 8), (x + 5, end - 8), (x, end))
    return [Outline(((x, y + 3), (x, end - 8)), "arrow"), Outline(head, "arrow-head", is_closed=True)]


def _stop(stop: WayStop, y: float) -> list[Shape]:
    x = _LEFT + 14
    return [
        Box(_LEFT, y, _BOX_WIDTH, _BOX_HEIGHT, "bad-box" if stop.not_repeated else "box", 6.0, stop.module),
        Text(x, y + 20, _clipped(f"{stop.value}  ·  {stop.module or OUTSIDE_MODULES}"), "name"),
        Text(_LEFT + _BOX_WIDTH - 14, y + 20, format_bytes(stop.num_bytes), "caption", "end"),
        Text(x, y + 39, _clipped(f"may not be kept: {stop.not_kept}")),
        Text(x, y + 57, _clipped(_repeated(stop)), "bad-text" if stop.not_repeated else "note"),
    ]


def _repeated(stop: WayStop) -> str:
    if stop.not_repeated:
        return f"{stop.op} may not run again: {stop.not_repeated}"
    return f"{stop.op} may run again, and needs what follows"


def _clipped(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 1]}…"
