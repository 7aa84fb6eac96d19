"""Let Inductor lay out what goes from one region to another as it likes: convolutions want their channels last.

What ops outside of regions read, and what the step returns, has the strides that were promised.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from wholestep.graph import StepGraph, ops
from wholestep.lower.region import Region


def prepare_regions(graph: StepGraph) -> None:
    """Compile the regions of a graph in order, each for the layouts that those before it have chosen."""
    for node in list(graph.calls()):
        region = node.target
        if isinstance(region, Region):
            items = {index: user for user in node.users if (index := ops.getitem_index(user)) is not None}
            free = {index: item for index, item in items.items() if _is_between_regions(item)}
            region.prepare(frozenset(free))
            for index, item in free.items():
                _lay_out(graph, item, region.strides_of(index))


def leave_regions(graph: StepGraph) -> None:
    """Leave the regions of a graph as they are: compiling takes long, and what is not going to run does not need it."""
    for node in graph.calls():
        if isinstance(node.target, Region):
            node.target.failure = "planned, not compiled"


def _is_between_regions(item: fx.Node) -> bool:
    value = item.meta["val"]
    sizes = (*value.shape, *value.stride())
    is_fixed = not any(isinstance(size, torch.SymInt) for size in sizes)
    return is_fixed and all(isinstance(user.target, Region) for user in item.users)


def _lay_out(graph: StepGraph, item: fx.Node, strides: tuple[int, ...] | None) -> None:
    """Note the strides that a value is going to have, also in the regions that read it."""
    value = item.meta["val"]
    if strides is None or tuple(value.stride()) == tuple(strides):
        return
    with graph.fake_mode:
        item.meta["val"] = torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device)
    for user in item.users:
        region: Any = user.target
        inputs: Any = user.args[0]
        placeholders = region.module.graph.find_nodes(op="placeholder")
        for given, placeholder in zip(inputs, placeholders, strict=True):
            if given is item:
                placeholder.meta["val"] = item.meta["val"]
