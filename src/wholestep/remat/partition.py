"""`wholestep.partition`: a joint graph in, forward and backward modules out, within a memory budget."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from torch import fx

from wholestep.cost import typical_device
from wholestep.errors import BudgetError, WholestepError
from wholestep.remat.annotations import read_annotations
from wholestep.remat.budget import Budget, StepBudget, readable
from wholestep.remat.build import Program
from wholestep.remat.estimate import estimated_costs
from wholestep.remat.fusion import fused, without_replay
from wholestep.remat.joint import Joint, deduplicated, read_joint, split_joint
from wholestep.remat.knapsack import METHODS
from wholestep.remat.modules import fix_modules, name_modules
from wholestep.remat.padding import share_paddings
from wholestep.remat.rules import BanRules, banned_ops
from wholestep.remat.search import Choice, Planner

logger = logging.getLogger(__name__)

SOLVERS = ("auto", "default", "mincut", *METHODS, "exact")
_SOLVERS_WITH_RULES = ("mincut", *METHODS)
# Larger graphs take minutes, and the planner's plans for them are hardly dearer.
_MAX_EXACT_OPS = 1000


@dataclass(frozen=True)
class Partition:
    """A joint graph cut in two, and why so.

    `banned` has the forward's ops that were not to run again, by name, with the reason. One that comes from a rule
    begins with its name: `materialized_in_backward: mm_2 reads it from memory`.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    joint: Joint
    choice: Choice
    banned: Mapping[str, str]


def partition_joint(
    module: fx.GraphModule,
    *,
    num_fwd_outputs: int,
    memory_budget: object = 1.0,
    solver: str = "auto",
    estimator: str = "flops",
    rules: BanRules | None = None,
    fusing: bool = False,
) -> Partition:
    """See `wholestep.partition`; this also returns the plan.

    `fusing` plans for a compiler that fuses ops. It gets random ops that are pure already; others never run again.
    """
    check_solver(solver, rules)
    budget = StepBudget.of(memory_budget)
    merged = deduplicated(module)
    if fusing:
        share_paddings(merged)
    read_annotations(merged.graph.nodes)
    name_modules(merged.graph.nodes)
    joint = read_joint(merged, num_fwd_outputs, estimated_costs(merged.graph.nodes, estimator))
    if fusing:
        problem = fused(joint.program, typical_device(merged.graph.nodes))
        joint = replace(joint, program=replace(joint.program, problem=without_replay(problem)))
    planner = Planner(joint.problem)
    modules = fix_modules(planner, budget.modules, is_whole=not fusing)
    if budget.modules:
        joint = replace(joint, program=replace(joint.program, problem=modules.problem))
        planner = Planner(joint.problem)
    banned = _banned(joint.program, solver, rules)
    choice = choose(planner, budget.whole or Budget(share=1.0), solver, banned, modules.held(planner.everything))
    logger.info(
        "memory budget %s: peak %s predicted, %s of it inputs; %d ops run again",
        budget,
        readable(choice.outcome.peak_bytes + joint.problem.resident_bytes),
        readable(joint.problem.resident_bytes),
        choice.outcome.num_again,
    )
    forward, backward = split_joint(joint, choice.decision)
    return Partition(forward, backward, joint, choice, _by_name(joint.program, banned))


def check_solver(solver: str, rules: object) -> None:
    """Refuse a solver that does not exist, and rules it does not ask."""
    if solver not in SOLVERS:
        raise WholestepError(f"there is no solver '{solver}'; choose from {', '.join(SOLVERS)}")
    if rules is None:
        return
    if not isinstance(rules, BanRules):
        raise WholestepError(f"rules are a wholestep.BanRules, not {rules!r}")
    if solver not in _SOLVERS_WITH_RULES:
        raise WholestepError(f"the solver '{solver}' takes no rules; {', '.join(_SOLVERS_WITH_RULES)} do")


def choose(
    planner: Planner, budget: Budget, solver: str = "auto", banned: Collection[int] = (), held: str = ""
) -> Choice:
    """The choice a budget leads to if no op of `banned` runs again.

    Raises `BudgetError` if there is none; `held` says what else stands in the way, as the end of its sentence.
    """
    if solver == "default":
        return planner.everything
    if solver == "mincut":
        return planner.fewest_bytes(banned)
    if solver == "exact" and len(planner.problem.ops) > _MAX_EXACT_OPS:
        raise WholestepError(
            f"the solver 'exact' takes graphs of up to {_MAX_EXACT_OPS} ops and this one has "
            f"{len(planner.problem.ops)}; use 'auto'"
        )
    if budget.share is not None:
        cheapest = planner.everything if banned else planner.cheapest
        if budget.share >= 1 and solver != "exact":
            return cheapest
        low, high = _smallest(planner, banned).outcome.peak_bytes, cheapest.outcome.peak_bytes
        limit = low + round(budget.share * (high - low))
    else:
        assert budget.num_bytes is not None
        limit = budget.num_bytes - planner.problem.resident_bytes
    choice = _planned(planner, limit, solver, banned)
    if choice is not None:
        return choice
    smallest = _smallest(planner, banned)
    if smallest.outcome.fits(limit):
        return smallest
    smallest_bytes = smallest.outcome.peak_bytes + planner.problem.resident_bytes
    raise BudgetError(
        f"a budget of {readable(budget.num_bytes or 0)} cannot be kept: the smallest peak found is "
        f"{readable(smallest_bytes)}, of which {readable(planner.problem.resident_bytes)} are inputs"
        f"{held}",
        smallest_bytes,
    )


def _planned(planner: Planner, limit_bytes: int, solver: str, banned: Collection[int]) -> Choice | None:
    """What a solver chooses for a limit without resident bytes."""
    if solver == "auto":
        return planner.plan(limit_bytes)
    if solver != "exact":
        return planner.by_knapsack(limit_bytes, solver, banned)
    choice = planner.exactly(limit_bytes)
    if choice is not None and not choice.is_proven:
        logger.warning("the exact solver did not come to an end: there may be a cheaper plan than this one")
    return choice


def _smallest(planner: Planner, banned: Collection[int]) -> Choice:
    """The lowest peak that is found if no op of `banned` runs again."""
    if not banned:
        return planner.smallest
    cuts = (planner.fewest_bytes(banned), planner.fewest_bytes(planner.dear.union(banned)))
    return min(planner.everything, *cuts, key=lambda choice: choice.outcome.peak_bytes)


def _banned(program: Program, solver: str, rules: BanRules | None) -> dict[int, str]:
    """Ops that the solver must not repeat, beside those that nobody may."""
    banned = {} if rules is None else banned_ops(program, rules)
    if solver != "mincut":
        return banned
    problem = program.problem
    for index in problem.forward_ops:
        op, node = problem.ops[index], program.nodes[index]
        if index in problem.forced or op.unrepeatable or node is None:
            continue
        if op.flops:
            banned[index] = f"compute_intensive: {op.flops} flops"
        elif node.meta.get("checkpoint_region") is not None:
            banned[index] = "checkpoint: it leaves its region or is preferably saved"
    return banned


def _by_name(program: Program, banned: Mapping[int, str]) -> dict[str, str]:
    reasons = {
        op.name: op.unrepeatable or banned.get(index, "")
        for index, op in enumerate(program.problem.ops)
        if program.nodes[index] is not None and not op.is_late
    }
    return {name: reason for name, reason in reasons.items() if reason}
