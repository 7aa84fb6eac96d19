"""Common subexpressions: equal calls on equal arguments are computed once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from wholestep.graph import Phase, StepGraph, ops
from wholestep.passes.base import Pass, register
from wholestep.passes.simplify import handed_out


@register
@dataclass(frozen=True)
class CommonSubexpressions(Pass):
    """Merge equal pure calls.

    By default tensors are merged only within one phase: keeping a forward value for an equal backward computation would
    lengthen its life and can raise the peak above eager's. Views and numbers cost nothing and are merged anywhere.
    """

    name: ClassVar[str] = "cse"
    repeatable: ClassVar[bool] = True
    across_phases: bool = False

    def apply(self, graph: StepGraph) -> StepGraph:
        seen: dict[Any, fx.Node] = {}
        replacements: dict[fx.Node, fx.Node] = {}
        separate = handed_out(graph)  # two equal results that the user holds must not share memory
        for node in graph.nodes:
            if node.op != "call_function" or ops.has_effect(node) or is_uninitialised(node) or node in separate:
                continue
            free = not isinstance(node.meta["val"], torch.Tensor) or ops.is_view(node.target)
            phase: Phase | None = None if free or self.across_phases else node.meta["phase"]
            key = (phase, node.target, freeze(node.args, replacements), freeze(node.kwargs, replacements))
            earlier = seen.setdefault(key, node)
            if earlier is not node:
                replacements[node] = earlier
        graph.replace(replacements)
        return graph


def is_uninitialised(node: fx.Node) -> bool:
    """`empty` and its kin: two of them are two buffers, to be filled with different things."""
    return str(node.target).startswith(("aten.empty", "aten.new_empty"))


def freeze(value: Any, replacements: Mapping[fx.Node, fx.Node]) -> Any:
    """A hashable key in which 1, 1.0 and True are three different things and merged nodes are one."""
    if isinstance(value, fx.Node):
        return replacements.get(value, value)
    if isinstance(value, (list, tuple)):
        return tuple([freeze(item, replacements) for item in value])
    if isinstance(value, dict):
        return tuple([(key, freeze(item, replacements)) for key, item in value.items()])
    if isinstance(value, slice):
        return ("slice", *(freeze(part, replacements) for part in (value.start, value.stop, value.step)))
    if isinstance(value, float):
        return (float, value.hex())
    return (type(value), value)
