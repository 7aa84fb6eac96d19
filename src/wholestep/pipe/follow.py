"""Cut one graph like another of the same model: every op goes to a stage that has the parameters it reads.

An evaluation has other ops than a training step, and other costs. But its stages must be those of training: a rank has
the trained values of its own stages' parameters and buffers only. Ops are taken in order, each in the first stage from
that of the op before on that has what it reads; this finds a cut if there is one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from torch import fx

from wholestep.errors import PipelineError
from wholestep.graph import SlotKind, StepGraph
from wholestep.pipe.cut import CutGraph, Stage
from wholestep.pipe.placement import forward_calls

_KEPT = (f"{SlotKind.PARAM}.", f"{SlotKind.BUFFER}.")


def borders_like(graph: StepGraph, trained: CutGraph) -> list[int]:
    """Borders for a graph at which its stages read what those of `trained` have, as far as there are such."""
    holders = _holders(trained)
    stages: list[int] = []
    for slots in _slots_read(graph, forward_calls(graph)):
        current = stages[-1] if stages else 0
        common = set(range(len(trained.stages))).intersection(*(holders[slot] for slot in slots if slot in holders))
        stages.append(min((stage for stage in common if stage >= current), default=current))
    return [bisect_left(stages, stage) for stage in range(1, len(trained.stages))]


def _holders(trained: CutGraph) -> dict[str, set[int]]:
    """Parameters and buffers, by slot, with the stages that have them."""
    found: dict[str, set[int]] = {}
    for stage in trained.stages:
        for slot in (*stage.slots, *stage.updates):
            if slot.startswith(_KEPT):
                found.setdefault(slot, set()).add(stage.index)
    return found


def _slots_read(graph: StepGraph, calls: Sequence[fx.Node]) -> list[set[str]]:
    """The parameters and buffers that each call reads, itself or through views and casts of nothing else."""
    made_of: dict[fx.Node, set[str]] = {
        node: {slot} for slot, node in graph.placeholders().items() if slot.startswith(_KEPT)
    }
    reads: list[set[str]] = []
    for node in calls:
        sources = node.all_input_nodes
        if sources and all(source in made_of for source in sources):
            made_of[node] = set[str]().union(*(made_of[source] for source in sources))
            reads.append(set())
        else:
            reads.append(set[str]().union(*(made_of.get(source, set()) for source in sources)))
    return reads


def check_slots(found: CutGraph, trained: CutGraph) -> None:
    """Refuse a cut in which a stage reads what the stage of that number does not have."""
    holders = _holders(trained)
    for stage in found.stages:
        for slot in stage.slots:
            if slot.startswith(_KEPT) and stage.index not in holders.get(slot, {stage.index}):
                where = ", ".join(map(str, sorted(holders[slot])))
                raise PipelineError(
                    f"evaluation uses {slot.split('.', 1)[1]} in stage {stage.index}, and training has it in stage "
                    f"{where} only; split the model where both agree, or evaluate the model without the pipeline"
                )


def is_like(found: CutGraph, other: CutGraph) -> bool:
    """Whether two cuts differ in sizes only: their stages read, make and hand on the same, under the same names."""
    return [_description(stage) for stage in found.stages] == [_description(stage) for stage in other.stages]


def _description(stage: Stage) -> list[object]:
    programs = [(program.slots, program.values, program.outputs) for program in (*stage.programs, stage.backward)]
    return [programs, dict(stage.updates), dict(stage.gradients), dict(stage.returns)]
