"""Memory of a step graph: the bytes each node moves, and the bytes alive over time.

Everything is read off fake values, so a graph can be judged without running it. Memory belongs to storages, not to
nodes: a view costs nothing and keeps its base alive, an in-place op allocates nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from wholestep import _torch
from wholestep.graph import LossHead, Phase, Slot, SlotKind, StepGraph, ops

# They read as many elements of their first argument as they return, not all of it.
_GATHERING = frozenset({"embedding", "gather", "index", "index_select"})
# They overwrite their first argument without looking at it.
_OVERWRITING = frozenset({"copy_", "fill_", "zero_", "bernoulli_", "normal_", "uniform_", "exponential_", "random_"})


@dataclass(frozen=True)
class Traffic:
    """Bytes a node reads and writes."""

    read: int = 0
    written: int = 0


def node_bytes(node: fx.Node) -> Traffic:
    """Bytes a node moves: each storage it reads or writes counts once each, views and plumbing count nothing."""
    if node.op != "call_function" or node.target is operator.getitem or ops.shares_memory(node.target):  # pyright: ignore
        return Traffic()
    name = _torch.packet_name(node.target) if ops.is_op(node) else ""
    if name.startswith(("empty", "new_empty")):
        return Traffic()
    fresh = tensors_in(node.meta.get("val")) if not _returns_argument(node) else ()
    num_written = _num_bytes([*written_values(node), *fresh])
    return Traffic(_num_bytes_read(node, name, num_written), num_written)


def _num_bytes_read(node: fx.Node, name: str, num_written: int) -> int:
    if name.endswith("_like") or name.startswith("new_"):
        return 0
    arguments = [list(tensors_in(source.meta.get("val"))) for source in _argument_nodes(node)]
    if name in _OVERWRITING:
        arguments = arguments[1:]
    if name in _GATHERING and arguments:
        indices = _num_bytes([tensor for tensors in arguments[1:] for tensor in tensors])
        return min(_num_bytes(arguments[0]), num_written) + indices
    return _num_bytes([tensor for tensors in arguments for tensor in tensors])


def _num_bytes(tensors: list[torch.Tensor]) -> int:
    """Bytes behind tensors; two views of one storage never count more than the storage has."""
    touched: dict[int, int] = {}
    capacity: dict[int, int] = {}
    for tensor in {id(tensor): tensor for tensor in tensors}.values():
        key = _torch.storage_key(tensor)
        touched[key] = touched.get(key, 0) + _num_distinct_bytes(tensor)
        capacity[key] = storage_bytes(tensor)
    return sum(min(num_bytes, capacity[key]) for key, num_bytes in touched.items())


def _num_distinct_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements, those repeated by `expand` once."""
    num_elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        is_repeated = _torch.optimization_hint(stride) == 0
        num_elements *= min(1, _torch.optimization_hint(size)) if is_repeated else _torch.optimization_hint(size)
    return num_elements * tensor.element_size()


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of a node's fake value: itself, or the items of a list."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def storage_bytes(tensor: torch.Tensor) -> int:
    """The size of the storage behind a fake tensor."""
    return _torch.optimization_hint(tensor.untyped_storage().nbytes())


def written_values(node: fx.Node) -> list[torch.Tensor]:
    """Fake values of the arguments that a node writes to."""
    return [tensor for source in _written_nodes(node) for tensor in tensors_in(source.meta.get("val"))]


def _argument_nodes(node: fx.Node, value: Any = None) -> list[fx.Node]:
    found: list[fx.Node] = []
    map_arg((node.args, node.kwargs) if value is None else value, lambda arg: found.append(arg) or arg)
    return found


def _written_nodes(node: fx.Node) -> list[fx.Node]:
    if not ops.is_op(node):
        return []
    schema = _torch.schema(node.target)
    written: list[fx.Node] = []
    for index in ops.written_arguments(node.target):  # pyright: ignore[reportArgumentType]
        value = node.args[index] if index < len(node.args) else node.kwargs.get(schema.arguments[index].name)
        written += _argument_nodes(node, (value,))
    return written


def _returns_argument(node: fx.Node) -> bool:
    """Whether what a node returns is what it has written to (`add_`), as opposed to something new beside it."""
    return ops.is_op(node) and any(_torch.is_written(returned) for returned in _torch.schema(node.target).returns)


@dataclass(frozen=True)
class LiveValue:
    """A storage that is alive at some moment, under the name of the node that made it; `head` if it holds logits."""

    name: str
    num_bytes: int
    slot: Slot | None = None
    phase: Phase | None = None
    fqn: str = ""
    head: LossHead | None = None


