"""Draw the masks of dropout by themselves, so that what uses them can be fused.

On CUDA devices `native_dropout` draws and multiplies in one kernel, and a random op is a border: every dropout would
cut the forward. Its mask depends on sizes and layout alone, so it is drawn over memory that holds nothing: the numbers
are those of eager, and all draws can stand in front of the forward.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from wholestep.graph import StepGraph, ops
from wholestep.passes.base import Pass, register

aten = torch.ops.aten
# Kernels that draw for several elements at a time do so for memory that is aligned like this.
_ALIGNMENT_BYTES = 16


@register
@dataclass(frozen=True)
class Masks(Pass):
    """Take `native_dropout` apart into the draw of its mask and a product.

    ```
                                                empty = aten.empty_like(x)
    d = aten.native_dropout(x, 0.1, True)       d = aten.native_dropout(empty, 0.1, True)
    y = d[0]; mask = d[1]                  ->   mask = d[1]; y = (x * mask) * 1.1111
    ```
    """

    name: ClassVar[str] = "masks"
    after: ClassVar[tuple[str, ...]] = ("simplify", "cse")

    def apply(self, graph: StepGraph) -> StepGraph:
        replacements: dict[fx.Node, fx.Node] = {}
        for node in graph.calls():
            if node.target is aten.native_dropout.default and _is_separable(node):
                replacements |= _separated(graph, node)
        graph.replace(replacements)
        return graph


def _is_separable(node: fx.Node) -> bool:
    source, probability, is_training = node.args
    value = source.meta["val"]  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
    offset = value.storage_offset() * value.element_size()
    is_aligned = isinstance(offset, int) and offset % _ALIGNMENT_BYTES == 0
    return is_training is not False and isinstance(probability, float) and 0 < probability < 1 and is_aligned


def _separated(graph: StepGraph, node: fx.Node) -> dict[fx.Node, fx.Node]:
    source: Any = node.args[0]
    probability: Any = node.args[1]
    items = {index: user for user in node.users if (index := ops.getitem_index(user)) is not None}
    blank = graph.insert(aten.empty_like.default, (source,), {"pin_memory": False}, like=node, before=node)
    node.replace_input_with(source, blank)
    if 0 not in items:
        return {}
    mask = items.get(1) or graph.insert(operator.getitem, (node, 1), like=node, after=node)
    node.append(mask)
    product = graph.insert(aten.mul.Tensor, (source, mask), like=node, before=items[0])
    scaled = graph.insert(aten.mul.Tensor, (product, 1 / (1 - probability)), like=node, before=items[0])
    return {items[0]: scaled}
