"""The last rewrite: values that replace a dead one are computed in its memory, and updates land in their slots.

A functional graph allocates for every value. Where an op's argument is read by nobody afterwards, the op may write its
result there: `add(x, y)` becomes `add_(x, y)`. The proof is liveness over storages (not nodes: a view keeps its base
alive). A slot's memory may be written only if the step updates that slot, once nobody needs the old value; an update
that did not end up in its slot by itself becomes a `copy_` at the earliest safe point.

What the user gets to hold never lives in a slot: such values are cloned, as the next step would overwrite them.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import fx

from wholestep import _torch
from wholestep._recording_torch import REQUIRE
from wholestep.graph import InLayout, StepGraph, nodes_in, ops
from wholestep.passes.base import Pass, register
from wholestep.passes.simplify import layout

aten = torch.ops.aten

# In-place kernels beyond pointwise ones that give bit for bit what the functional kernel gives.
_ALSO_EXACT = (
    "_foreach_",
    "_fused_",
    "index_put",
    "index_add",
    "index_copy",
    "scatter",
    "masked_fill",
    "masked_scatter",
    "bernoulli",
    "uniform",
    "normal",
    "fill",
    "zero",
    "copy",
    "all_reduce",
    "addmm",
)


@register
@dataclass(frozen=True)
class Reinplace(Pass):
    """Turn functional ops into in-place ones where liveness allows, and slot updates into writes.

    ```
    mul = aten.mul.Tensor(exp_avg, 0.9)                    mul_ = aten.mul_.Tensor(exp_avg, 0.9)
    add = aten.add.Tensor(mul, grad, alpha=0.1)       ->   add_ = aten.add_.Tensor(mul_, grad, alpha=0.1)
    return {'updates': {'state.w.exp_avg': add}}           return {'updates': {}}
    ```
    """

    name: ClassVar[str] = "reinplace"

    def apply(self, graph: StepGraph) -> StepGraph:
        slots = graph.placeholders()
        updated = {slots[slot_id] for slot_id in graph.updates}
        _clone_old_values(graph, updated)
        memory = _Memory.of(graph, updated)
        overwritten: dict[fx.Node, fx.Node] = {}
        writers: dict[fx.Node, fx.Node] = {}
        for node in graph.nodes:
            if node.op == "call_function":
                known = set(overwritten)
                _try_in_place(memory, node, overwritten)
                writers |= dict.fromkeys(overwritten.keys() - known, node)
        made_by = {slot_id: writers[value] for slot_id, value in graph.updates.items() if value in writers}
        graph.replace(overwritten)
        _write_updates(graph, memory, made_by)
        _clone_outputs_in_slots(graph, memory)
        graph.set_returned(updates={})
        graph.is_functional = False
        return graph


@dataclass
class _Memory:
    """Which nodes share memory, and when each piece of memory is read last.

    A class of storages is named by its root; `last_read[root]` is the position of the last node that reads any value
    in it, `slots[root]` the input it belongs to, `final_of[root]` the slot whose new value it holds. In-place ops merge
    the class of their result into their argument's.
    """

    position: dict[fx.Node, int]
    updated: set[fx.Node]
    parent: dict[int, int] = field(default_factory=dict)
    last_read: dict[int, int] = field(default_factory=dict)
    slots: dict[int, fx.Node] = field(default_factory=dict)
    final_of: dict[int, fx.Node] = field(default_factory=dict)
    last_look: int = -1
    """Position of the last node that may leave the graph: no slot is written before."""
    _keys: dict[fx.Node, tuple[int, ...]] = field(default_factory=dict)

    @staticmethod
    def of(graph: StepGraph, updated: set[fx.Node]) -> _Memory:
        memory = _Memory({node: index for index, node in enumerate(graph.nodes)}, updated)
        for node, index in memory.position.items():
            for key in memory.keys(node):
                memory.parent.setdefault(key, key)
            if node.op == "placeholder" and memory.keys(node):
                memory.slots[memory.root(node)] = node
            if ops.is_op(node) and ops.shares_memory(node.target):
                memory._merge_view(node)
            for source in node.all_input_nodes:
                for key in memory.keys(source):
                    memory.last_read[memory._find(key)] = index
            if node.target is REQUIRE:
                memory.last_look = index
        slots = graph.placeholders()
        for slot_id, value in graph.updates.items():
            memory.final_of.setdefault(memory.root(value), slots[slot_id])
        return memory

    def keys(self, node: fx.Node) -> tuple[int, ...]:
        if node not in self._keys:
            self._keys[node] = storage_keys(node)
        return self._keys[node]

    def root(self, node: fx.Node) -> int:
        """The storage class of a single-tensor node."""
        [key] = self.keys(node)
        return self._find(key)

    def roots(self, node: fx.Node) -> set[int]:
        return {self._find(key) for key in self.keys(node)}

    def merge(self, value: fx.Node, into: fx.Node) -> None:
        """`value` now lives in `into`'s memory."""
        old, root = self.root(value), self.root(into)
        if old != root:
            self.parent[old] = root
            self.last_read[root] = max(self.last_read.get(root, -1), self.last_read.get(old, -1))

    def may_write(self, node: fx.Node, at: int) -> bool:
        """Whether the memory of `node` can be overwritten by the op at position `at`."""
        root = self.root(node)
        slot = self.slots.get(root)
        is_free = slot is None or (slot in self.updated and at > self.last_look)
        return is_free and self.last_read.get(root, -1) <= at

    def may_stay(self, result: fx.Node, source: fx.Node) -> bool:
        """Whether a result computed in the memory of `source` is out of the way when the step ends.

        What is still needed then (returned, or the new value of some slot) must not sit in a slot it is not the new
        value of, because that slot's own new value has yet to be written.
        """
        slot, root = self.slots.get(self.root(source)), self.root(result)
        is_needed_at_the_end = self.last_read.get(root, -1) == len(self.position) - 1
        return slot is None or not is_needed_at_the_end or self.final_of.get(root) is slot

    def _find(self, key: int) -> int:
        while self.parent[key] != key:
            key = self.parent[key]
        return key

    def _merge_view(self, node: fx.Node) -> None:
        """Views alias their source by definition, whatever the fake values say."""
        sources = [source for source in node.all_input_nodes if isinstance(source.meta.get("val"), torch.Tensor)]
        if not sources:
            return
        root = self.root(sources[0])
        for key in self.keys(node):
            found = self._find(key)
            if found != root:
                self.parent[found] = root


