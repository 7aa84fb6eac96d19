"""Borders by name: modules, marks and policies become numbers of forward calls.

A capture remembers which ops each call of a module made, in numbers of captured ops (`Trail`). Passes drop ops and
merge them into earlier ones, but they keep the order, so a place in the capture is a place in the graph: in front of
the first forward call that stands for a later op.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from torch import fx, nn

from wholestep.capture import Capture
from wholestep.errors import SplitError
from wholestep.graph import Phase, StepGraph
from wholestep.pipe.placement import forward_calls

_MAX_NAMED = 8


class SplitPoint(StrEnum):
    """On which side of a module a border is; of one that is called several times: before the first, behind the last."""

    BEGINNING = "beginning"
    END = "end"


@dataclass(frozen=True, order=True)
class Border:
    """A place between two stages: `number` forward calls come before it. `where` and `reason` are for people."""

    number: int
    where: str
    reason: str


@dataclass(frozen=True)
class Layer:
    """A module that the forward calls, for policies: its calls are the forward calls from `begin` to before `end`.

    `depth` is the number of modules around it. A module that is called several times reaches from its first call to its
    last. Times are those of one micro-batch; they and the bytes of parameters include the modules inside it.
    """

    name: str
    kind: str
    depth: int
    begin: int
    end: int
    forward_us: float
    backward_us: float
    parameter_bytes: int


Points = Mapping[str, SplitPoint | Sequence[SplitPoint]] | Sequence[str]
Policy = Callable[[Sequence[Layer]], Points]


@dataclass(frozen=True)
class Places:
    """Where modules and marks of a capture are in a graph that passes have made of it."""

    captured: Capture
    graph: StepGraph

    @cached_property
    def calls(self) -> list[fx.Node]:
        return forward_calls(self.graph)

    @cached_property
    def spans(self) -> dict[str, tuple[int, int]]:
        """Modules that are called, in order, each with the forward calls from its first call to its last."""
        found: dict[str, tuple[int, int]] = {}
        for call in self.captured.trail.calls:
            begin, end = self.number_of(call.begin), self.number_of(call.end)
            if begin == end:
                continue
            first, last = found.get(call.module, (begin, end))
            found[call.module] = (min(first, begin), max(last, end))
        return found

    @cached_property
    def modules(self) -> dict[str, nn.Module]:
        """Modules by name; one that is registered in two places has two."""
        found = self.captured.found
        return {
            (found.prefix_of(root) + path).rstrip("."): submodule
            for root, module in found.modules.items()
            for path, submodule in module.named_modules(remove_duplicate=False)
        }

    @cached_property
    def canonical(self) -> dict[str, str]:
        """Every name of every module, with the name that its calls go by: the first one."""
        first: dict[int, str] = {}
        return {name: first.setdefault(id(module), name) for name, module in self.modules.items()}

    @cached_property
    def _origins(self) -> list[int]:
        """The number of the captured op that each forward call is; ops that passes have added go with those before."""
        origins: list[int] = []
        for node in self.calls:
            before = origins[-1] if origins else -1
            origins.append(max(before, min(node.meta.get("origins", (before,)))))
        return origins

    def number_of(self, after: int) -> int:
        """The border behind a captured op."""
        return bisect_right(self._origins, after)

    def describe(self, number: int) -> str:
        """A border for people: the outermost module that begins or ends there, or the op behind it."""
        outermost = self.module_borders.get(number)
        if outermost is not None:
            return outermost[1]
        node = self.calls[number]
        inside = f" in '{node.meta['fqn']}'" if node.meta.get("fqn") else ""
        source = f" ({node.meta['source']})" if node.meta.get("source") else ""
        return f"{node.name}{inside}{source}"

    @cached_property
    def module_borders(self) -> dict[int, tuple[int, str]]:
        """Where a module begins or ends: how many modules are around the outermost of them, and its words."""
        found: dict[int, tuple[int, str]] = {}
        for point, side in ((SplitPoint.BEGINNING, 0), (SplitPoint.END, 1)):
            for name, span in self.spans.items():
                depth = name.count(".") + 1 if name else 0
                if span[side] not in found or depth < found[span[side]][0]:
                    found[span[side]] = (depth, _words(name, point))
        return found


def _words(name: str, point: SplitPoint) -> str:
    owner = f"'{name}'" if name else "the model"
    return f"the {point} of {owner}"


def marked_borders(places: Places) -> list[Border]:
    """Borders where the forward called `pipe_split()`; a call anywhere else is refused."""
    marks = places.captured.trail.marks
    counts = {line: sum(mark.source == line for mark in marks) for line in {mark.source for mark in marks}}
    seen: dict[str, int] = {}
    found: list[Border] = []
    for mark in marks:
        seen[mark.source] = seen.get(mark.source, 0) + 1
        turn = f" (call {seen[mark.source]} of {counts[mark.source]})" if counts[mark.source] > 1 else ""
        where = f"pipe_split() at {mark.source}{turn}"
        if mark.phase is not Phase.FORWARD:
            raise SplitError(
                f"{where} runs in the {mark.phase}: call it in the forward, whose borders the backward shares"
            )
        found.append(Border(places.number_of(mark.after), where, "marked by the model"))
    return found


def named_borders(places: Places, points: Points, reason: str) -> list[Border]:
    """Borders at modules. Raises `SplitError` for a name that is not there and for one without ops."""
    found: list[Border] = []
    for name, point in _as_pairs(points):
        begin, end = _span(places, name)
        found.append(Border(begin if point is SplitPoint.BEGINNING else end, _words(name, point), reason))
    return found


def _as_pairs(points: Points) -> Iterable[tuple[str, SplitPoint]]:
    if isinstance(points, str):
        raise SplitError(f"points are a list of names or a dict of names and sides, not the text {points!r}")
    if not isinstance(points, Mapping):
        return [(name, SplitPoint.BEGINNING) for name in points]
    pairs: list[tuple[str, SplitPoint]] = []
    for name, given in points.items():
        for point in [given] if isinstance(given, str) else given:
            if point not in tuple(SplitPoint):
                raise SplitError(f"'{name}' is cut at SplitPoint.BEGINNING or SplitPoint.END, not at {point!r}")
            pairs.append((name, SplitPoint(point)))
    return pairs


def _span(places: Places, name: str) -> tuple[int, int]:
    known = places.canonical
    if name not in known:
        raise SplitError(missing_module(name, known))
    if all(call.module != known[name] for call in places.captured.trail.calls):
        raise SplitError(f"module '{name}' is never called by the forward, so there is no place to cut at")
    span = places.spans.get(known[name])
    if span is None:
        raise SplitError(f"module '{name}' has no ops in this step, so it has neither beginning nor end: name another")
    return span


def missing_module(name: str, known: Iterable[str]) -> str:
    """Which part of a path is missing, and what there is in its place: `no module 'a.9': 'a' has '0' to '5'`."""
    names = dict.fromkeys(known)
    parts = name.split(".")
    depth = next(depth for depth in range(len(parts)) if ".".join(parts[: depth + 1]) not in names)
    parent = ".".join(parts[:depth])
    prefix = f"{parent}." if parent else ""
    children = dict.fromkeys(other[len(prefix) :].split(".")[0] for other in names if other.startswith(prefix))
    owner = f"'{parent}'" if parent else "the model"
    return f"no module '{name}': {owner} has {_listed([child for child in children if child])}"


def _listed(names: Sequence[str]) -> str:
    if not names:
        return "no modules inside"
    if len(names) > 1 and list(names) == [str(number) for number in range(len(names))]:
        return f"'{names[0]}' to '{names[-1]}'"
    shown = [f"'{name}'" for name in names[:_MAX_NAMED]]
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(shown) + more
