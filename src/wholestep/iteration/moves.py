"""Which part of a step may run in the next iteration instead, and how that is noted on the graph.

A training loop runs `state, batch -> state', outputs` over and over. A *leaf* of the step, a set of nodes whose results
nobody in the step reads, only changes the state; it can be cut off this iteration's end and run in the next one, before
the state it changes is read there. That is a rotation of the loop: the same ops on the same values in another call.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from wholestep import _torch
from wholestep.errors import PassError
from wholestep.graph import Phase, SlotKind, StepGraph, nodes_in, ops

# The block of nodes that belong to none.
SHARED = -1

# Kept between calls by the model and the optimizer, so that a moved block finds them again.
KEPT = (SlotKind.PARAM, SlotKind.BUFFER, SlotKind.STATE)


def move_to_next_iteration(graph: StepGraph, *blocks: Iterable[fx.Node], shared: Iterable[fx.Node] = ()) -> None:
    """Note that nodes are to run in the next iteration, as one or several blocks.

    Each block is applied once. `shared` nodes move too, but belong to no block: they are computed wherever a block
    needs them, again if need be, and so must depend on carried values only.

    ```
    loss = f(w, x)                             w' = w - 0.1 * grad_before          carried over
    grad = df(w, x)                  ->        loss = f(w', x)
    w' = w - 0.1 * grad                        grad = df(w', x)
    ```
    Raises `PassError`, naming the offending user, if a node outside the blocks (and outside what has moved already)
    reads one of them, if the step hands one out, or if one has an effect (random numbers, issuing a collective) that
    must not change places. The graph is unchanged then.
    """
    taken = {node: node.meta["next_iteration"] for node in graph.graph.nodes if "next_iteration" in node.meta}
    number = 1 + max(taken.values(), default=SHARED)
    wanted = {node: number + index for index, nodes in enumerate(blocks) for node in nodes}
    wanted |= dict.fromkeys(shared, SHARED)
    for node in wanted:
        problem = "it has already" if node in taken else cannot_move(graph, node, {*wanted, *taken})
        if ops.getitem_index(node) is not None and node.args[0] not in {*wanted, *taken}:
            problem = f"it is an item of '{node.args[0]}', which stays"
        if problem is not None:
            raise PassError(f"'{node.name}' cannot move to the next iteration: {problem}")
    for node, block in wanted.items():
        node.meta["next_iteration"] = block


def cannot_move(graph: StepGraph, node: fx.Node, moved: set[fx.Node]) -> str | None:
    """Why a node cannot run in the next iteration if all of `moved` does; None if it can."""
    if node.op != "call_function":
        return f"it is an {'input' if node.op == 'placeholder' else node.op}, not a computation"
    if ops.has_effect(node) and node.target is not ops.WAIT:
        return f"{node.target} has an effect whose place among others must not change"
    if ops.may_raise_in_python([node]):
        return "it is Python of the step, whose error would come a call later"
    for user in node.users:
        if user.op == "call_function" and user not in moved:
            return f"'{user.name}' ({user.target}) reads it in this iteration"
    return _cannot_return(graph, node)


def _cannot_return(graph: StepGraph, node: fx.Node) -> str | None:
    """Why what the step returns of a node cannot come an iteration later."""
    if node in nodes_in(graph.outputs):
        return "the step returns it"
    kinds = {slot.id: slot.kind for slot in graph.slots.values()}
    for slot_id, value in graph.updates.items():
        if value is node and kinds[slot_id] not in KEPT:
            return f"it is written to {slot_id}, which the next call does not have"
    for slot_id, value in graph.results.items():
        if node in nodes_in(value):
            if not slot_id.startswith(f"{SlotKind.GRAD}."):
                return f"it becomes {slot_id}, which exists only once the step has run"
            if slot_id.removeprefix(f"{SlotKind.GRAD}.") in graph.accumulating:
                return f"it becomes {slot_id}, which the next step adds to (no zero_grad before the backward)"
    return None


def leaf_closure(seeds: Iterable[fx.Node]) -> set[fx.Node]:
    """The smallest set with `seeds` in which every user of a member is a member: all that depends on them."""
    closure: set[fx.Node] = set()
    pending = list(seeds)
    while pending:
        node = pending.pop()
        if node not in closure and node.op == "call_function":
            closure.add(node)
            pending.extend(node.users)
    return closure


def absorbed(graph: StepGraph, moved: set[fx.Node]) -> set[fx.Node]:
    """Nodes of the update that only `moved` reads and that may move along: fewer values are carried over then.

    Step counters and decayed weights are of this kind: they depend on no gradient, but only the update needs them.
    """
    taken: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op != "call_function" or node in moved or node.meta["phase"] is not Phase.OPTIMIZER:
            continue
        readers = {user for user in node.users if user.op == "call_function"}
        if readers and readers <= moved | taken and cannot_move(graph, node, moved | taken) is None:
            taken.add(node)
    kept: set[fx.Node] = set()
    for node in graph.graph.nodes:  # an item is carried over as it is if the list it is taken from stays
        if node in taken and (ops.getitem_index(node) is None or node.args[0] in moved | kept):
            kept.add(node)
    return kept


def moved_nodes(graph: StepGraph) -> list[fx.Node]:
    """The nodes noted to run in the next iteration, in graph order."""
    return [node for node in graph.graph.nodes if "next_iteration" in node.meta]


def carried_nodes(graph: StepGraph) -> list[fx.Node]:
    """Values of one iteration that moved nodes read in the next, each once, in order of first use.

    Slots the moved nodes find again are not among them: those they write themselves, and parameters and optimizer state
    that nobody writes.
    """
    moved = set(moved_nodes(graph))
    again = found_again(graph)
    carried: dict[fx.Node, Any] = {}
    for node in moved_nodes(graph):
        for source in node.all_input_nodes:
            if source not in moved and source not in again:
                carried[source] = None
    return list(carried)


def kept_gradients(graph: StepGraph) -> set[str]:
    """Names of parameters whose gradient is there at once although the moved nodes still need its memory.

    It must not be written to before they have run. Those that the next step adds to are not among them.
    """
    params = {slot.name for slot in graph.slots_of_kind(SlotKind.PARAM)} - graph.accumulating
    memory = {_torch.storage_key(node.meta["val"]) for node in carried_nodes(graph) if _is_tensor(node)}
    moved = set(moved_nodes(graph))
    return {
        name
        for slot_id, value in graph.results.items()
        if (name := slot_id.removeprefix(f"{SlotKind.GRAD}.")) != slot_id and name in params
        for node in nodes_in(value)
        if node not in moved and _is_tensor(node) and _torch.storage_key(node.meta["val"]) in memory
    }


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta["val"], torch.Tensor)


def found_again(graph: StepGraph) -> set[fx.Node]:
    """Inputs that hold the same value in the next call until a moved node writes to them."""
    moved = set(moved_nodes(graph))
    again: set[fx.Node] = set()
    for slot_id, placeholder in graph.placeholders().items():
        update = graph.updates.get(slot_id)
        kind = graph.slots[placeholder.name].kind
        if update in moved or (update is None and kind in (SlotKind.PARAM, SlotKind.STATE)):
            again.add(placeholder)
    return again
