"""Split fused and foreach updates by bucket, so that each slice can run as soon as its gradients have arrived."""

from __future__ import annotations

import logging
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from wholestep.comm.optimizer_blocks import ListOp, find_list_ops
from wholestep.errors import PassError
from wholestep.graph import SlotKind, StepGraph, ops
from wholestep.passes.base import Pass, register

logger = logging.getLogger(__name__)


@register
@dataclass(frozen=True)
class SplitOptimizer(Pass):
    """Cut every list op of the update into one per bucket; exact, because nothing in it crosses positions.

    ```
    fused = _fused_adamw([p0, p1, p2], [g0, g1, g2], ...)   ->   fused_0 = _fused_adamw([p0, p2], [g0, g2], ...)
                                                                 fused_1 = _fused_adamw([p1], [g1], ...)
    ```
    Parameters without a bucket form a slice of their own. Where nothing travels, `apart` names the parameters or
    modules whose update is to be cut off from the rest. An op whose positions cannot be told apart stays whole; the log
    says why.
    """

    name: ClassVar[str] = "split_optimizer"
    after: ClassVar[tuple[str, ...]] = ("allreduce", "bucket")

    apart: str = ""

    def apply(self, graph: StepGraph) -> StepGraph:
        bucket_of = bucket_of_parameters(graph) or dict.fromkeys(named_parameters(graph, self.apart.split()), 0)
        replaced: dict[fx.Node, fx.Node] = {}
        for item in find_list_ops(graph):
            if item.owners is None:
                logger.info("%s stays whole: %s", item.node.target, item.problem)
                continue
            slices: dict[int, list[int]] = {}
            for position, owner in enumerate(item.owners):
                slices.setdefault(bucket_of.get(owner, -1), []).append(position)
            if len(slices) > 1:
                replaced |= _split(graph, item, [slices[bucket] for bucket in sorted(slices)])
        graph.replace(replaced)
        return graph


def bucket_of_parameters(graph: StepGraph) -> dict[str, int]:
    """The bucket that each parameter's (last) gradient travels in."""
    found: dict[str, int] = {}
    for node in graph.calls():
        if node.target is ops.ALL_REDUCE and "bucket" in node.meta:
            for _, names in node.meta["reduces"]:
                found |= dict.fromkeys(names, node.meta["bucket"])
    return found


def named_parameters(graph: StepGraph, names: Sequence[str]) -> list[str]:
    """Parameters called by name or by the name of a module they belong to."""
    parameters = [slot.name for slot in graph.slots_of_kind(SlotKind.PARAM)]
    for wanted in names:
        if not any(name == wanted or name.startswith(f"{wanted}.") for name in parameters):
            raise PassError(f"there is no parameter or module '{wanted}' in this step")
    return [name for name in parameters if any(name == wanted or name.startswith(f"{wanted}.") for wanted in names)]


def _split(graph: StepGraph, item: ListOp, slices: list[list[int]]) -> dict[fx.Node, fx.Node]:
    """Insert one op per slice before `item`; returns what each of its items becomes."""
    assert item.owners is not None
    node, length = item.node, len(item.owners)
    replaced: dict[fx.Node, fx.Node] = {}
    for positions in slices:
        args = tuple(_select(value, positions, length) for value in node.args)
        kwargs = {name: _select(value, positions, length) for name, value in node.kwargs.items()}
        part = graph.insert(node.target, args, kwargs, like=node, before=node)  # pyright: ignore[reportArgumentType]
        new_index = {position: index for index, position in enumerate(positions)}
        for user in node.users:
            replaced |= _items(graph, user, part, new_index, before=node)
    return replaced


def _select(value: Any, positions: list[int], length: int) -> Any:
    if isinstance(value, (list, tuple)) and len(value) == length:
        return [value[position] for position in positions]
    return value


def _items(
    graph: StepGraph, item: fx.Node, part: fx.Node, new_index: dict[int, int], before: fx.Node
) -> dict[fx.Node, fx.Node]:
    """What items of the whole op become in `part`; a fused op's items are lists, whose items are the tensors."""
    index = ops.getitem_index(item)
    assert index is not None, "list ops are read item by item"
    if isinstance(item.meta["val"], (list, tuple)):
        entry = graph.insert(operator.getitem, (part, index), like=item, before=before)
        nested: dict[fx.Node, fx.Node] = {}
        for user in item.users:
            nested |= _items(graph, user, entry, new_index, before)
        return nested
    if index not in new_index:
        return {}
    return {item: graph.insert(operator.getitem, (part, new_index[index]), like=item, before=before)}
