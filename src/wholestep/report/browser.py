"""The ops of a graph to look through: by phase and module, each with its type and the line of code it came from."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import fx

from wholestep.graph import Phase, StepGraph
from wholestep.graph.printer import format_call
from wholestep.graph.verify import describe
from wholestep.report.document import Browser, Group, Line
from wholestep.report.summary import OUTSIDE_MODULES, module_pattern

# What a page can hold and still open at once.
_MAX_OPS = 2000
_MAX_GROUPS = 400
_MAX_CODE = 240
_MAX_TYPE = 80

Members = list[tuple[int, fx.Node]]


def graph_browser(graph: StepGraph, *, max_ops: int = _MAX_OPS, max_groups: int = _MAX_GROUPS) -> Browser:
    """All ops of a graph, or as many of each module as there is room for.

    Modules of repeated layers are put together where each on its own would be too many.
    """
    calls = list(enumerate(graph.calls(), 1))
    groups = _grouped(calls, str)
    if len(groups) > max_groups:
        groups = _grouped(calls, module_pattern)
    groups = dict(list(groups.items())[:max_groups])
    room = room_of_each([len(members) for members in groups.values()], max_ops)
    shown = sum(min(room, len(members)) for members in groups.values())
    left_out = len(calls) - shown
    chapters: dict[str, list[Group]] = {}
    for (phase, module), members in groups.items():
        lines = tuple(_line(number, node) for number, node in members[:room])
        group = Group(module or OUTSIDE_MODULES, lines, len(members) - len(lines), str(phase))
        chapters.setdefault(str(phase), []).append(group)
    note = f"{left_out} of {len(calls)} ops are left out; print(step.graph) shows them all." if left_out else ""
    in_order = sorted(chapters.items(), key=lambda item: list(Phase).index(Phase(item[0])))
    return Browser(tuple((name, tuple(found)) for name, found in in_order), "ops", note)


def _grouped(calls: Sequence[tuple[int, fx.Node]], name_of: Callable[[str], str]) -> dict[tuple[Phase, str], Members]:
    groups: dict[tuple[Phase, str], Members] = {}
    for number, node in calls:
        groups.setdefault((node.meta["phase"], name_of(node.meta.get("fqn", ""))), []).append((number, node))
    return groups


def room_of_each(sizes: Sequence[int], limit: int) -> int:
    """The most that every group may show of its own so that all together show no more than `limit`."""
    room = 0
    left = limit
    rest = sorted(sizes)
    for index, size in enumerate(rest):
        num_groups = len(rest) - index
        if (size - room) * num_groups > left:
            return room + left // num_groups
        left -= (size - room) * num_groups
        room = size
    return room


def _line(number: int, node: fx.Node) -> Line:
    notes = (f"op {number}", _clipped(describe(node.meta["val"]), _MAX_TYPE), node.meta.get("source", ""))
    code = _clipped(f"{node.name} = {format_call(node)}", _MAX_CODE)
    return Line(code, tuple(note for note in notes if note))


def _clipped(text: str, length: int) -> str:
    """A text without the end of a very long one: an op may take all parameters at once."""
    return text if len(text) <= length else f"{text[:length]}…"