def storage_keys(node: fx.Node) -> tuple[int, ...]:
    """Storages behind a node's value (several for ops that return lists)."""
    return tuple(dict.fromkeys(_torch.storage_key(tensor) for tensor in _tensors(node.meta.get("val"))))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _try_in_place(memory: _Memory, node: fx.Node, overwritten: dict[fx.Node, fx.Node]) -> None:
    """Swap `node` for its in-place twin if everything it would overwrite is dead.

    Foreach and fused twins return nothing: what reads their results is to read the overwritten arguments instead.
    """
    twin = ops.in_place_twin(node.target) if _is_exact(node) else None
    if twin is None:
        return
    written = _written_values(node, twin)
    if written is None:
        return
    if not all(_fits(memory, node, source, result) for source, result in written):
        return
    if len({memory.root(source) for source, _ in written}) != len(written):
        return
    if not _torch.schema(twin).returns:
        for source, result in written:
            if result is not None:
                memory.merge(result, source)
                overwritten[result] = source
        node.target = twin
        node.meta["val"] = None
        return
    [(source, _)] = written
    node.target = twin
    memory.merge(node, source)


def _is_exact(node: fx.Node) -> bool:
    if isinstance(node.target, InLayout):
        return True
    return ops.is_op(node) and (_is_pointwise(node) or _torch.packet_name(node.target).startswith(_ALSO_EXACT))


def _is_pointwise(node: fx.Node) -> bool:
    target = node.target.in_place if isinstance(node.target, InLayout) else node.target
    return torch.Tag.pointwise in _torch.tags(target)


def _written_values(node: fx.Node, twin: Any) -> list[tuple[fx.Node, fx.Node | None]] | None:
    """Pairs (argument the twin writes to, node of the result that replaces it); None where that cannot be told.

    A fused optimizer writes its gradients only when it unscales them; otherwise they are not among the pairs.
    """
    schema = _torch.schema(twin)
    positions = ops.written_arguments(twin)
    arguments: dict[str, Any] = {schema.arguments[index].name: value for index, value in enumerate(node.args)}
    arguments |= node.kwargs
    if schema.returns:
        source = arguments.get(schema.arguments[positions[0]].name)
        return [(source, node)] if isinstance(source, fx.Node) and len(positions) == 1 else None
    is_nested = len(_torch.schema(node.target).returns) > 1
    pairs: list[tuple[fx.Node, fx.Node | None]] = []
    for output, position in enumerate(positions):
        name = schema.arguments[position].name
        results = _items(node, output) if is_nested else dict(_items_of(node))
        if name == "grads" and arguments.get("grad_scale") is None and not results:
            continue
        for index, source in enumerate(arguments.get(name, ())):
            pairs.append((source, results.get(index)))
    return pairs


