"""The plan of a cut: where stages begin, why there, and what each of them costs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from typing import Any

from torch import fx

from wholestep import _strict_json as strict_json
from wholestep.capture import Capture
from wholestep.cost import estimated_times, typical_device
from wholestep.errors import SplitError
from wholestep.graph import StepGraph
from wholestep.pipe.balance import Limit, Profile, balance, profile
from wholestep.pipe.borders import Border, Layer, Places, Points, Policy, marked_borders, named_borders
from wholestep.pipe.placement import forward_calls

_VERSION = 1
_MAX_STAGES = 65_536
_MAX_TEXT = 32 * 2**20
_COUNT = range(2**63)


@dataclass(frozen=True)
class PlannedStage:
    """A stage from forward call `begin` on: where that is, why it begins there, and what one micro-batch costs.

    `crossing_bytes` are those of values that cross its beginning, activations and gradients; `kept_bytes` those of
    activations that it keeps for its backward; `parameter_bytes` those of the parameters that it uses.
    """

    begin: int
    where: str
    reason: str
    forward_us: float
    backward_us: float
    crossing_bytes: int
    kept_bytes: int
    parameter_bytes: int


@dataclass(frozen=True)
class SplitPlan:
    """The stages of a forward of `num_calls` calls. `borders` is what `cut` takes; `str` is a table for people."""

    stages: tuple[PlannedStage, ...]
    num_calls: int

    @property
    def borders(self) -> tuple[int, ...]:
        return tuple(stage.begin for stage in self.stages[1:])

    @property
    def slowest_us(self) -> float:
        return max(stage.forward_us + stage.backward_us for stage in self.stages)

    def check(self, graph: StepGraph) -> None:
        """Raise `SplitError` unless a graph's forward has as many calls as the one that the plan was made for."""
        num_calls = len(forward_calls(graph))
        if num_calls != self.num_calls:
            raise SplitError(
                f"the plan is for a forward of {self.num_calls} calls, this one has {num_calls}: plan again"
            )

    def to_json(self) -> str:
        """The plan as text that `from_json` reads."""
        return json.dumps({"version": _VERSION, "num_calls": self.num_calls, "stages": [*map(asdict, self.stages)]})

    @staticmethod
    def from_json(text: str) -> SplitPlan:
        """Read what `to_json` wrote; raises `SplitError` for anything else."""
        if len(text) > _MAX_TEXT:
            raise SplitError(f"this is no split plan (it has {len(text)} characters; at most {_MAX_TEXT} are read)")
        try:
            return _plan(strict_json.parse(text.encode(), "the text"))
        except (strict_json.FileError, UnicodeEncodeError) as error:
            raise SplitError(f"this is no split plan ({error})") from None

    def __str__(self) -> str:
        rows = [("stage", "begins at", "why", "forward", "backward", "share", "crosses", "keeps", "parameters")]
        total_us = sum(stage.forward_us + stage.backward_us for stage in self.stages) or 1.0
        for number, stage in enumerate(self.stages):
            rows.append(
                (
                    str(number),
                    stage.where,
                    stage.reason,
                    f"{stage.forward_us / 1e3:.3f} ms",
                    f"{stage.backward_us / 1e3:.3f} ms",
                    f"{100 * (stage.forward_us + stage.backward_us) / total_us:.1f}%",
                    _readable(stage.crossing_bytes) if number else "-",
                    _readable(stage.kept_bytes),
                    _readable(stage.parameter_bytes),
                )
            )
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        return "\n".join(line.rstrip() for line in lines)


def _plan(data: Mapping[str, Any]) -> SplitPlan:
    found = strict_json.fields(data, "the plan", ("version", "num_calls", "stages"))
    version = strict_json.integer(found["version"], "its version")
    if version != _VERSION:
        raise SplitError(f"the split plan has version {version}; this release reads {_VERSION}")
    entries = strict_json.array(found["stages"], "its list of stages")
    if len(entries) > _MAX_STAGES:
        raise SplitError(f"this is no split plan (it has {len(entries)} stages; at most {_MAX_STAGES} are read)")
    stages = tuple(_stage(entry) for entry in entries)
    num_calls = strict_json.integer(found["num_calls"], "num_calls", _COUNT)
    numbers = [stage.begin for stage in stages]
    is_rising = all(before < behind for before, behind in pairwise([*numbers, num_calls]))
    if not numbers or numbers[0] != 0 or not is_rising:
        raise SplitError(f"this is no split plan (its stages begin at {numbers[:8]} of {num_calls} calls)")
    return SplitPlan(stages, num_calls)


def _stage(entry: Any) -> PlannedStage:
    names = {field.name: str(field.type) for field in fields(PlannedStage)}
    found = strict_json.fields(entry, "a stage", names)
    return PlannedStage(**{name: _READERS[kind](found[name], f"{name} of a stage") for name, kind in names.items()})


def _count(value: Any, what: str) -> int:
    return strict_json.integer(value, what, _COUNT)


def _time(value: Any, what: str) -> float:
    if not isinstance(value, float) or not (math.isfinite(value) and value >= 0):
        raise strict_json.FileError(f"{what} is a time, not negative and with a decimal point")
    return value


_READERS: Mapping[str, Callable[[Any, str], Any]] = {"int": _count, "float": _time, "str": strict_json.string}


def _readable(num_bytes: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} B"


