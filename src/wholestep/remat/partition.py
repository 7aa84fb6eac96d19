"""`wholestep.partition`: a joint graph in, forward and backward modules out, within a memory budget."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from torch import fx

from wholestep.errors import BudgetError, WholestepError
from wholestep.remat.budget import Budget, readable
from wholestep.remat.estimate import estimated_costs, typical_device
from wholestep.remat.fusion import fused
from wholestep.remat.joint import Joint, deduplicated, read_joint, split_joint
from wholestep.remat.knapsack import METHODS
from wholestep.remat.problem import Problem
from wholestep.remat.search import Choice, Planner

logger = logging.getLogger(__name__)

SOLVERS = ("auto", "default", "mincut", *METHODS)


@dataclass(frozen=True)
class Partition:
    """A joint graph cut in two, and why so."""

    forward: fx.GraphModule
    backward: fx.GraphModule
    joint: Joint
    choice: Choice


def partition_joint(
    module: fx.GraphModule,
    *,
    num_fwd_outputs: int,
    memory_budget: object = 1.0,
    solver: str = "auto",
    estimator: str = "flops",
    fusing: bool = False,
) -> Partition:
    """See `wholestep.partition`; this also returns the plan.

    `fusing` plans for a compiler that fuses ops. It gets random ops that are pure already; others never run again.
    """
    if solver not in SOLVERS:
        raise WholestepError(f"there is no solver '{solver}'; choose from {', '.join(SOLVERS)}")
    budget = Budget.of(memory_budget)
    merged = deduplicated(module)
    joint = read_joint(merged, num_fwd_outputs, estimated_costs(merged.graph.nodes, estimator))
    if fusing:
        problem = fused(joint.program, typical_device(merged.graph.nodes))
        joint = replace(joint, program=replace(joint.program, problem=_without_replay(problem)))
    planner = Planner(joint.problem)
    choice = choose(planner, budget, solver)
    logger.info(
        "memory budget %s: peak %s predicted, %s of it inputs; %d ops run again",
        budget,
        readable(choice.outcome.peak_bytes + joint.problem.resident_bytes),
        readable(joint.problem.resident_bytes),
        choice.outcome.num_again,
    )
    forward, backward = split_joint(joint, choice.decision)
    return Partition(forward, backward, joint, choice)


def choose(planner: Planner, budget: Budget, solver: str = "auto") -> Choice:
    """The choice a budget leads to; raises `BudgetError` if there is none."""
    if solver == "default":
        return planner.everything
    if solver == "mincut":
        return planner.without_flops
    if budget.share is not None:
        if budget.share >= 1:
            return planner.cheapest
        low, high = planner.smallest.outcome.peak_bytes, planner.cheapest.outcome.peak_bytes
        limit = low + round(budget.share * (high - low))
    else:
        assert budget.num_bytes is not None
        limit = budget.num_bytes - planner.problem.resident_bytes
    choice = planner.plan(limit) if solver == "auto" else planner.by_knapsack(limit, solver)
    if choice is None:
        smallest = planner.smallest.outcome.peak_bytes + planner.problem.resident_bytes
        raise BudgetError(
            f"a budget of {readable(budget.num_bytes or 0)} cannot be kept: the smallest peak found is "
            f"{readable(smallest)}, of which {readable(planner.problem.resident_bytes)} are inputs",
            smallest,
        )
    return choice


def _without_replay(problem: Problem) -> Problem:
    ops = [replace(op, unrepeatable="it is random") if op.is_random and not op.is_late else op for op in problem.ops]
    return replace(problem, ops=tuple(ops))