def _items_of(node: fx.Node) -> list[tuple[int, fx.Node]]:
    indexed = [(ops.getitem_index(user), user) for user in node.users]
    return [(index, user) for index, user in indexed if index is not None]


def _items(node: fx.Node, output: int) -> dict[int, fx.Node]:
    return {index: item for position, part in _items_of(node) if position == output for index, item in _items_of(part)}


def _fits(memory: _Memory, node: fx.Node, source: fx.Node, result: fx.Node | None) -> bool:
    """Whether `source`'s memory is free at `node`, has the result's layout, and is not read through another view."""
    value = source.meta["val"]
    if not isinstance(value, torch.Tensor) or _overlaps_itself(value):
        return False
    if result is not None and layout(result.meta["val"]) != layout(value):
        return False
    if not memory.may_write(source, memory.position[node]):
        return False
    if result is not None and not memory.may_stay(result, source):
        return False
    root = memory.root(source)
    others = [other for other in node.all_input_nodes if other is not source and root in memory.roots(other)]
    repeated = sum(argument is source for argument in nodes_in((node.args, node.kwargs))) > 1
    return not others and (not repeated or _is_pointwise(node))


def _overlaps_itself(value: torch.Tensor) -> bool:
    """Whether two indices of a tensor may share an address (as in `expand`)."""
    extent = 1
    pairs = sorted(
        (_torch.optimization_hint(stride), _torch.optimization_hint(size))
        for stride, size in zip(value.stride(), value.shape, strict=True)
    )
    for stride, size in pairs:
        if size > 1:
            if stride < extent:
                return True
            extent = stride * (size - 1) + extent
    return False


def _clone_old_values(graph: StepGraph, updated: set[fx.Node]) -> None:
    """Old values of updated slots that are handed out, or written to another slot, are copied before the overwrite."""
    slots = graph.placeholders()
    owners = {_torch.storage_key(slot.meta["val"]): slot for slot in updated}
    clones: dict[fx.Node, fx.Node] = {}

    def protect(value: Any, target: fx.Node | None = None) -> Any:
        if not isinstance(value, fx.Node) or not isinstance(value.meta.get("val"), torch.Tensor):
            return value
        owner = owners.get(_torch.storage_key(value.meta["val"]))
        if owner is None or value is target:
            return value
        if value not in clones:
            clones[value] = graph.insert(aten.clone.default, (value,), like=value, after=value)
        return clones[value]

    graph.set_returned(
        outputs=tuple(protect(value) for value in graph.outputs),
        updates={slot_id: protect(value, slots[slot_id]) for slot_id, value in graph.updates.items()},
        results={slot_id: protect(value) for slot_id, value in graph.results.items()},
    )


def _write_updates(graph: StepGraph, memory: _Memory, made_by: dict[str, fx.Node]) -> None:
    """Updates that do not sit in their slot yet are copied there, as soon as the old value is no longer read.

    `made_by` has the op of those that an op without a result of its own has written into another slot.
    """
    slots = graph.placeholders()
    index_of = {node: index for index, node in enumerate(graph.nodes)}
    original = list(memory.position)
    for slot_id, value in graph.updates.items():
        slot = slots[slot_id]
        if memory.root(value) == memory.root(slot) and _same_place(value, slot):
            continue
        last = memory.last_read.get(memory.root(slot), -1)
        reader = next((node for node in reversed(original[: last + 1]) if node in index_of), slot)
        look = original[memory.last_look] if memory.last_look >= 0 else slot
        after = max(value, reader, look, made_by.get(slot_id, value), key=index_of.__getitem__)
        graph.insert(aten.copy_.default, (slot, value), like=made_by.get(slot_id, value), after=_behind_items(after))


def _same_place(value: fx.Node, slot: fx.Node) -> bool:
    return layout(value.meta["val"]) == layout(slot.meta["val"])


def _behind_items(node: fx.Node) -> fx.Node:
    """The last of a node's `getitem`s that directly follow it, so that tuples stay together with their items."""
    while node.next.op == "call_function" and node.next.target is operator.getitem:
        node = node.next
    return node


def _clone_outputs_in_slots(graph: StepGraph, memory: _Memory) -> None:
    """Results that were computed in a slot's memory and are also handed out get memory of their own."""
    output = graph.output_node

    def protect(value: Any) -> Any:
        if not isinstance(value, fx.Node) or value not in memory.position or len(memory.keys(value)) != 1:
            return value
        slot = memory.slots.get(memory.root(value))
        if slot is None or slot not in memory.updated:
            return value
        return graph.insert(aten.clone.default, (value,), like=value, before=output)

    graph.set_returned(
        outputs=tuple(protect(value) for value in graph.outputs),
        results={slot_id: protect(value) for slot_id, value in graph.results.items()},
    )