def plan_split(
    captured: Capture,
    graph: StepGraph,
    *,
    num_stages: int | None = None,
    points: Points | None = None,
    policy: Policy | None = None,
    times_us: Mapping[fx.Node, float] | None = None,
    slack: float = 0.02,
    memory_bytes: int | None = None,
    in_flight: Sequence[int] | None = None,
) -> SplitPlan:
    """Decide where the step of a micro-batch is cut; `graph` is what passes have made of the captured one.

    Borders are where the forward calls `pipe_split()`, at `points` and where `policy` says, all of them together. If
    there are none, `num_stages` stages are balanced; if there are, it only says how many there must be.

    - `points`: `{"blocks.2": SplitPoint.BEGINNING}`, or a list of names of modules to begin a stage with.
    - `policy`: a function from the modules that the forward calls (`Layer`s, in order, with their costs) to points.
    - `times_us`: the time of each call, for balancing (`wholestep.cost.measured_times`); without it an ordinary device
      is assumed, alike on every rank.
    - `slack`: how much slower than need be the slowest stage may be, as a share, for fewer bytes to cross.
    - `memory_bytes`: the most a stage may keep for its backward, when balancing, with `in_flight` micro-batches of each
      stage kept at a time (as in 1F1B if not given: as many as there are stages from this one on).

    Raises `SplitError` naming the module, the mark or the two places between which there is nothing.
    """
    places = Places(captured, graph)
    if times_us is None:
        # Shares of the time are what counts, and figures that nobody measures are the same on every rank.
        times_us = estimated_times(graph, typical_device(graph.calls()))
    found = profile(graph, times_us)
    borders = marked_borders(places)
    if points is not None:
        borders += named_borders(places, points, "as asked")
    if policy is not None:
        borders += named_borders(places, _asked(policy, layers(places, found)), "by policy")
    if num_stages is not None and (type(num_stages) is not int or num_stages < 1):
        raise SplitError(f"num_stages is a whole number, 1 or more, not {num_stages!r}")
    if not borders:
        limit = _limit(num_stages, memory_bytes, in_flight)
        borders = _balanced(places, found, num_stages, slack, limit)
    borders = sorted(borders, key=lambda border: border.number)
    if num_stages is not None and len(borders) + 1 != num_stages:
        listed = ", ".join(border.where for border in borders[:4]) + (", ..." if len(borders) > 4 else "")
        raise SplitError(
            f"the borders that are given ({listed}) make {len(borders) + 1} stages, not {num_stages}: leave out "
            "num_stages, or the borders for automatic ones"
        )
    _refuse_empty(borders, found)
    return _described(borders, found)


def _asked(policy: Policy, modules: Sequence[Layer]) -> Points:
    points: Any = policy(modules)
    if not isinstance(points, (Mapping, Sequence)):
        raise SplitError(f"a split policy returns names of modules, not {type(points).__name__}")
    return points  # pyright: ignore[reportUnknownVariableType]


def layers(places: Places, found: Profile) -> list[Layer]:
    """The modules that the forward calls, in order; one around others comes before them."""
    return [
        Layer(
            name,
            type(places.modules[name]).__name__,
            name.count(".") + 1 if name else 0,
            begin,
            end,
            sum(found.forward_us[begin:end]),
            sum(found.backward_us[begin:end]),
            sum(parameter.numel() * parameter.element_size() for parameter in places.modules[name].parameters()),
        )
        for name, (begin, end) in places.spans.items()
    ]


def _limit(num_stages: int | None, memory_bytes: int | None, in_flight: Sequence[int] | None) -> Limit | None:
    if memory_bytes is None or num_stages is None:
        return None
    numbers = tuple(range(num_stages, 0, -1)) if in_flight is None else tuple(in_flight)
    if len(numbers) != num_stages:
        raise SplitError(f"in_flight has {len(numbers)} entries for {num_stages} stages")
    return Limit(memory_bytes, numbers)


def _balanced(
    places: Places, found: Profile, num_stages: int | None, slack: float, limit: Limit | None
) -> list[Border]:
    if num_stages is None:
        raise SplitError(
            "nothing says where to cut: give num_stages, points or a policy, or call pipe_split() in the forward"
        )
    ranks = {number: depth for number, (depth, _) in places.module_borders.items()}
    numbers = balance(found, num_stages, ranks=ranks, slack=slack, limit=limit)
    return [Border(number, places.describe(number), "balanced") for number in numbers]


_BEGINNING = Border(0, "the beginning of the forward", "")


def _refuse_empty(borders: Sequence[Border], found: Profile) -> None:
    edges = [_BEGINNING, *borders, Border(found.num_calls, "the end of the forward", "")]
    for number, (before, behind) in enumerate(pairwise(edges)):
        if not any(found.has_forward[before.number : behind.number]):
            raise SplitError(f"stage {number} would be empty: there is no op between {before.where} and {behind.where}")


def _described(borders: Sequence[Border], found: Profile) -> SplitPlan:
    edges = [_BEGINNING, *borders]
    ends = [*(border.number for border in borders), found.num_calls]
    return SplitPlan(
        tuple(
            PlannedStage(
                border.number,
                border.where,
                border.reason,
                float(sum(found.forward_us[border.number : end])),
                float(sum(found.backward_us[border.number : end])),
                found.crossing_bytes[border.number],
                sum(tally.num_bytes for tally in found.kept if tally.is_in(border.number, end)),
                sum(tally.num_bytes for tally in found.parameters if tally.is_in(border.number, end)),
            )
            for border, end in zip(edges, ends, strict=True)
        ),
        found.num_calls,
    )
