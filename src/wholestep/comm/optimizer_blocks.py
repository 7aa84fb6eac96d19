"""Optimizer updates that treat many parameters in one op: found as blocks, by operator, parameter by parameter.

Fused optimizers (`aten._fused_adamw`) and foreach ones (`aten._foreach_add`, ...) take lists of tensors in which
position i belongs to parameter i. Nothing in them crosses positions, so such an op may be split by position, exactly.
Which parameter a position belongs to follows from the slots and gradients that flow into it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import fx

from wholestep import _torch
from wholestep.graph import Phase, SlotKind, StepGraph, ops

_OWNED = (SlotKind.PARAM, SlotKind.STATE, SlotKind.GRAD)


@dataclass(frozen=True, eq=False)
class ListOp:
    """One op over lists of tensors and the parameter that each position belongs to.

    `owners` is None, and `problem` says why, where that cannot be told.
    """

    node: fx.Node
    owners: tuple[str, ...] | None
    problem: str = ""


@dataclass(frozen=True, eq=False)
class OptimizerBlock:
    """The update of some parameters by one fused op or by a chain of foreach ops.

    `states` has a list for each entry of the optimizer state (`exp_avg`, `step`, ...), `outputs` the new values by
    slot id.
    """

    kind: str
    nodes: tuple[fx.Node, ...]
    parameters: tuple[str, ...]
    gradients: tuple[fx.Node, ...]
    states: dict[str, list[fx.Node]] = field(default_factory=dict)
    outputs: dict[str, fx.Node] = field(default_factory=dict)


def find_list_ops(graph: StepGraph) -> list[ListOp]:
    """All fused and foreach ops of the update, in graph order, with their owners."""
    owners: dict[fx.Node, frozenset[str]] = {}
    found: dict[fx.Node, ListOp] = {}
    for node in graph.graph.nodes:
        slot = graph.slot_of(node)
        if slot is not None and slot.kind in _OWNED:
            owners[node] = frozenset({slot.name})
        elif node.op == "call_function":
            names = _gradient_names(node)
            if names:
                owners[node] = frozenset(names)
            elif is_list_op(node):
                found[node] = _list_op(node, owners)
            else:
                _pass_on(node, owners, found)
    return list(found.values())


def is_list_op(node: fx.Node) -> bool:
    """Whether a node is a fused or foreach op of the update."""
    if not ops.is_op(node) or node.meta["phase"] is not Phase.OPTIMIZER:
        return False
    return _torch.packet_name(node.target).startswith(("_foreach_", "_fused_"))


def _gradient_names(node: fx.Node) -> tuple[str, ...]:
    """Whose gradient a node is, local or reduced."""
    return node.meta.get("gradient_of", ()) or node.meta.get("reduced_gradient_of", ())


def list_arguments(node: fx.Node) -> dict[str, list[Any]]:
    """The list arguments of an op by name; empty ones are left out."""
    names = [argument.name for argument in _torch.schema(node.target).arguments]
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    return {name: list(value) for name, value in given.items() if isinstance(value, (list, tuple)) and value}


def _list_op(node: fx.Node, owners: dict[fx.Node, frozenset[str]]) -> ListOp:
    lists = list_arguments(node)
    lengths = {len(values) for values in lists.values()}
    if len(lengths) != 1:
        return ListOp(node, None, f"its lists have different lengths {sorted(lengths)}")
    found: list[str] = []
    for position in range(lengths.pop()):
        known = [owners[values[position]] for values in lists.values() if values[position] in owners]
        common = frozenset.intersection(*known) if known else frozenset()
        if not common:
            what = "several parameters at once" if known else "no parameter"
            return ListOp(node, None, f"position {position} belongs to {what}")
        found.append(min(common))
    return ListOp(node, tuple(found))


def _pass_on(node: fx.Node, owners: dict[fx.Node, frozenset[str]], found: dict[fx.Node, ListOp]) -> None:
    """An item of a list op belongs to its position; any other op to the one parameter all its inputs belong to."""
    index = ops.getitem_index(node)
    if index is not None:
        source = node.args[0]
        while isinstance(source, fx.Node) and source not in found and ops.getitem_index(source) is not None:
            source = source.args[0]
        known = found.get(source) if isinstance(source, fx.Node) else None
        if known is not None and known.owners is not None and index < len(known.owners) and _is_leaf_item(node):
            owners[node] = frozenset({known.owners[index]})
        return
    inherited = [owners[source] for source in node.all_input_nodes if source in owners]
    common = frozenset.intersection(*inherited) if inherited else frozenset()
    if common and node.meta["phase"] is Phase.OPTIMIZER:
        owners[node] = common


def _is_leaf_item(node: fx.Node) -> bool:
    """Whether an item is a tensor, as opposed to one of the lists a fused op returns."""
    return not isinstance(node.meta["val"], (list, tuple))


def find_optimizer_blocks(graph: StepGraph) -> list[OptimizerBlock]:
    """Fused ops, and foreach ops joined into chains by the parameters they treat, as blocks."""
    chains: dict[tuple[str, tuple[str, ...]], list[fx.Node]] = {}
    for item in find_list_ops(graph):
        if item.owners is not None:
            name = _torch.packet_name(item.node.target)
            kind = name.removeprefix("_fused_") if name.startswith("_fused_") else "foreach"
            chains.setdefault((kind, item.owners), []).append(item.node)
    return [_block(graph, kind, owners, nodes) for (kind, owners), nodes in chains.items()]


def _block(graph: StepGraph, kind: str, owners: tuple[str, ...], nodes: list[fx.Node]) -> OptimizerBlock:
    members, states = set(owners), dict[str, list[fx.Node]]()
    inputs = {value for node in nodes for values in list_arguments(node).values() for value in values}
    for placeholder in graph.placeholders().values():
        slot = graph.slot_of(placeholder)
        if slot is not None and slot.kind is SlotKind.STATE and placeholder in inputs:
            states.setdefault(slot.key, []).append(placeholder)
    gradients = [node for node in graph.graph.nodes if node in inputs and members & set(_gradient_names(node))]
    written = {slot.id for slot in graph.slots.values() if slot.kind in _OWNED and slot.name in members}
    outputs = {slot_id: value for slot_id, value in graph.updates.items() if slot_id in written}
    return OptimizerBlock(kind, tuple(nodes), owners, tuple(gradients), states, outputs)
