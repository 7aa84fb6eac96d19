"""The compiler as one table: what happens to a captured step, in order.

Each stage looks at the draft, decides, and says why (`Draft.rewrite`, `Draft.finish`). Stages of the step rewrite it as
one function; then the graphs of the loop are derived, and stages of the loop say what is done to each.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from wholestep.comm import AllReduce, Bucket, FillBuckets, Overlap, SplitOptimizer
from wholestep.comm.bucket import format_groups
from wholestep.comm.plan import DataParallelPlan
from wholestep.compiler.draft import Draft, in_place_passes, rewriting_passes
from wholestep.compiler.plan import Plan
from wholestep.cost import dominant_logits, profile_memory
from wholestep.graph import ops
from wholestep.iteration import Rotate
from wholestep.lower import Decompose, Lower, Masks, WriteRegions
from wholestep.passes import ChunkLoss, LossGradient, PadLogits, Pass, mark_logits
from wholestep.remat import fit_lowered_step, fit_step

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Stage:
    """A row of the table: its name, when it has something to do, in words and as a question, and what it does."""

    name: str
    when: str
    applies: Callable[[Draft], bool]
    decide: Callable[[Draft], None]


def _simplify(draft: Draft) -> None:
    draft.rewrite("simplify", rewriting_passes(draft.options.pipeline), "the same bits with fewer ops")


def _chunk_loss(draft: Draft) -> None:
    """A loss that cannot be had in chunks is warned about.

    `"auto"` asks what the peak consists of; if a plan is going to change that, for as many chunks as are useful.
    """
    heads, reasons = mark_logits(draft.graph)
    chunks = draft.options.chunk_loss
    if chunks is None:
        return
    if reasons:
        logger.warning("%s: chunk_loss=%s leaves a loss in one piece: %s", draft.name, chunks, "; ".join(reasons))
    reason = "as asked for"
    if isinstance(chunks, str) and draft.is_planned:
        chunks, reason = max((head.useful_chunks for head in heads), default=1), "as many as are useful"
    elif isinstance(chunks, str):
        logits = dominant_logits(profile_memory(draft.run_in_place(draft.graph.copy())))
        chunks, reason = (
            (1, "logits are not what the peak consists of") if logits is None else (logits.chunks, str(logits))
        )
    draft.rewrite("chunk_loss", [ChunkLoss(chunks)] if heads and chunks > 1 else [], reason)


def _pad(draft: Draft) -> None:
    draft.rewrite("pad", [PadLogits()], "products over a padded vocabulary are faster")


def _decompose(draft: Draft) -> None:
    draft.rewrite("decompose", [LossGradient(), Masks(), Decompose()], "into ops that Inductor fuses best")


def _memory(draft: Draft) -> None:
    budget, device = draft.options.memory_budget, draft.hardware.device
    if draft.is_lowered:
        remat, draft.memory = fit_lowered_step(draft.graph, budget, device)
    else:
        remat, draft.memory, draft.survey = fit_step(draft.graph, budget, draft.run_in_place, device)
    draft.rewrite("memory", [remat], str(draft.memory))


def _communicate(draft: Draft) -> None:
    plan = draft.communication
    assert plan is not None
    reason = f"{len(plan.buckets)} buckets over {plan.world} ranks, the updates of {len(plan.moved)} in the next call"
    draft.rewrite("communicate", communication_passes(plan), reason)


def _rotate(draft: Draft) -> None:
    """On one rank there is no communication to hide: updates move only if told to."""
    wanted = draft.options.cross_iteration
    if draft.looks or ops.may_raise_in_python(draft.graph.nodes):
        logger.warning(
            "cross_iteration=%r: no update of %s waits, as the step looks at values and may take another course",
            *(wanted, draft.name),
        )
        return
    names = "" if isinstance(wanted, str) else " ".join(wanted)
    passes: list[Pass] = [SplitOptimizer(apart=names), Rotate(names=names)] if names else [Rotate()]
    draft.rewrite("rotate", passes, f"cross_iteration={wanted!r}")


def _lower(draft: Draft) -> None:
    draft.finish("lower", [Lower()], "runs of ops become regions that Inductor compiles")


def _run_in_place(draft: Draft) -> None:
    draft.finish("in place", in_place_passes(draft.options.pipeline), "where nobody reads the old value any more")


def _fill(draft: Draft) -> None:
    draft.finish("fill", [FillBuckets()], "gradients are computed into their buckets")


def _write(draft: Draft) -> None:
    draft.finish("write", [WriteRegions()], "regions write to the memory of slots")


def _always(_: Draft) -> bool:
    return True


def _is_lowered(draft: Draft) -> bool:
    return draft.is_lowered


def _communicates(draft: Draft) -> bool:
    return draft.communication is not None


def _moves_locally(draft: Draft) -> bool:
    return draft.communication is None and draft.options.cross_iteration not in ("auto", "none")


REWRITING_STAGES = (
    Stage("simplify", "always", _always, _simplify),
    Stage("pad", "lowered, on CUDA", lambda draft: draft.is_lowered and draft.is_on_cuda, _pad),
    Stage("chunk_loss", "always: heads of the loss are marked", _always, _chunk_loss),
    Stage("decompose", "lowered", _is_lowered, _decompose),
)
"""What ops there are."""

STEP_STAGES = (
    *REWRITING_STAGES,
    Stage(
        "memory",
        "lowered, memory_budget, or checkpoint regions",
        lambda draft: draft.is_lowered or draft.is_planned,
        _memory,
    ),
)
"""What one rank decides for itself."""

SHARED_STAGES = (
    Stage("communicate", "data_parallel", _communicates, _communicate),
    Stage("rotate", "one rank, cross_iteration", _moves_locally, _rotate),
)
"""What depends on how gradients travel, which ranks have agreed on by then."""

LOOP_STAGES = (
    Stage("lower", "lowered", _is_lowered, _lower),
    Stage("in place", "always", _always, _run_in_place),
    Stage("fill", "data_parallel", lambda draft: _communicates(draft) and _runs_in_place(draft), _fill),
    Stage("write", "lowered", _is_lowered, _write),
)
"""What is done to each graph of the loop."""

STAGES = (*STEP_STAGES, *SHARED_STAGES, *LOOP_STAGES)


def _runs_in_place(draft: Draft) -> bool:
    return bool(in_place_passes(draft.options.pipeline).passes)


def run_stages(stages: tuple[Stage, ...], draft: Draft) -> None:
    """Let stages decide, in order."""
    for stage in stages:
        if stage.applies(draft):
            stage.decide(draft)


def follow(plan: Plan, stages: tuple[Stage, ...], draft: Draft) -> None:
    """Rewrite the step as a plan says that stages have decided."""
    names = {stage.name for stage in stages}
    for choice in plan.rewrites:
        if choice.stage in names:
            draft.rewrite(choice.stage, choice.passes, choice.reason)


def communication_passes(plan: DataParallelPlan) -> tuple[Pass, ...]:
    """The rewrites that carry out a plan for gradients; the process group is named when it is known."""
    return (
        AllReduce(world=plan.world, average=plan.average),
        Bucket(groups=format_groups([bucket.keys for bucket in plan.buckets])),
        SplitOptimizer(),
        Overlap(late=" ".join(map(str, plan.late))),
        Rotate(buckets=" ".join(map(str, plan.moved)), strict=False),
    )


def table() -> str:
    """The stages as text: name, and when it has something to do."""
    width = max(len(stage.name) for stage in STAGES)
    return "\n".join(f"{stage.name:{width}}  {stage.when}" for stage in STAGES)
