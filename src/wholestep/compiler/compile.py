"""The two verbs of the compiler: `plan` decides, `build` makes the graphs that a plan says.

    draft = begin(graph, options, hardware)         what a rank decides for itself
    plan = settle(draft, communication)             with what ranks have agreed on
    loop = build(draft.graph, plan)                 the graphs of the loop, each when it is needed

`plan(graph, options, hardware)` is the first two in one, for those who have no ranks to ask.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from wholestep.comm.plan import DataParallelPlan
from wholestep.compiler.draft import Draft
from wholestep.compiler.hardware import Hardware
from wholestep.compiler.imagined import imagined_communication
from wholestep.compiler.loop import LoopGraphs
from wholestep.compiler.made_for import MadeFor
from wholestep.compiler.options import StepOptions
from wholestep.compiler.plan import Plan
from wholestep.compiler.stages import LOOP_STAGES, SHARED_STAGES, STEP_STAGES, Stage, follow, run_stages
from wholestep.cost import profile_memory
from wholestep.errors import PassError
from wholestep.graph import StepGraph
from wholestep.passes import Pipeline, run_passes
from wholestep.remat import readable

logger = logging.getLogger(__name__)


def plan(graph: StepGraph, options: StepOptions, hardware: Hardware | None = None) -> Plan:
    """Decide everything about a captured step, for hardware that need not be there; the graph stays as it is.

    Raises `BudgetError` if the memory budget cannot be kept.
    """
    hardware = hardware or Hardware()
    draft = begin(graph.copy(), options, hardware, world=hardware.world)
    return settle(draft, imagined_communication(draft.graph, options, draft.hardware))


def begin(
    graph: StepGraph,
    options: StepOptions,
    hardware: Hardware,
    *,
    name: str = "the step",
    world: int = 1,
    looks: bool = False,
    num_checkpoint_regions: int = 0,
    dump_dir: Path | None = None,
    stages: tuple[Stage, ...] = STEP_STAGES,
) -> Draft:
    """Decide what each rank decides for itself, or some of it; the graph is rewritten accordingly.

    With a plan among the options, that is what it says; raises `PlanError` if it was made for something else.
    """
    made_for = MadeFor.of(graph, name, world)
    draft = Draft(graph, options, hardware, made_for, name, looks, num_checkpoint_regions, dump_dir)
    if options.plan is not None:
        options.plan.made_for.require_same(made_for)
        draft.is_lowered, draft.memory = options.plan.is_lowered, options.plan.memory
        follow(options.plan, stages, draft)
    else:
        draft.is_lowered = _lowers(draft)
        run_stages(stages, draft)
    return draft


def plan_memory(draft: Draft) -> Pipeline:
    """Decide what is kept for the backward, where nobody has yet; returns the passes that do so."""
    before = len(draft.rewrites)
    run_stages(tuple(stage for stage in STEP_STAGES if stage.name == "memory"), draft)
    return Pipeline(tuple(item for choice in draft.rewrites[before:] for item in choice.passes))


def settle(draft: Draft, communication: DataParallelPlan | None, *, group: str = "") -> Plan:
    """Decide the rest, given how gradients travel (None on one rank), and in which process group."""
    draft.communication, draft.group = communication, group
    if draft.options.plan is not None:
        follow(draft.options.plan, SHARED_STAGES, draft)
        return draft.options.plan
    run_stages((*SHARED_STAGES, *LOOP_STAGES), draft)
    return Plan(draft.made_for, tuple(draft.rewrites), tuple(draft.loop), communication, draft.memory)


def build(graph: StepGraph, plan: Plan, *, group: str = "", dump_dir: Path | None = None) -> LoopGraphs:
    """The graphs that a plan makes of a captured step, or of one that has been rewritten by a part of the plan.

    `group` names the process group that gradients travel in.
    """
    passes = plan.step_passes(group)
    done = [record.text for record in graph.history]
    if [str(item) for item in passes[: len(done)]] != done:
        names = ", ".join(record.name for record in graph.history)
        raise PassError(f"the graph has been rewritten by {names}, which is not how the plan begins")
    left = passes[len(done) :]
    return LoopGraphs(run_passes(graph, left, dump_dir=dump_dir) if left else graph, plan)


def with_peak(plan: Plan, loop: LoopGraphs, options: StepOptions, name: str) -> Plan:
    """A plan with the peak of the graph that runs: buckets and what crosses iterations come on top.

    Of a lowered graph the planner's own prediction is all there is.
    """
    if plan.memory is None or plan.is_lowered:
        return plan
    memory = replace(plan.memory, peak_bytes=profile_memory(loop.main).peak_bytes)
    budget = None if options.memory_budget is None else options.memory_budget.whole
    if budget is not None and budget.num_bytes is not None and memory.peak_bytes > budget.num_bytes:
        logger.warning(
            "%s needs %s, more than its memory budget of %s: gradient buckets and pending updates came on top of "
            "what was planned; ask for that much less",
            *(name, readable(memory.peak_bytes), readable(budget.num_bytes)),
        )
    return replace(plan, memory=memory)


def _lowers(draft: Draft) -> bool:
    """Whether a graph is lowered; with `"auto"` it is where there is a compiler for it."""
    if draft.options.lower != "auto":
        return draft.options.lower == "inductor"
    from wholestep import _inductor_torch  # takes seconds

    reason = _inductor_torch.why_no_compiler(is_cuda=draft.is_on_cuda)
    if reason:
        logger.info("%s is not lowered: %s", draft.name, reason)
    return not reason
