"""What a step keeps for its backward if a compiler fuses its ops: with or without a budget, a question of time.

Eager writes every value, and keeping one costs nothing. A kernel that fuses writes only what somebody wants from it,
and what the backward can compute on the way costs less than it would to keep. So there is a plan even without a
budget. Peaks are those of the planner's model of fusion (`wholestep.remat.fusion`).
"""

from __future__ import annotations

from wholestep.cost import DeviceModel, typical_device
from wholestep.graph import StepGraph
from wholestep.remat.budget import Budget, StepBudget
from wholestep.remat.build import step_program
from wholestep.remat.estimate import estimated_costs
from wholestep.remat.fusion import fused, without_replay
from wholestep.remat.modules import fix_modules
from wholestep.remat.partition import choose
from wholestep.remat.plan import RematPlan, describe_choice, start_names
from wholestep.remat.remat import Remat
from wholestep.remat.search import Planner


def fit_lowered_step(
    graph: StepGraph, budget: StepBudget | None, device: DeviceModel | None = None
) -> tuple[Remat, RematPlan]:
    """The `remat` pass for a decomposed step that is going to be lowered, and the plan behind it.

    Without a budget the step is as fast as the planner can make it. Raises `BudgetError` if no plan fits. Random ops do
    not run again. Times are those of `device`, of a typical one of the graph's kind if None.
    """
    said = budget or StepBudget()
    program = step_program(graph, estimated_costs(graph.nodes, "roofline", device))
    planner = Planner(without_replay(fused(program, device or typical_device(graph.nodes))))
    modules = fix_modules(planner, said.modules)
    planner = Planner(modules.problem) if said.modules else planner
    problem = planner.problem
    chosen = choose(planner, said.whole or Budget(share=1.0), held=modules.held(planner.everything))
    kept, repeated = describe_choice(problem, chosen, modules.reasons())
    plan = RematPlan(
        budget=str(said),
        peak_bytes=chosen.outcome.peak_bytes + problem.resident_bytes,
        unlimited_peak_bytes=planner.everything.outcome.peak_bytes + problem.resident_bytes,
        repeated_share=chosen.outcome.cost / max(problem.forward_cost, 1e-9),
        kept=kept,
        repeated=repeated,
        modules=modules.uses(chosen),
    )
    settled = modules.settled(chosen)
    # The pass reads the graph anew, and would take random ops for repeatable.
    drawn = {value for op in problem.ops if op.is_random and not op.is_late for value in op.makes}
    names = [problem.values[value].name for value in sorted(drawn | settled.decision.kept)]
    return Remat(kept=" ".join(names), starts=" ".join(start_names(problem, settled))), plan
