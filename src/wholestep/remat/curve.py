"""What a memory budget is traded for: the lowest peaks that are known and the work they repeat, as data for pictures.

A curve means planning for many budgets. Nobody pays for that before somebody asks: `Survey` remembers the question.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

from wholestep.cost import MemoryProfile
from wholestep.remat.plan import RematPlan
from wholestep.remat.search import Choice, Planner

NUM_BUDGETS = 11


@dataclass(frozen=True, order=True)
class CurvePoint:
    """A plan in two figures: its peak, with all that is resident, and what it repeats as a share of the forward."""

    peak_bytes: int
    repeated_share: float


@dataclass(frozen=True)
class Curve:
    """The best plans known, by rising peak and falling work; nobody has both figures lower.

    `chosen` is the plan in use. It is one of the points unless a search for another budget has met a better plan.
    """

    points: tuple[CurvePoint, ...]
    chosen: CurvePoint


@dataclass(frozen=True)
class MemoryStudy:
    """A memory plan and what it was chosen from.

    `budget_bytes` is the limit for the peak, None if there is none. `before` and `after` are the step with everything
    kept and with the plan, op by op. Gradient buckets and updates that wait for the next call are in neither.
    `modules` are those of the forward, in execution order.
    """

    plan: RematPlan
    curve: Curve
    budget_bytes: int | None
    before: MemoryProfile
    after: MemoryProfile
    modules: tuple[str, ...]


class Survey:
    """A `MemoryStudy` on demand, or just the smallest peak that is possible, which takes less.

    Until the study is asked for, both keep alive what they need: a copy of the graph.
    """

    def __init__(self, examine: Callable[[], MemoryStudy], find_smallest: Callable[[], int] | None = None) -> None:
        self._examine: Callable[[], MemoryStudy] | None = examine
        self._find_smallest = find_smallest

    @cached_property
    def study(self) -> MemoryStudy:
        assert self._examine is not None
        study = self._examine()
        self._examine = self._find_smallest = None
        return study

    @cached_property
    def smallest_peak_bytes(self) -> int:
        if self._find_smallest is None:
            return self.study.curve.points[0].peak_bytes
        return self._find_smallest()


def best_points(points: Iterable[CurvePoint]) -> tuple[CurvePoint, ...]:
    """Points that no other beats in one figure without losing in the other, by rising peak."""
    best: list[CurvePoint] = []
    for point in sorted(points):
        if not best or point.repeated_share < best[-1].repeated_share:
            best.append(point)
    return tuple(best)


def spread_choices(planner: Planner, num_budgets: int = NUM_BUDGETS) -> list[Choice]:
    """What the planner chooses for budgets between the smallest peak and that of keeping everything."""
    low, high = planner.smallest.outcome.peak_bytes, planner.cheapest.outcome.peak_bytes
    limits = [low + (high - low) * index // (num_budgets - 1) for index in range(1, num_budgets - 1)]
    between = [choice for limit in limits if (choice := planner.plan(limit)) is not None]
    return [planner.smallest, *between, planner.cheapest]


def planned_curve(planner: Planner, chosen: Choice) -> Curve:
    """The curve of any problem (a joint graph's, say), with the peaks that the planner predicts."""
    problem = planner.problem

    def point(choice: Choice) -> CurvePoint:
        peak_bytes = choice.outcome.peak_bytes + problem.resident_bytes
        return CurvePoint(peak_bytes, choice.outcome.cost / max(problem.forward_cost, 1e-9))

    points = [point(choice) for choice in (*spread_choices(planner), chosen)]
    return Curve(best_points(points), point(chosen))
