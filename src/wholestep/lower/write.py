"""Let regions write the new value of a slot where the old one lies, as their last act.

```
optimizer = regions.optimizer([weight, grad, numbers])             regions.optimizer([weight, grad, numbers])
new = optimizer[0]                                          ->
aten.copy_(weight, new)
```

Otherwise an update would need memory for all new values at once, and time to copy them.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from wholestep._recording_torch import REQUIRE
from wholestep.graph import StepGraph, ops
from wholestep.lower.region import Region, copied
from wholestep.passes.base import Pass, register
from wholestep.passes.simplify import layout

_COPY = torch.ops.aten.copy_.default


@register
@dataclass(frozen=True)
class WriteRegions(Pass):
    """Move copies into slots to the end of the region whose results they copy, if nobody looks at the slot between.

    Updates of the call before stay copies: who waits for them is told of one at a time.
    """

    name: ClassVar[str] = "write_regions"
    after: ClassVar[tuple[str, ...]] = ("lower", "reinplace")
    needs_functional: ClassVar[bool] = False

    def apply(self, graph: StepGraph) -> StepGraph:
        calls = list(graph.calls())
        position = {node: index for index, node in enumerate(calls)}
        last_look = max((index for index, node in enumerate(calls) if node.target is REQUIRE), default=-1)
        looks: dict[fx.Node, list[int]] = {}
        for node in calls:
            for memory in {memory_of(source) for source in node.all_input_nodes}:
                looks.setdefault(memory, []).append(position[node])
        for node in calls:
            if isinstance(node.target, Region):
                copies = [copy for item in node.users if (copy := _copy_of(item)) is not None]
                moved = [
                    copy
                    for copy in copies
                    if not any(position[node] < index < position[copy] for index in looks[_slot_of(copy)])
                    and _is_given_once(node, _slot_of(copy))
                    and position[node] > last_look
                ]
                _take_in(graph, node, moved)
        return graph


def memory_of(node: fx.Node) -> fx.Node:
    """The node whose memory a value lies in: views and results of in-place ops lie in that of an argument."""
    source = node.args[0] if node.target is operator.getitem else node
    if not isinstance(source, fx.Node) or not ops.is_op(source):
        return node
    written = ops.written_arguments(source.target)
    first = source.args[written[0] if written else 0] if source.args else None
    if isinstance(first, fx.Node) and (written or ops.shares_memory(source.target)):
        return memory_of(first)
    return node


def _slot_of(copy: fx.Node) -> Any:
    return copy.args[0]


def _copy_of(item: fx.Node) -> fx.Node | None:
    """The copy into a slot that is all that a region's result is for."""
    copy = next(iter(item.users), None)
    if copy is None or len(item.users) > 1 or copy.target is not _COPY or copy.users or "applies" in copy.meta:
        return None
    slot, value = copy.args
    if value is not item or not isinstance(slot, fx.Node) or slot.op != "placeholder":
        return None
    return copy if layout(slot.meta["val"]) == layout(item.meta["val"]) else None


def _is_given_once(call: fx.Node, slot: fx.Node) -> bool:
    """Whether a region gets a slot itself, and not through a view besides."""
    inputs: Any = call.args[0]
    return [node for node in inputs if memory_of(node) is slot] == [slot]


def _take_in(graph: StepGraph, call: fx.Node, copies: list[fx.Node]) -> None:
    """Exchange a region for one that makes some copies itself, and does not return what they copy."""
    if not copies:
        return
    region: Any = call.target
    inputs: Any = call.args[0]
    values: Any = call.meta["val"]
    slots: dict[int, fx.Node] = {}
    for copy in copies:
        item: Any = copy.args[1]
        slots[item.args[1]] = _slot_of(copy)
        graph.graph.erase_node(copy)
        graph.graph.erase_node(item)
    kept = [index for index in range(len(values)) if index not in slots]
    for item in list(call.users):
        item.args = (call, kept.index(item.args[1]))  # pyright: ignore[reportArgumentType]
    module = _writing(region.module, {index: inputs.index(slot) for index, slot in slots.items()}, kept)
    written = frozenset(inputs.index(slot) for slot in slots.values())
    call.target = Region(region.name, module, region.fake_mode, written)
    call.meta["val"] = tuple(values[index] for index in kept)


def _writing(module: fx.GraphModule, input_of: dict[int, int], kept: list[int]) -> fx.GraphModule:
    """A region's module that copies outputs into inputs, by number, and returns those that are kept."""
    module = copied(module)
    graph = module.graph
    placeholders = graph.find_nodes(op="placeholder")
    output = graph.output_node()
    results: Any = output.args[0]
    for index, target in input_of.items():
        with graph.inserting_before(output):
            copy = graph.call_function(_COPY, (placeholders[target], results[index]))
        copy.meta |= results[index].meta
    output.args = (tuple(results[index] for index in kept),)
    return module
