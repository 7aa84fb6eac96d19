"""What was decided about a step's memory, as data: kept values, repeated ops, predicted peaks, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from wholestep.remat.budget import readable
from wholestep.remat.problem import INPUT, Decision, Problem
from wholestep.remat.search import Choice
from wholestep.remat.simulate import Simulator

# More modules than this are counted, not named, in one sentence.
_MAX_NAMED = 6


@dataclass(frozen=True)
class KeptValue:
    """A forward value that stays in memory for the backward."""

    name: str
    module: str
    num_bytes: int
    reason: str


@dataclass(frozen=True)
class RepeatedOp:
    """A forward op that runs again in the backward, `times` times in all, and what one run costs.

    `share` is what all its second runs cost together, over the cost of the forward.
    """

    name: str
    module: str
    times: int
    flops: int
    moved_bytes: int
    share: float


@dataclass(frozen=True)
class ModuleUse:
    """What a module with a budget of its own keeps for the backward, and would keep if nothing was dropped.

    Modules inside it that have a budget of their own count for themselves.
    """

    name: str
    budget: str
    kept_bytes: int
    unlimited_bytes: int

    def __str__(self) -> str:
        return f"'{self.name}' keeps {readable(self.kept_bytes)} of {readable(self.unlimited_bytes)} ({self.budget})"


@dataclass(frozen=True)
class RematPlan:
    """The memory plan of a step.

    Peaks are of the whole step, with parameters and optimizer state. `repeated_share` is the cost of second runs over
    that of the forward. `modules` are those with a budget of their own.
    """

    budget: str
    peak_bytes: int
    unlimited_peak_bytes: int
    repeated_share: float
    kept: tuple[KeptValue, ...]
    repeated: tuple[RepeatedOp, ...]
    modules: tuple[ModuleUse, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def __str__(self) -> str:
        kept_bytes = sum(value.num_bytes for value in self.kept)
        num_runs = sum(op.times for op in self.repeated)
        return (
            f"memory budget {self.budget}: peak {readable(self.peak_bytes)} instead of "
            f"{readable(self.unlimited_peak_bytes)}, {len(self.kept)} values kept ({readable(kept_bytes)}), "
            f"{num_runs} ops run again ({self.repeated_share:.1%} of the forward)"
            f"{describe_uses(self.modules)}"
        )


def describe_uses(modules: Sequence[ModuleUse]) -> str:
    """What bounded modules keep, as the end of a sentence; nothing if there are none."""
    named = "".join(f"; {module}" for module in modules[:_MAX_NAMED])
    left_out = len(modules) - _MAX_NAMED
    return f"{named}; {left_out} more modules have a budget" if left_out > 0 else named


def kept_names(problem: Problem, choice: Choice) -> tuple[str, ...]:
    """Names of the values a choice keeps, as the `remat` pass takes them."""
    return tuple(problem.values[value].name for value in sorted(choice.decision.kept))


def start_names(problem: Problem, choice: Choice) -> tuple[str, ...]:
    """Names of the late ops with which segments begin."""
    return tuple(problem.ops[op].name for op in sorted(choice.decision.starts))


def values_read(problem: Problem, decision: Decision) -> frozenset[int]:
    """Forward values that a decision holds for the backward: they are kept, and late ops or second runs read them."""
    simulator = Simulator(problem)
    is_kept = simulator.kept_flags(decision.kept)
    return frozenset(
        value
        for op, segment in simulator.events(decision)
        if segment is not None or problem.ops[op].is_late
        for value in problem.ops[op].reads
        if is_kept[value] and _is_forward(problem, value)
    )


def describe_choice(
    problem: Problem, choice: Choice, reasons: Mapping[int, str] | None = None
) -> tuple[tuple[KeptValue, ...], tuple[RepeatedOp, ...]]:
    """What a choice keeps (as far as late ops read it) and what runs again; `reasons` are known ones, by value."""
    read = values_read(problem, choice.decision)
    kept = tuple(_kept_value(problem, value, (reasons or {}).get(value, "")) for value in sorted(read))
    events = Simulator(problem).events(choice.decision)
    times = Counter(op for op, segment in events if segment is not None)
    whole = max(problem.forward_cost, 1e-9)
    repeated = tuple(
        RepeatedOp(op.name, op.module, times[index], op.flops, op.moved_bytes, times[index] * op.cost / whole)
        for index, op in enumerate(problem.ops)
        if index in times
    )
    return kept, repeated


def _is_forward(problem: Problem, value: int) -> bool:
    maker = problem.values[value].maker
    return maker != INPUT and not problem.ops[maker].is_late


def _kept_value(problem: Problem, value: int, known_reason: str) -> KeptValue:
    item = problem.values[value]
    op = problem.ops[item.maker]
    if known_reason:
        reason = known_reason
    elif op.unrepeatable:
        reason = f"cannot run again: {op.unrepeatable}"
    elif value in problem.must_keep:
        reason = "annotated so"
    elif op.flops:
        reason = f"{op.flops / max(1, item.num_bytes):.0f} flops per byte to compute again"
    else:
        reason = "others are computed from it"
    return KeptValue(item.name, op.module, item.num_bytes, reason)
