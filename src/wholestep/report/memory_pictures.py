"""Pictures of a memory plan: what peaks cost, memory over time, and what is kept and repeated where."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from wholestep.cost import MemoryProfile
from wholestep.remat import Curve, CurvePoint, MemoryStudy
from wholestep.report.axes import Axes, above, apart, beside, byte_ticks, count_ticks, share_ticks
from wholestep.report.scene import Box, Dot, Outline, Scene, Shape, Text, save_scene, text_width
from wholestep.report.summary import OUTSIDE_MODULES, format_bytes, format_share, module_pattern

_WIDTH = 960.0
_LEFT, _RIGHT = 84.0, _WIDTH - 40.0
# A budget far above all that is known would squeeze the rest into a corner.
_FAR = 1.25
# More points than pixels only make the file larger.
_MAX_POINTS = 900
_MAX_ROWS = 24
_ROW_HEIGHT = 24.0
_MAX_NAME = 42


def plan_pictures(study: MemoryStudy) -> dict[str, Scene]:
    """All pictures of a plan, by the names of their files."""
    return {
        "pareto": curve_picture(study.curve, study.budget_bytes),
        "memory": timeline_picture(study),
        "modules": module_picture(study),
    }


def save_curve(curve: Curve, path: str | Path) -> Path:
    """Write a curve that the planner predicts (`wholestep.remat.curve.planned_curve`), as `.svg` or `.png`."""
    return save_scene(curve_picture(curve, source="the planner's simulation"), Path(path))


def curve_picture(curve: Curve, budget_bytes: int | None = None, *, source: str = "the finished graph") -> Scene:
    """The work that each peak costs, as a staircase: what lies between two points costs what the lower peak does.

    `source` says of what the peaks are.
    """
    points = curve.points
    low, high = points[0].peak_bytes, max(points[-1].peak_bytes, curve.chosen.peak_bytes)
    has_limit = budget_bytes is not None and low / _FAR <= budget_bytes <= high * _FAR
    if budget_bytes is not None and has_limit:
        low, high = min(low, budget_bytes), max(high, budget_bytes)
    margin = max((high - low) * 0.05, high * 0.002)
    most = max(points[0].repeated_share, curve.chosen.repeated_share, 0.01)
    axes = Axes(max(0, low - margin), high + margin, 0, most * 1.18, _LEFT, _RIGHT, 36, 300)
    shapes = axes.grid(
        byte_ticks(axes.x_min, axes.x_max),
        share_ticks(0, most * 1.1),
        f"peak memory, predicted from {source}",
        "work repeated, as a share of the forward's estimated time",
    )
    stairs = [(axes.x(points[0].peak_bytes), axes.y(points[0].repeated_share))]
    for point in points[1:]:
        stairs += [(axes.x(point.peak_bytes), stairs[-1][1]), (axes.x(point.peak_bytes), axes.y(point.repeated_share))]
    area = ((stairs[0][0], axes.bottom), *stairs, (stairs[-1][0], axes.bottom))
    shapes += [Outline(area, "after-area", is_closed=True), Outline(tuple(stairs), "after")]
    shapes += [_dot(axes, point, 4.0, "point") for point in points]
    labels = [above(label, stairs) for label in _curve_labels(axes, curve)]
    if budget_bytes is not None and has_limit:
        line, label = _limit(axes, budget_bytes, axes.y(curve.chosen.repeated_share))
        shapes.append(line)
        labels.append(label)
    shapes += [_dot(axes, curve.chosen, 7.0, "chosen"), *apart(labels)]
    return Scene("What memory costs", _curve_summary(curve), _WIDTH, 348, tuple(shapes))


def _limit(axes: Axes, budget_bytes: int, chosen_y: float) -> tuple[Outline, Text]:
    """The budget: below the stairs where those are high, up to the top where they are low; names are above them."""
    x = axes.x(budget_bytes)
    is_high = chosen_y < (axes.top + axes.bottom) / 2
    top, y = (chosen_y, axes.bottom - 10) if is_high else (axes.top, axes.top + 12)
    text = f"budget {format_bytes(budget_bytes)}"
    return Outline(((x, top), (x, axes.bottom)), "limit"), beside(x, y, text, "limit-text", axes.right)


def _curve_labels(axes: Axes, curve: Curve) -> list[Text]:
    """Names of the ends and of the chosen plan, which may be one of them; what comes first stays where it is."""
    names = {curve.chosen: "chosen: "}
    names.setdefault(curve.points[-1], "no limit: ")
    names.setdefault(curve.points[0], "smallest: ")
    return [
        beside(axes.x(point.peak_bytes), axes.y(point.repeated_share) - 10, f"{name}{_short(point)}", "mark", _RIGHT)
        for point, name in names.items()
    ]


def _short(point: CurvePoint) -> str:
    return f"{format_bytes(point.peak_bytes)}, {point.repeated_share:.1%}"


def _figures(point: CurvePoint) -> str:
    return f"{_short(point)} repeated"


def _dot(axes: Axes, point: CurvePoint, radius: float, look: str) -> Dot:
    return Dot(axes.x(point.peak_bytes), axes.y(point.repeated_share), radius, look, _figures(point))


def _curve_summary(curve: Curve) -> str:
    first, last = curve.points[0], curve.points[-1]
    text = f"Peaks from {format_bytes(first.peak_bytes)} ({first.repeated_share:.1%} of the forward repeated) to "
    text += f"{format_bytes(last.peak_bytes)} ({last.repeated_share:.1%}); chosen is {_figures(curve.chosen)}."
    if curve.chosen not in curve.points:
        text += " A search for another budget has met a better plan."
    return text


def timeline_picture(study: MemoryStudy) -> Scene:
    """Live bytes op by op: with everything kept, and with the plan, whose repeated ops make it longer."""
    before, after, limit = study.before, study.after, study.budget_bytes
    highest = max(before.peak_bytes, after.peak_bytes)
    if limit is not None and limit <= highest * _FAR:
        highest = max(highest, limit)
    else:
        limit = None
    num_ops = max(len(before.live_bytes), len(after.live_bytes))
    axes = Axes(0, max(num_ops, 1), 0, highest * 1.14, _LEFT, _RIGHT, 84, 330)
    shapes = axes.grid(
        count_ticks(num_ops), byte_ticks(0, highest * 1.05), "op, in execution order", "live memory, predicted"
    )
    shapes += _line(axes, before.live_bytes, "before")
    shapes += _line(axes, after.live_bytes, "after")
    floor = axes.y(min(before.slot_bytes, after.slot_bytes))
    shapes.append(Box(axes.left, floor, axes.right - axes.left, axes.bottom - floor, "resident"))
    if axes.bottom - floor > 20:
        text = f"parameters, optimizer state, inputs: {format_bytes(after.slot_bytes)}"
        shapes.append(Text(axes.right - 8, (axes.bottom + floor) / 2 + 4, text, "caption", "end"))
    labels = [_peak_label(axes, after), _peak_label(axes, before)]
    if limit is not None:
        shapes.append(Outline(((axes.left, axes.y(limit)), (axes.right, axes.y(limit))), "limit"))
        labels.append(Text(axes.right - 4, axes.y(limit) - 6, f"budget {format_bytes(limit)}", "limit-text", "end"))
    for profile, look in ((before, "before-point"), (after, "point")):
        shapes.append(Dot(axes.x(profile.peak_index + 0.5), axes.y(profile.peak_bytes), 4.5, look))
    shapes += [*_phase_strip(axes, after), *_legend(limit is not None), *apart(labels)]
    summary = (
        f"{format_bytes(before.peak_bytes)} at the peak with everything kept, {format_bytes(after.peak_bytes)} with "
        f"the plan; {len(before.live_bytes)} ops become {len(after.live_bytes)}."
    )
    return Scene("Memory over time", summary, _WIDTH, 378, tuple(shapes))


def _line(axes: Axes, live_bytes: Sequence[int], look: str) -> list[Shape]:
    """Steps, each as high as the highest of the ops it stands for, and the area below."""
    if not live_bytes:
        return []
    stride = max(1, math.ceil(len(live_bytes) / _MAX_POINTS))
    points: list[tuple[float, float]] = []
    for start in range(0, len(live_bytes), stride):
        y, end = axes.y(max(live_bytes[start : start + stride])), axes.x(min(start + stride, len(live_bytes)))
        if points and points[-1][1] == y:
            points[-1] = (end, y)
        else:
            points += [(axes.x(start), y), (end, y)]
    area = ((points[0][0], axes.bottom), *points, (points[-1][0], axes.bottom))
    return [Outline(area, f"{look}-area", is_closed=True), Outline(tuple(points), look)]


def _peak_label(axes: Axes, profile: MemoryProfile) -> Text:
    x, y = axes.x(profile.peak_index + 0.5), axes.y(profile.peak_bytes) - 8
    return beside(x, y, f"peak {format_bytes(profile.peak_bytes)}", "mark", axes.right)


def _phase_strip(axes: Axes, profile: MemoryProfile) -> list[Shape]:
    """Which phase of the step with the plan runs when."""
    shapes: list[Shape] = []
    start = 0
    for phase, members in groupby(profile.phases):
        end = start + len(list(members))
        left, right = axes.x(start), axes.x(end)
        shapes.append(Box(left, 36, right - left, 18, f"{phase}-strip", 3.0, f"{phase}, with the plan"))
        if right - left > text_width(phase) + 8:
            shapes.append(Text((left + right) / 2, 49, phase, "strip-text", "middle"))
        start = end
    return shapes


def _legend(has_limit: bool) -> list[Shape]:
    entries = [("before", "everything kept"), ("after", "with the plan (its phases below)")]
    entries += [("limit", "budget")] if has_limit else []
    shapes: list[Shape] = []
    x = _LEFT
    for look, text in entries:
        shapes += [Outline(((x, 18), (x + 26, 18)), look), Text(x + 34, 22, text, "caption")]
        x += 60 + text_width(text)
    return shapes


@dataclass(frozen=True)
class ModuleRow:
    """What a plan does to one module or to some together."""

    name: str
    kept_bytes: int
    repeated_share: float


def module_rows(study: MemoryStudy) -> tuple[tuple[ModuleRow, ...], str]:
    """Bytes kept and work repeated by module, in execution order, and how modules are put together, "" if they are not.

    Of the ways to group them, the one is taken that tells the most apart in as many rows as can be read.
    """
    kept: dict[str, int] = {}
    again: dict[str, float] = {}
    for value in study.plan.kept:
        kept[value.module] = kept.get(value.module, 0) + value.num_bytes
    for op in study.plan.repeated:
        again[op.module] = again.get(op.module, 0.0) + op.share
    modules = [module for module in study.modules if module in kept or module in again]
    name_of, how = _grouping(modules)
    groups: dict[str, list[str]] = {}
    for module in modules:
        groups.setdefault(name_of(module) if module else OUTSIDE_MODULES, []).append(module)
    rows = [
        ModuleRow(name, sum(kept.get(module, 0) for module in group), sum(again.get(module, 0.0) for module in group))
        for name, group in groups.items()
    ]
    return _largest(rows), how


def _grouping(modules: Sequence[str]) -> tuple[Callable[[str], str], str]:
    def cut_at(num_levels: int) -> Callable[[str], str]:
        return lambda module: ".".join(module.split(".")[:num_levels])

    deepest = max((module.count(".") + 1 for module in modules), default=1)
    ways = [(str, "")]
    ways += [(cut_at(depth), "each with all that is inside it") for depth in range(deepest - 1, 0, -1)]
    ways.append((module_pattern, "* is any layer number"))
    counts = [len({name_of(module) for module in modules}) for name_of, _ in ways]
    readable = [index for index, count in enumerate(counts) if count <= _MAX_ROWS]
    best = max(readable, key=lambda index: (counts[index], -index), default=counts.index(min(counts)))
    return ways[best]


def _largest(rows: Sequence[ModuleRow]) -> tuple[ModuleRow, ...]:
    """At most as many rows as can be read: what keeps and repeats the least is put together at the end."""
    if len(rows) <= _MAX_ROWS:
        return tuple(rows)
    most_bytes = max(1, *(row.kept_bytes for row in rows))
    most_again = max(1e-9, *(row.repeated_share for row in rows))
    weights = {row.name: row.kept_bytes / most_bytes + row.repeated_share / most_again for row in rows}
    shown = set(sorted(weights, key=lambda name: -weights[name])[: _MAX_ROWS - 1])
    rest = [row for row in rows if row.name not in shown]
    others = ModuleRow(
        f"{len(rest)} others", sum(row.kept_bytes for row in rest), sum(row.repeated_share for row in rest)
    )
    return (*(row for row in rows if row.name in shown), others)


def module_picture(study: MemoryStudy) -> Scene:
    """Two bars for each module: bytes kept for the backward, and work repeated."""
    rows, how = module_rows(study)
    names = [row.name if len(row.name) <= _MAX_NAME else f"…{row.name[1 - _MAX_NAME :]}" for row in rows]
    left = 24 + max([80.0, *map(text_width, names)]) + 16
    half = (_RIGHT - left) / 2
    shapes: list[Shape] = [
        Text(24, 24, "module"),
        Text(left, 24, "bytes kept for the backward", "caption"),
        Text(left + half, 24, "work repeated, share of the forward's time", "caption"),
    ]
    whole_bytes = sum(row.kept_bytes for row in rows)
    most_bytes, most_again = (
        max([0, *(row.kept_bytes for row in rows)]),
        max([0.0, *(row.repeated_share for row in rows)]),
    )
    for index, (row, name) in enumerate(zip(rows, names)):
        y = 38 + index * _ROW_HEIGHT
        shapes.append(Text(24, y + 13, name, "caption"))
        title = f"{row.name}: {format_share(row.kept_bytes, whole_bytes)} of all bytes kept"
        shapes += _bar(left, y, half, row.kept_bytes / max(1, most_bytes), format_bytes(row.kept_bytes), "kept", title)
        share, title = row.repeated_share / max(1e-12, most_again), f"{row.name}: {row.repeated_share:.2%} repeated"
        shapes += _bar(left + half, y, half, share, f"{row.repeated_share:.1%}", "again", title)
    if not rows:
        shapes.append(Text(24, 52, "nothing is kept and nothing repeated", "caption"))
    summary = f"{format_bytes(whole_bytes)} kept, {study.plan.repeated_share:.1%} of the forward repeated"
    summary += f"; modules in execution order{f', {how}' if how else ''}."
    return Scene("Kept and repeated by module", summary, _WIDTH, 52 + max(1, len(rows)) * _ROW_HEIGHT, tuple(shapes))


def _bar(x: float, y: float, width: float, share: float, text: str, kind: str, title: str) -> list[Shape]:
    room = width - 104
    bars: list[Shape] = [Box(x, y, room, _ROW_HEIGHT - 8, "track-bar", 3.0, title)]
    if share > 0:
        bars.append(Box(x, y, max(2.0, share * room), _ROW_HEIGHT - 8, f"{kind}-bar", 3.0, title))
    return [*bars, Text(x + room + 8, y + 13, text if share > 0 else "–")]