@dataclass(frozen=True)
class MemoryProfile:
    """Live bytes while a graph runs.

    `live_bytes[i]` is what is alive while call `i` runs (its arguments and its results), `phases[i]` its phase;
    `slot_bytes` is alive all the time and included. `at_peak` lists what is alive at call `peak_index`, largest first.
    """

    live_bytes: tuple[int, ...]
    phases: tuple[Phase, ...]
    slot_bytes: int
    peak_bytes: int
    peak_index: int
    peak_node: str
    at_peak: tuple[LiveValue, ...]


def profile_memory(graph: StepGraph) -> MemoryProfile:
    """Simulate the graph in its execution order.

    A value lives from the node that makes it to the last use of any alias; slots live throughout (but for what the call
    before has left: that goes once it is used), what the graph returns to the end. Not known here and not counted:
    workspace that a kernel allocates for itself, and what fused LSTM kernels on the CPU keep for their backward (its
    fake value is empty).
    """
    storages = _Storages.of(graph)
    live = {key: owner for key, owner in storages.owner.items() if owner.op == "placeholder"}
    slot_bytes = num_live = sum(storages.num_bytes[key] for key in live)
    timeline: list[int] = []
    peak_bytes, peak_index, peak_node, at_peak = slot_bytes, 0, "", dict(live)
    for index, node in enumerate(graph.calls()):
        for key in storages.made_by(node):
            live[key] = node
            num_live += storages.num_bytes[key]
        timeline.append(num_live)
        if num_live > peak_bytes or not peak_node:
            peak_bytes, peak_index, peak_node, at_peak = num_live, index, node.name, dict(live)
        for key in storages.dead_after(node):
            num_live -= storages.num_bytes[key]
            del live[key]
    values = [_live_value(graph, owner, storages.num_bytes[key]) for key, owner in at_peak.items()]
    return MemoryProfile(
        tuple(timeline),
        tuple(node.meta["phase"] for node in graph.calls()),
        slot_bytes,
        peak_bytes,
        peak_index,
        peak_node,
        tuple(sorted(values, key=lambda value: (-value.num_bytes, value.name))),
    )


def _live_value(graph: StepGraph, owner: fx.Node, num_bytes: int) -> LiveValue:
    slot = graph.slot_of(owner)
    name = owner.name if slot is None else slot.id
    phase = owner.meta.get("phase") if slot is None else None
    return LiveValue(name, num_bytes, slot, phase, owner.meta.get("fqn", ""), owner.meta.get("loss_head"))


@dataclass
class _Storages:
    """Which storages there are, who makes each and who uses it last. `alias` leads from a storage to the one it is."""

    alias: dict[int, int] = field(default_factory=dict)
    owner: dict[int, fx.Node] = field(default_factory=dict)
    num_bytes: dict[int, int] = field(default_factory=dict)
    last_use: dict[int, fx.Node] = field(default_factory=dict)
    _made: dict[fx.Node, list[int]] = field(default_factory=dict)
    _dead: dict[fx.Node, list[int]] = field(default_factory=dict)

    @staticmethod
    def of(graph: StepGraph) -> _Storages:
        storages = _Storages()
        for node in graph.nodes:
            storages._add(node)
        for key, node in storages.last_use.items():
            slot = graph.slot_of(storages.owner[key])
            if slot is None or slot.kind is SlotKind.CARRY:
                storages._dead.setdefault(node, []).append(key)
        return storages

    def made_by(self, node: fx.Node) -> list[int]:
        return self._made.get(node, [])

    def dead_after(self, node: fx.Node) -> list[int]:
        return self._dead.get(node, [])

    def _add(self, node: fx.Node) -> None:
        aliased = self._aliased(node)
        for tensor in tensors_in(node.meta.get("val")) if node.op in ("placeholder", "call_function") else ():
            key = self._find(_torch.storage_key(tensor))
            if aliased is not None and key != aliased:
                self.alias[key] = key = aliased
            if key not in self.owner:
                self.owner[key] = node
                self.num_bytes[key] = storage_bytes(tensor)
                self._made.setdefault(node, []).append(key)
            self.last_use[key] = node
        for source in node.all_input_nodes:
            for tensor in tensors_in(source.meta.get("val")):
                self.last_use[self._find(_torch.storage_key(tensor))] = node

    def _aliased(self, node: fx.Node) -> int | None:
        """The storage that an op's result shares with an argument, whatever the fake values say.

        Rewriting `add` to `add_` leaves the fake value of its result as it was.
        """
        if not ops.is_op(node):
            return None
        if ops.shares_memory(node.target):  # pyright: ignore[reportArgumentType]
            sources = [tensor for source in node.all_input_nodes for tensor in tensors_in(source.meta.get("val"))]
        else:
            sources = written_values(node) if _returns_argument(node) else []
        return self._find(_torch.storage_key(sources[0])) if sources else None

    def _find(self, key: int) -> int:
        while key in self.alias:
            key = self.alias[key]
        return key
