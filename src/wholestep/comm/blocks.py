"""Communication blocks: a collective with everything that belongs to it, found by operator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from wholestep import _torch
from wholestep.errors import GraphError
from wholestep.graph import StepGraph, nodes_in, ops
from wholestep.graph.ops import getitem_index


@dataclass(frozen=True, eq=False)
class CommBlock:
    """One collective of a step graph.

    ```
    inputs -> collective -> wait -> unpacking (views, splits, getitems) -> users
    ```
    `users` are the nodes that compute something with the result, in graph order; the output node counts as one.
    """

    collective: fx.Node
    inputs: tuple[fx.Node, ...]
    wait: fx.Node
    unpacking: tuple[fx.Node, ...]
    users: tuple[fx.Node, ...]
    group: str
    reduce_op: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    num_bytes: int

    @property
    def kind(self) -> tuple[str, str, torch.dtype, torch.device]:
        """What two blocks must have in common to travel as one: group, reduce op, dtype, device."""
        return self.group, self.reduce_op, self.dtype, self.collective.meta["val"].device


def find_blocks(graph: StepGraph) -> list[CommBlock]:
    """All communication blocks in the order in which their collectives are issued.

    Raises `GraphError` for a collective that nobody waits for, or that somebody reads before it has been waited for.
    """
    position = {node: index for index, node in enumerate(graph.graph.nodes)}
    return [_block(node, position) for node in graph.calls() if _is_issue(node)]


def _is_issue(node: fx.Node) -> bool:
    return ops.is_collective(node.target) and node.target is not ops.WAIT


def _block(collective: fx.Node, position: dict[fx.Node, int]) -> CommBlock:
    waits = list(collective.users)
    if len(waits) != 1 or (waits[0].target is not ops.WAIT and waits[0].op != "output"):
        names = ", ".join(user.name for user in waits) or "nobody"
        raise GraphError(
            f"collective '{collective.name}' is read by {names}; exactly one wait_tensor must stand between"
        )
    [wait] = waits
    unpacking = _unpacking(wait)
    readers = {user for node in (wait, *unpacking) for user in node.users} - set(unpacking)
    value = collective.meta["val"]
    return CommBlock(
        collective=collective,
        inputs=tuple(nodes_in((collective.args, collective.kwargs))),
        wait=wait,
        unpacking=tuple(unpacking),
        users=tuple(sorted(readers, key=position.__getitem__)),
        group=str(_argument(collective, "group_name")),
        reduce_op=str(_argument(collective, "reduce_op") or ""),
        dtype=value.dtype,
        shape=tuple(_torch.optimization_hint(size) for size in value.shape),
        num_bytes=_torch.optimization_hint(value.numel()) * value.element_size(),
    )


def _unpacking(wait: fx.Node) -> list[fx.Node]:
    """Views, splits and getitems behind a wait: they only rename parts of its result."""
    found: list[fx.Node] = []
    pending = [wait]
    while pending:
        for user in pending.pop(0).users:
            if user not in found and user.op == "call_function" and _only_unpacks(user):
                found.append(user)
                pending.append(user)
    return found


def _only_unpacks(node: fx.Node) -> bool:
    return ops.is_view(node.target) or getitem_index(node) is not None


def _argument(node: fx.Node, name: str) -> Any:
    arguments = _torch.schema(node.target).arguments
    position = next((index for index, argument in enumerate(arguments) if argument.name == name), None)
    if position is None:
        return None
    return node.args[position] if position < len(node.args) else node.kwargs.get(name)
