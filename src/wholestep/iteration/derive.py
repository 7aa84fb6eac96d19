"""The graphs of a rotated loop, all derived from the one step graph whose nodes say which of them move.

With R the part that stays and M the part that moves to the next iteration, n calls run

    setup     R                 the first call
    main      M before, R       the calls in between: M of the call before, then R
    cleanup   M before, R, M    the last call
    flush     M before          whatever is pending, at any other time

and together M follows each R exactly once: the unrotated loop. In `main` and `cleanup` each node of M is placed just
before its first reader in R, which reads M's result as an ordinary value: reading the old one cannot be expressed.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, cast

import torch
from torch import fx

from wholestep import _torch
from wholestep.graph import Slot, SlotKind, StepGraph, map_nodes, nodes_in, ops
from wholestep.iteration.moves import carried_nodes, found_again, kept_gradients, moved_nodes

aten = torch.ops.aten

Env = dict[fx.Node, Any]


class Kind(StrEnum):
    """Which call of the loop a derived graph is for."""

    SETUP = "setup"
    MAIN = "main"
    CLEANUP = "cleanup"
    FLUSH = "flush"


def derive(graph: StepGraph, kind: Kind, blocks: frozenset[int] | None = None) -> StepGraph:
    """One graph of the rotated loop; `blocks` limits a flush to some of the moved blocks.

    Values that go from one call to the next are results and inputs of kind CARRY, named after their node.
    """
    return _Derivation(graph, kind, blocks).build()


class _Derivation:
    """Copies parts of `source` into a new graph, keeping track of which copy stands for which node."""

    def __init__(self, source: StepGraph, kind: Kind, blocks: frozenset[int] | None) -> None:
        self.source = source
        self.kind = kind
        self.moved = moved_nodes(source)
        if blocks is not None:
            self.moved = _with_ancestors(self.moved, blocks)
        self.carried = carried_nodes(source)
        self.graph = fx.Graph()
        self.slots: dict[str, Slot] = {}
        self.refreshed: set[fx.Node] = set()

    def build(self) -> StepGraph:
        has_before = self.kind is not Kind.SETUP
        inputs: Env = {node: self._copy_input(node) for node in self.source.placeholders().values()}
        before: Env = {}
        if has_before:
            before = {node: inputs[node] for node in found_again(self.source)} | self._carry_inputs()
            for node in self.moved:
                before[node] = self._recompute(node, before)
        now: Env = dict(inputs)
        moved = set(self.moved)
        for slot_id, value in self.source.updates.items():
            if has_before and value in moved:
                now[self.source.placeholder(slot_id)] = before[value]
        if self.kind is not Kind.FLUSH:
            for node in self.source.calls():
                if self.kind is Kind.CLEANUP or node not in moved:
                    now[node] = self._copy(node, now)
        self.graph.output(self._returned(before, now))
        derived = StepGraph(_torch.graph_module(torch.nn.Module(), self.graph), self.slots, self.source.fake_mode)
        derived.history = list(self.source.history)
        derived.accumulating = self.source.accumulating
        if has_before and self.kind is not Kind.FLUSH:
            _sink(derived, [before[node] for node in self.moved])
        if self.kind is Kind.FLUSH:
            self._drop_unused(derived)
        return derived

    def _copy_input(self, node: fx.Node) -> fx.Node:
        copied = self.graph.node_copy(node)
        copied.meta = dict(node.meta)
        self.slots[copied.name] = self.source.slots[node.name]
        return copied

    def _carry_inputs(self) -> Env:
        """An input for each carried value, with memory of its own: it is not the one this call computes."""
        env: Env = {}
        for node in self.carried:
            copied = self.graph.placeholder(f"carry_{node.name}")
            copied.meta = {"val": _fresh(self.source, node.meta["val"])}
            self.slots[copied.name] = Slot(SlotKind.CARRY, node.name)
            env[node] = copied
        return env

    def _copy(self, node: fx.Node, env: Env) -> fx.Node:
        """Copy a node of this call; views of values that are now another node's get fake values to match."""
        copied = self.graph.node_copy(node, lambda source: self._note(env[source], source))
        copied.meta = dict(node.meta)
        copied.meta.pop("next_iteration", None)
        is_alias = ops.shares_memory(node.target) or ops.getitem_index(node) is not None
        if is_alias and not self.refreshed.isdisjoint(copied.all_input_nodes):
            self._refresh(copied)
        return copied

    def _note(self, copied: fx.Node, source: fx.Node) -> fx.Node:
        if source.op == "placeholder" and copied.op != "placeholder":
            self.refreshed.add(copied)
        return copied

    def _recompute(self, node: fx.Node, env: Env) -> fx.Node:
        """Copy a node of the call before; its fake value is made anew, as this call has its own of the same name."""
        copied = self.graph.node_copy(node, lambda source: env[source])
        copied.meta = {key: value for key, value in node.meta.items() if key not in ("next_iteration", "effect")}
        copied.meta["applies"] = node.meta["next_iteration"]
        self._refresh(copied)
        return copied

    def _refresh(self, node: fx.Node) -> None:
        self.refreshed.add(node)
        if not _has_tensors(node.meta["val"]):
            return
        args, kwargs = map_nodes((node.args, node.kwargs), lambda source: source.meta["val"])
        args, kwargs = ops.with_plain_numbers(node.target, args, kwargs)
        with self.source.fake_mode, torch.no_grad():
            node.meta["val"] = cast(Any, node.target)(*args, **kwargs)

    def _returned(self, before: Env, now: Env) -> dict[str, Any]:
        source, moved = self.source, set(self.moved)
        updates: dict[str, Any] = {}
        results: dict[str, Any] = {}
        for slot_id, value in source.updates.items():
            if value in moved and self.kind in (Kind.MAIN, Kind.FLUSH):
                updates[slot_id] = before[value]
            elif self.kind is not Kind.FLUSH and (value not in moved or self.kind is Kind.CLEANUP):
                updates[slot_id] = now[value]
        for slot_id, value in source.results.items():
            is_moved = bool(moved & set(nodes_in(value)))
            if self.kind is Kind.FLUSH:
                if is_moved:
                    results[slot_id] = map_nodes(value, lambda node: before[node])
            elif not is_moved or self.kind is Kind.CLEANUP:
                results[slot_id] = map_nodes(value, lambda node: now[node])
        if self.kind in (Kind.SETUP, Kind.MAIN):
            results |= {Slot(SlotKind.CARRY, node.name).id: self._carry(node, now) for node in self.carried}
        outputs = () if self.kind is Kind.FLUSH else map_nodes(source.outputs, lambda node: now[node])
        return {"outputs": outputs, "updates": updates, "results": results}

    def _carry(self, node: fx.Node, now: Env) -> fx.Node:
        """The value to carry over; a copy if it lives in memory that others may change between two calls."""
        value, fake = now[node], node.meta["val"]
        if not isinstance(fake, torch.Tensor):
            return value
        kept = {f"{SlotKind.GRAD}.{name}" for name in kept_gradients(self.source)}
        results = [result for slot_id, result in self.source.results.items() if slot_id not in kept]
        others = [
            *self.source.placeholders().values(),
            *nodes_in([self.source.outputs, self.source.updates, results]),
        ]
        foreign = {_torch.storage_key(other.meta["val"]) for other in others if _is_tensor(other)}
        if _torch.storage_key(fake) not in foreign:
            return value
        copied = self.graph.call_function(aten.clone.default, (value,))
        copied.meta = {"val": _fresh(self.source, node.meta["val"]), "phase": _phase_of_first_user(node)}
        return copied

    def _drop_unused(self, derived: StepGraph) -> None:
        for slot_id, node in derived.placeholders().items():
            if not node.users and slot_id not in derived.updates:
                derived.graph.erase_node(node)
                del derived.slots[node.name]


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta["val"], torch.Tensor)


