"""A memory budget for a whole step: plan, put into effect, and check what the finished graph really needs.

The planner simulates a functional graph; the finished one works in place and needs less. So the planner's limit is
moved until the predicted peak of the finished graph is as near to the budget as it gets, and never above it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from wholestep.cost import DeviceModel, MemoryProfile, dominant_logits, profile_memory
from wholestep.errors import BudgetError
from wholestep.graph import StepGraph
from wholestep.remat.apply import rematerialize
from wholestep.remat.budget import StepBudget, readable
from wholestep.remat.build import step_program
from wholestep.remat.curve import Curve, CurvePoint, MemoryStudy, Survey, best_points, spread_choices
from wholestep.remat.estimate import estimated_costs
from wholestep.remat.modules import fix_modules
from wholestep.remat.plan import RematPlan, describe_choice, kept_names, start_names
from wholestep.remat.problem import Decision
from wholestep.remat.remat import Remat
from wholestep.remat.search import Choice, Planner

logger = logging.getLogger(__name__)

_MAX_TRIES = 6
_NEAR = 0.01
Finish = Callable[[StepGraph], StepGraph]


def fit_step(
    graph: StepGraph, budget: StepBudget | None, finish: Finish, device: DeviceModel | None = None
) -> tuple[Remat, RematPlan, Survey]:
    """The `remat` pass that keeps a step within a budget, the plan behind it, and a survey of other plans.

    `graph` is functional and stays as it is; `finish` makes a copy of it run in place. Without a budget only
    `torch.utils.checkpoint` regions are dropped. What module budgets decide is fixed before the whole is planned. What
    runs again costs what it does on `device`; on a typical one of the graph's kind if None.
    Raises `BudgetError` if no plan fits.
    """
    said = budget or StepBudget()
    remat, plan = _Fitting(graph, said, finish, device).fit()
    untouched = graph.copy()  # passes rewrite the other one

    def again() -> _Fitting:
        return _Fitting(untouched, said, finish, device)

    return remat, plan, Survey(lambda: again().study(), lambda: again().smallest_peak_bytes)


@dataclass(frozen=True)
class _Tried:
    choice: Choice
    profile: MemoryProfile

    @property
    def peak_bytes(self) -> int:
        return self.profile.peak_bytes


class _Fitting:
    def __init__(self, graph: StepGraph, budget: StepBudget, finish: Finish, device: DeviceModel | None) -> None:
        self.graph = graph
        self.budget = budget
        self.finish = finish
        self.costs = estimated_costs(graph.nodes, "roofline", device)
        # Without module budgets, and with what they decide.
        self.unbound = Planner(step_program(graph, self.costs, updates_in_place=True).problem)
        self.modules = fix_modules(self.unbound, budget.modules)
        self.planner = Planner(self.modules.problem) if budget.modules else self.unbound
        self._tried: dict[Decision, _Tried] = {}

    def fit(self) -> tuple[Remat, RematPlan]:
        """The pass and the plan for the budget."""
        tried = self._chosen()
        return self._pass_of(tried), self._plan_of(tried)

    def study(self) -> MemoryStudy:
        """The plan for the budget among others. Same graph, same plan: it is found anew, nothing was kept for it."""
        chosen = self._chosen()
        for choice in spread_choices(self.planner):
            self._try(choice)
        forward = [self.planner.problem.ops[op] for op in self.planner.problem.forward_ops]
        return MemoryStudy(
            plan=self._plan_of(chosen),
            curve=Curve(best_points(map(self._point, self._tried.values())), self._point(chosen)),
            budget_bytes=self._limit(),
            before=self._unlimited,
            after=chosen.profile,
            modules=tuple(dict.fromkeys(op.module for op in forward)),
        )

    @cached_property
    def _unlimited(self) -> MemoryProfile:
        """What the step needs if nothing is dropped."""
        return self._profile(self.unbound.everything.decision) if self.budget.modules else self._everything.profile

    @property
    def _everything(self) -> _Tried:
        return self._try(self.planner.everything)

    def _chosen(self) -> _Tried:
        everything = self._everything
        limit = self._limit()
        if limit is None:
            return everything
        found = self._search(limit)
        if found is None:
            raise self._refusal()
        return found

    def _limit(self) -> int | None:
        """The budget in bytes of the finished graph's peak."""
        budget = self.budget.whole
        if budget is None or budget.share == 1:
            return None
        if budget.num_bytes is not None:
            return budget.num_bytes
        assert budget.share is not None
        most, least = self._everything.peak_bytes, self.smallest_peak_bytes
        return least + round(budget.share * (most - least))

    @property
    def smallest_peak_bytes(self) -> int:
        """The smallest peak that is known."""
        return min(self._everything.peak_bytes, self._try(self.planner.smallest).peak_bytes)

    def _point(self, tried: _Tried) -> CurvePoint:
        return CurvePoint(tried.peak_bytes, tried.choice.outcome.cost / max(self.planner.problem.forward_cost, 1e-9))

    def _search(self, budget_bytes: int) -> _Tried | None:
        """The cheapest choice whose finished graph fits."""
        limit = budget_bytes - self.planner.problem.resident_bytes
        for _ in range(_MAX_TRIES):
            best = self._cheapest(budget_bytes)
            if best is not None and best.choice.outcome.cost <= self.planner.everything.outcome.cost:
                break
            choice = self.planner.plan(limit)
            if choice is None or choice.decision in self._tried:
                break
            room = budget_bytes - self._try(choice).peak_bytes
            if 0 <= room <= _NEAR * budget_bytes:
                break
            limit += room
        if self._cheapest(budget_bytes) is None:
            self._try(self.planner.smallest)
        return self._cheapest(budget_bytes)

    def _cheapest(self, budget_bytes: int) -> _Tried | None:
        fitting = [tried for tried in self._tried.values() if tried.peak_bytes <= budget_bytes]
        return min(fitting, key=lambda tried: (tried.choice.outcome.cost, tried.peak_bytes), default=None)

    def _try(self, choice: Choice) -> _Tried:
        """Put a choice into effect on a copy and look at what that needs."""
        if choice.decision not in self._tried:
            self._tried[choice.decision] = _Tried(choice, self._profile(self.modules.settled(choice).decision))
        return self._tried[choice.decision]

    def _profile(self, decision: Decision) -> MemoryProfile:
        copy = self.graph.copy()
        rematerialize(copy, step_program(copy, {}), decision)
        copy.eliminate_dead_code()
        return profile_memory(self.finish(copy))

    def _plan_of(self, tried: _Tried) -> RematPlan:
        kept, repeated = describe_choice(self.planner.problem, tried.choice, self.modules.reasons())
        return RematPlan(
            budget=str(self.budget),
            peak_bytes=tried.peak_bytes,
            unlimited_peak_bytes=self._unlimited.peak_bytes,
            repeated_share=self._point(tried).repeated_share,
            kept=kept,
            repeated=repeated,
            modules=self.modules.uses(tried.choice),
        )

    def _pass_of(self, tried: _Tried) -> Remat:
        problem, choice = self.planner.problem, self.modules.settled(tried.choice)
        if choice.decision == self.unbound.everything.decision:
            return Remat()
        return Remat(kept=" ".join(kept_names(problem, choice)), starts=" ".join(start_names(problem, choice)))

    def _refusal(self) -> BudgetError:
        least = min(self._tried.values(), key=lambda tried: tried.peak_bytes)
        smallest, logits = least.peak_bytes, dominant_logits(least.profile)
        resident = self.planner.problem.resident_bytes
        return BudgetError(
            f"memory_budget={self.budget.whole} cannot be kept: the smallest peak found for this step is "
            f"{readable(smallest)} ({smallest} bytes), of which {readable(resident)} are parameters, optimizer state "
            f"and inputs{self.modules.held(self.planner.everything)}{'' if logits is None else f'; {logits}'}",
            smallest,
        )
