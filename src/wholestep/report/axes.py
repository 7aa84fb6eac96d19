"""What pictures with axes share: scales, round ticks with units, and labels that keep out of each other's way."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from wholestep.report.charts import nice_step
from wholestep.report.scene import Outline, Shape, Text, text_width

_LINE_HEIGHT = 16.0
_UNITS = (("B", 1), ("KiB", 2**10), ("MiB", 2**20), ("GiB", 2**30), ("TiB", 2**40))

Tick = tuple[float, str]


@dataclass(frozen=True)
class Axes:
    """A plotting area in pixels and the ranges it shows."""

    x_min: float
    x_max: float
    y_min: float
    y_max: float
    left: float
    right: float
    top: float
    bottom: float

    def x(self, value: float) -> float:
        return self.left + (value - self.x_min) / max(self.x_max - self.x_min, 1e-12) * (self.right - self.left)

    def y(self, value: float) -> float:
        return self.bottom - (value - self.y_min) / max(self.y_max - self.y_min, 1e-12) * (self.bottom - self.top)

    def grid(self, x_ticks: Sequence[Tick], y_ticks: Sequence[Tick], x_name: str, y_name: str) -> list[Shape]:
        """Rules and figures; the y axis is named above it."""
        shapes: list[Shape] = []
        for value, text in y_ticks:
            shapes.append(Outline(((self.left, self.y(value)), (self.right, self.y(value))), "rule"))
            shapes.append(Text(self.left - 8, self.y(value) + 4, text, anchor="end"))
        for value, text in x_ticks:
            shapes.append(Outline(((self.x(value), self.bottom), (self.x(value), self.bottom + 4)), "base"))
            shapes.append(Text(self.x(value), self.bottom + 18, text, anchor="middle"))
        shapes.append(Outline(((self.left, self.bottom), (self.right, self.bottom)), "base"))
        shapes.append(Text((self.left + self.right) / 2, self.bottom + 38, x_name, "caption", "middle"))
        shapes.append(Text(24, self.top - 12, y_name, "caption"))
        return shapes


def byte_ticks(low: float, high: float) -> list[Tick]:
    """Round numbers of bytes, all in the unit of the largest."""
    unit, size = next((unit for unit in reversed(_UNITS) if high >= unit[1]), _UNITS[0])
    return [(value * size, f"{text} {unit}") for value, text in _ticks(low / size, high / size)]


def share_ticks(low: float, high: float) -> list[Tick]:
    """Round percentages."""
    return [(value / 100, f"{text} %") for value, text in _ticks(100 * low, 100 * high)]


def count_ticks(high: int) -> list[Tick]:
    """Round whole numbers."""
    return [(value, f"{value:.0f}") for value, _ in _ticks(0, high) if value.is_integer()]


def _ticks(low: float, high: float) -> list[Tick]:
    step = nice_step(max(high - low, 1e-9))
    num_digits = max(0, -math.floor(math.log10(step) + 1e-9))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [(index * step, f"{index * step:.{num_digits}f}") for index in range(first, last + 1)]


def beside(x: float, y: float, text: str, look: str, right: float) -> Text:
    """A label at the right of a place, or at its left if there is not enough room up to `right`."""
    if x + 10 + text_width(text) <= right:
        return Text(x + 10, y, text, look)
    return Text(x - 10, y, text, look, "end")


def above(label: Text, line: Sequence[tuple[float, float]]) -> Text:
    """A label moved up to where it covers nothing of a line of steps."""
    left, right = _left(label), _right(label)
    heights = [
        min(y0, y1) for (x0, y0), (x1, y1) in pairwise(line) if max(left, min(x0, x1)) <= min(right, max(x0, x1))
    ]
    return replace(label, y=min([label.y, *(y - 8 for y in heights)]))


def apart(labels: Sequence[Text]) -> list[Text]:
    """Labels moved up, line by line, until none covers one before it."""
    placed: list[Text] = []
    for label in labels:
        while any(_overlap(label, other) for other in placed):
            label = replace(label, y=label.y - _LINE_HEIGHT)
        placed.append(label)
    return placed


def _overlap(one: Text, other: Text) -> bool:
    return abs(one.y - other.y) < _LINE_HEIGHT and _left(one) < _right(other) and _left(other) < _right(one)


def _left(label: Text) -> float:
    return label.x - {"start": 0.0, "middle": 0.5, "end": 1.0}[label.anchor] * text_width(label.text)


def _right(label: Text) -> float:
    return _left(label) + text_width(label.text)
