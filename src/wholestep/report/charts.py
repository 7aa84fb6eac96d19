"""Drawings for reports: plain SVG whose colours come from the page's style, with titles for those who cannot see it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from wholestep.cost import MemoryProfile
from wholestep.graph import Phase
from wholestep.report.summary import format_bytes

# More points than pixels only make the file larger.
_MAX_POINTS = 900
_CHARACTER_WIDTH = 6.8


@dataclass(frozen=True)
class Series:
    """One line of a chart; the first value belongs to x = 1."""

    name: str
    values: tuple[float, ...]


@dataclass(frozen=True)
class _Frame:
    """The plotting area in pixels, and the ranges it shows."""

    x_max: float
    y_min: float
    y_max: float
    width: int = 960
    height: int = 300
    left: int = 78
    right: int = 14
    top: int = 40
    bottom: int = 30

    def x(self, value: float) -> float:
        return round(self.left + value / max(self.x_max, 1e-12) * (self.width - self.left - self.right), 1)

    def y(self, value: float) -> float:
        fraction = (value - self.y_min) / max(self.y_max - self.y_min, 1e-12)
        return round(self.height - self.bottom - fraction * (self.height - self.top - self.bottom), 1)

    def axes(self, ticks: Sequence[float], format_y: Callable[[float], str], x_label: str, last: int) -> list[str]:
        """Horizontal grid lines with their values, first and last x, and what x is."""
        base, end = self.height - self.bottom, self.width - self.right
        parts: list[str] = []
        for tick in ticks:
            parts.append(f'<line class="grid" x1="{self.left}" x2="{end}" y1="{self.y(tick)}" y2="{self.y(tick)}"/>')
            parts.append(_text(self.left - 8, self.y(tick) + 4, format_y(tick), "end"))
        parts.append(f'<line class="axis" x1="{self.left}" x2="{end}" y1="{base}" y2="{base}"/>')
        parts.append(_text(self.left, base + 18, "1", "start"))
        parts.append(_text(end, base + 18, str(last), "end"))
        parts.append(_text((self.left + end) / 2, base + 18, x_label, "middle"))
        return parts


def memory_chart(profile: MemoryProfile) -> Markup:
    """Live bytes over the ops of a step: slots as a floor, values above them in the colour of their phase."""
    step = nice_step(profile.peak_bytes, base=1024)
    ticks = [step * index for index in range(math.floor(profile.peak_bytes * 1.08 / step) + 1)]
    frame = _Frame(x_max=len(profile.live_bytes), y_min=0, y_max=profile.peak_bytes * 1.12)
    parts = frame.axes(ticks, format_bytes, "op, in execution order", len(profile.live_bytes))
    for phase, start, points in _phase_runs(profile):
        parts += _phase_area(frame, phase, start, points)
    parts += _slot_floor(frame, profile.slot_bytes)
    parts += _peak_mark(frame, profile)
    summary = f"Live memory starts at {format_bytes(profile.slot_bytes)} of slots and peaks at "
    summary += f"{format_bytes(profile.peak_bytes)} during {profile.phases[profile.peak_index]}."
    return _svg(frame, "Live memory over the step", summary, parts)


def line_chart(series: Sequence[Series], *, title: str, x_label: str) -> Markup:
    """Lines over the same x. The first is drawn broad and the next thin on top, so that equal ones are both seen."""
    finite = [value for line in series for value in line.values if math.isfinite(value)] or [0.0]
    low, high = min(finite), max(finite)
    step = nice_step(high - low or abs(high) or 1.0)
    low, high = math.floor(low / step) * step, math.ceil(high / step) * step
    last = max(len(line.values) for line in series)
    frame = _Frame(x_max=last - 1, y_min=low, y_max=max(high, low + step))
    num_digits = max(0, -math.floor(math.log10(step)))
    num_ticks = round((frame.y_max - low) / step) + 1
    parts = frame.axes([low + step * index for index in range(num_ticks)], f"{{:.{num_digits}f}}".format, x_label, last)
    x = float(frame.left)
    for index, line in enumerate(series):
        path = _path([(frame.x(i), frame.y(v)) for i, v in enumerate(line.values) if math.isfinite(v)])
        parts.append(f'<path class="line line-{index}" d="{path}"><title>{escape(line.name)}</title></path>')
        parts.append(f'<path class="line line-{index}" d="M{x:.0f} 18h26"/>')
        parts.append(_text(x + 34, 22, line.name, "start", "label"))
        x += 60 + _CHARACTER_WIDTH * len(line.name)
    ends = ", ".join(f"{line.name} {line.values[-1]:.4g}" for line in series if line.values)
    return _svg(frame, title, f"Last values: {ends}.", parts)


def _phase_runs(profile: MemoryProfile) -> list[tuple[Phase, int, list[tuple[int, int]]]]:
    """Neighbouring ops of one phase, each with its points (op, most live bytes near it), no more than can be seen."""
    stride = max(1, math.ceil(len(profile.live_bytes) / _MAX_POINTS))
    runs: list[tuple[Phase, int, list[tuple[int, int]]]] = []
    for start in range(0, len(profile.live_bytes), stride):
        phase = profile.phases[start]
        if not runs or runs[-1][0] is not phase:
            runs.append((phase, start, []))
        runs[-1][2].append((start, max(profile.live_bytes[start : start + stride])))
        runs[-1][2].append((min(start + stride, len(profile.live_bytes)), runs[-1][2][-1][1]))
    return runs


def _phase_area(frame: _Frame, phase: Phase, start: int, points: list[tuple[int, int]]) -> list[str]:
    left, right = frame.x(start), frame.x(points[-1][0])
    outline = _path([(frame.x(index), frame.y(live)) for index, live in points])
    base = frame.y(0)
    parts = [
        f'<path class="area {phase}" d="{outline}L{right} {base}L{left} {base}Z"/>',
        f'<path class="edge {phase}" d="{outline}"/>',
        f'<rect class="strip {phase}" x="{left}" y="8" width="{round(right - left, 1)}" height="18" rx="3">'
        f"<title>{phase}</title></rect>",
    ]
    if right - left > _CHARACTER_WIDTH * len(phase) + 8:
        parts.append(_text((left + right) / 2, 21, phase, "middle", "on-strip"))
    return parts


def _slot_floor(frame: _Frame, slot_bytes: int) -> list[str]:
    top, base, width = frame.y(slot_bytes), frame.y(0), frame.width - frame.left - frame.right
    rect = f'<rect class="floor" x="{frame.left}" y="{top}" width="{width}" height="{round(base - top, 1)}"/>'
    edge = f'<line class="floor-edge" x1="{frame.left}" x2="{frame.left + width}" y1="{top}" y2="{top}"/>'
    # Right, where the step ends with little else alive; inside the floor if it is high enough for a line of text.
    y = (top + base) / 2 + 4 if base - top > 18 else top - 6
    label = _text(frame.left + width - 8, y, f"slots {format_bytes(slot_bytes)}", "end", "label")
    return [rect, edge, label]


def _peak_mark(frame: _Frame, profile: MemoryProfile) -> list[str]:
    x, y = frame.x(profile.peak_index + 0.5), frame.y(profile.peak_bytes)
    text = f"peak {format_bytes(profile.peak_bytes)} at {profile.peak_node}"
    fits_right = x + 12 + _CHARACTER_WIDTH * len(text) < frame.width - frame.right
    label = _text(x + 10 if fits_right else x - 10, y - 6, text, "start" if fits_right else "end", "label strong halo")
    return [f'<circle class="peak" cx="{x}" cy="{y}" r="4.5"/>', label]


def nice_step(extent: float, base: int = 10) -> float:
    """A round distance that cuts `extent` into three to seven parts, counting in powers of `base`."""
    unit = float(base) ** math.floor(math.log(max(extent, 1e-12), base))
    rounds = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512) if base == 1024 else (1, 2, 5)
    candidates = [unit * factor * scale for scale in (1 / base, 1) for factor in rounds]
    return next((step for step in candidates if extent / step <= 7), candidates[-1])


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:g} {y:g}" for x, y in points) if points else ""


def _text(x: float, y: float, text: str, anchor: str, style: str = "tick") -> str:
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(frame: _Frame, title: str, description: str, parts: Sequence[str]) -> Markup:
    head = (
        f'<svg viewBox="0 0 {frame.width} {frame.height}" role="img" aria-label="{escape(f"{title}. {description}")}">'
    )
    return Markup("\n".join([head, f"<title>{escape(title)}</title>", *parts, "</svg>"]))