def _phase_of_first_user(node: fx.Node) -> Any:
    return next(user.meta["phase"] for user in node.users if user.op == "call_function")


def _with_ancestors(moved: list[fx.Node], blocks: frozenset[int]) -> list[fx.Node]:
    """The moved nodes of some blocks and the moved nodes they need."""
    wanted: set[fx.Node] = set()
    for node in reversed(moved):
        if node.meta["next_iteration"] in blocks or not wanted.isdisjoint(node.users):
            wanted.add(node)
    return [node for node in moved if node in wanted]


def _has_tensors(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or (isinstance(value, (list, tuple)) and any(map(_has_tensors, value)))


def _fresh(source: StepGraph, value: Any) -> Any:
    """A fake value of the same type with memory of its own."""
    if not isinstance(value, torch.Tensor):
        return value
    with source.fake_mode, torch.no_grad():
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _sink(derived: StepGraph, before: list[fx.Node]) -> None:
    """Place the nodes of the call before just ahead of their first reader in this call.

    What only leads to a slot (optimizer state) follows the node it comes from; what nobody reads comes at the very end.
    """
    pending = set(before)
    needed: set[fx.Node] = set()
    for node in reversed(before):
        readers = [
            user for user in node.users if user.op == "call_function" and (user not in pending or user in needed)
        ]
        if readers:
            needed.add(node)
            min(readers).prepend(node)
    output = derived.output_node
    for node in before:
        if node in needed:
            continue
        sources = [source for source in node.all_input_nodes if source in pending]
        if sources:
            _behind_items(max(sources)).append(node)
        else:
            output.prepend(node)


def _behind_items(node: fx.Node) -> fx.Node:
    while node.next.op == "call_function" and ops.getitem_index(node.next) is not None:
        node = node.next
    return node
