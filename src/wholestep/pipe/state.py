"""What a step carries from one micro-batch to the next: buffers that a forward changes, and nothing else.

A stage runs its forwards in order, so a buffer that it alone reads and changes goes through the same values as in one
process. Everything else that a step may read from before or leave behind has no place in a pipeline and is refused.
"""

from __future__ import annotations

import torch
from torch import fx

from wholestep.errors import SplitError
from wholestep.graph import Phase, SlotKind, StepGraph
from wholestep.pipe.shares import parameter_of

aten = torch.ops.aten

_OUTSIDE = (SlotKind.GRAD, SlotKind.STATE, SlotKind.LR, SlotKind.CARRY)


def refuse_unfit(graph: StepGraph, stage_of: dict[fx.Node, int]) -> None:
    """Raise `SplitError` for a step that would not do in a pipeline what it does in one process."""
    for slot in graph.slots_of_kind(*_OUTSIDE):
        raise SplitError(
            f"the step of a micro-batch reads {slot.id}: gradients from before and the optimizer have no place in it"
        )
    known = graph.placeholders()
    for slot_id in graph.results:
        if parameter_of(slot_id) not in known:
            raise SplitError(
                f"the step of a micro-batch returns {slot_id}, the gradient of an argument: detach it first"
            )
    for slot_id, value in graph.updates.items():
        if not slot_id.startswith(f"{SlotKind.BUFFER}."):
            raise SplitError(f"the step of a micro-batch writes to {slot_id}: only buffers may change in it")
        name = slot_id.removeprefix(f"{SlotKind.BUFFER}.")
        if not _is_early(value):
            raise SplitError(f"buffer '{name}' is changed behind the forward, which no stage of a pipeline does")
        home = _home(graph, slot_id, stage_of)
        readers = {stage_of[user] for user in graph.placeholder(slot_id).users if user in stage_of and _is_early(user)}
        others = sorted(readers - {home})
        if others:
            raise SplitError(
                f"buffer '{name}' is changed by stage {home} and read by stage {others[0]}, which would never see what "
                f"it is changed to: keep the modules that share it in one stage"
            )


def hold_buffers(graph: StepGraph, stage_of: dict[fx.Node, int]) -> None:
    """Hand buffers that change on to the backward as values.

    Forwards of later micro-batches may run before it; read by name, the buffer would be another one by then.

    ```
    F: y = x * scale; new = scale * 0.9              F: old = alias(scale); y = x * scale; new = scale * 0.9
    B: dx = dy * scale                       ->      B: dx = dy * old
    ```
    """
    updates = dict(graph.updates)
    for slot_id, value in graph.updates.items():
        node, home = graph.placeholder(slot_id), _home(graph, slot_id, stage_of)
        late = [user for user in node.users if user in stage_of and not _is_early(user)]
        if late:
            old = graph.insert(aten.alias.default, (node,), like=node, after=node)
            stage_of[old] = home
            for user in late:
                user.replace_input_with(node, old)
        if value not in stage_of:
            updates[slot_id] = graph.insert(aten.alias.default, (value,), like=value, before=graph.output_node)
            stage_of[updates[slot_id]] = home
    graph.set_returned(updates=updates)


def _home(graph: StepGraph, slot_id: str, stage_of: dict[fx.Node, int]) -> int:
    """The stage that changes a buffer; where it becomes a copy of something that is no stage's, the first reader's."""
    value = graph.updates[slot_id]
    if value in stage_of:
        return stage_of[value]
    return min((stage_of[user] for user in graph.placeholder(slot_id).users if user in stage_of), default=0)


def _is_early(node: fx.Node) -> bool:
    return node.op == "placeholder" or node.meta["phase"] is Phase.FORWARD
