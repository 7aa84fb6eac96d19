"""Remove what only autograd and functionalisation needed: detaches, view round trips, copies of values nobody writes.

In a functional graph a tensor never changes, so two nodes that show the same storage with the same geometry are the
same value, and a copy is as good as its original.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from wholestep import _torch
from wholestep.graph import SlotKind, StepGraph, nodes_in, ops
from wholestep.passes.base import Pass, register

aten = torch.ops.aten


@register
@dataclass(frozen=True)
class Simplify(Pass):
    """Replace views by an equal earlier node and copies by their source; exact, value for value."""

    name: ClassVar[str] = "simplify"
    repeatable: ClassVar[bool] = True

    def apply(self, graph: StepGraph) -> StepGraph:
        returned = handed_out(graph)
        seen: dict[tuple[Any, ...], fx.Node] = {}
        replacements: dict[fx.Node, fx.Node] = {}
        for node in graph.nodes:
            if node.op not in ("placeholder", "call_function") or not isinstance(node.meta.get("val"), torch.Tensor):
                continue
            source = _copied_value(graph, node)
            if source is not None and node not in returned:
                replacements[node] = source
                continue
            key = _geometry(node.meta["val"])
            earlier = seen.setdefault(key, node)
            if earlier is not node and node.op == "call_function" and ops.is_view(node.target):
                replacements[node] = earlier
        graph.replace(replacements)
        return graph


def _copied_value(graph: StepGraph, node: fx.Node) -> fx.Node | None:
    """The node whose value `node` merely copies, None if it computes something."""
    if node.op != "call_function":
        return None
    if node.target is aten.clone.default:
        source = node.args[0]
    elif node.target is aten.copy.default:
        source = node.args[1]
    elif node.target is aten.lift_fresh_copy.default:
        source = node.args[0]
        slot = graph.slot_of(source) if isinstance(source, fx.Node) else None
        if slot is None or slot.kind is not SlotKind.CONSTANT or slot.id in graph.updates:
            return None
    else:
        return None
    assert isinstance(source, fx.Node)
    return source if layout(source.meta["val"]) == layout(node.meta["val"]) else None


def handed_out(graph: StepGraph) -> set[fx.Node]:
    """Nodes the user gets to hold, directly or as a view: their copies were asked for."""
    pending = [node for node in graph.output_node.all_input_nodes if node.name not in _update_names(graph)]
    closure: set[fx.Node] = set()
    while pending:
        node = pending.pop()
        if node in closure:
            continue
        closure.add(node)
        if node.op == "call_function" and ops.is_view(node.target):
            pending.extend(node.all_input_nodes)
    return closure


def _update_names(graph: StepGraph) -> set[str]:
    """Values that only flow into a slot are written there, not handed out."""
    handed_out = {node.name for node in nodes_in((graph.outputs, graph.results))}
    return {node.name for node in graph.updates.values()} - handed_out


def layout(value: torch.Tensor) -> tuple[Any, ...]:
    """Everything about a tensor but its storage and offset, comparable also for symbolic sizes."""
    sizes = tuple(_torch.expression(size) for size in value.shape)
    strides = tuple(_torch.expression(stride) for stride in value.stride())
    return sizes, strides, value.dtype, value.device, value.is_conj(), value.is_neg()


def _geometry(value: torch.Tensor) -> tuple[Any, ...]:
    return _torch.storage_key(value), _torch.expression(value.storage_offset()), *layout(value)
