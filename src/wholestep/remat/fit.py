"""A memory budget for a whole step: plan, put into effect, and check what the finished graph really needs.

The planner simulates a functional graph; the finished one works in place and needs less. So the planner's limit is
moved until the predicted peak of the finished graph is as near to the budget as it gets, and never above it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from wholestep.cost import profile_memory
from wholestep.errors import BudgetError
from wholestep.graph import StepGraph
from wholestep.remat.apply import rematerialize
from wholestep.remat.budget import Budget, readable
from wholestep.remat.build import step_program
from wholestep.remat.estimate import estimated_costs
from wholestep.remat.plan import RematPlan, describe_choice, kept_names, start_names
from wholestep.remat.problem import Decision
from wholestep.remat.remat import Remat
from wholestep.remat.search import Choice, Planner

logger = logging.getLogger(__name__)

_MAX_TRIES = 6
_NEAR = 0.01
Finish = Callable[[StepGraph], StepGraph]


def fit_step(graph: StepGraph, budget: Budget | None, finish: Finish) -> tuple[Remat, RematPlan]:
    """The `remat` pass that keeps a step within a budget, and the plan behind it.

    `graph` is functional and stays as it is; `finish` makes a copy of it run in place. Without a budget only
    `torch.utils.checkpoint` regions are dropped. Raises `BudgetError` if no plan fits.
    """
    return _Fitting(graph, finish).fit(budget)


@dataclass(frozen=True)
class _Tried:
    choice: Choice
    peak_bytes: int


class _Fitting:
    def __init__(self, graph: StepGraph, finish: Finish) -> None:
        self.graph = graph
        self.finish = finish
        self.costs = estimated_costs(graph.nodes, "roofline")
        self.planner = Planner(step_program(graph, self.costs).problem)
        self._tried: dict[Decision, _Tried] = {}

    def fit(self, budget: Budget | None) -> tuple[Remat, RematPlan]:
        everything = self._try(self.planner.everything)
        if budget is None or budget.share == 1:
            return self._result(budget, everything)
        if budget.num_bytes is None:
            assert budget.share is not None
            smallest = min(everything, self._try(self.planner.smallest), key=lambda tried: tried.peak_bytes)
            limit = smallest.peak_bytes + round(budget.share * (everything.peak_bytes - smallest.peak_bytes))
        else:
            limit = budget.num_bytes
        found = self._search(limit)
        if found is None:
            raise self._refusal(budget)
        return self._result(budget, found)

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
            copy = self.graph.copy()
            rematerialize(copy, step_program(copy, {}), choice.decision)
            copy.eliminate_dead_code()
            self._tried[choice.decision] = _Tried(choice, profile_memory(self.finish(copy)).peak_bytes)
        return self._tried[choice.decision]

    def _result(self, budget: Budget | None, tried: _Tried) -> tuple[Remat, RematPlan]:
        problem, everything = self.planner.problem, self._try(self.planner.everything)
        kept, repeated = describe_choice(problem, tried.choice)
        plan = RematPlan(
            budget="none" if budget is None else str(budget),
            peak_bytes=tried.peak_bytes,
            unlimited_peak_bytes=everything.peak_bytes,
            repeated_share=tried.choice.outcome.cost / max(problem.forward_cost, 1e-9),
            kept=kept,
            repeated=repeated,
        )
        if tried is everything:
            return Remat(), plan
        kept_text = " ".join(kept_names(problem, tried.choice))
        return Remat(kept=kept_text, starts=" ".join(start_names(problem, tried.choice))), plan

    def _refusal(self, budget: Budget) -> BudgetError:
        smallest = min(tried.peak_bytes for tried in self._tried.values())
        resident = self.planner.problem.resident_bytes
        return BudgetError(
            f"memory_budget={budget} cannot be kept: the smallest peak found for this step is {readable(smallest)} "
            f"({smallest} bytes), of which {readable(resident)} are parameters, optimizer state and inputs",
            smallest,
        )
