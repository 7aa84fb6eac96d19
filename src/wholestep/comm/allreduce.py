"""Average every gradient over the ranks, one collective each; `bucket` joins them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from wholestep.graph import Phase, SlotKind, StepGraph, map_nodes, ops
from wholestep.passes.base import Pass, register

aten = torch.ops.aten


@dataclass(frozen=True)
class Reducible:
    """A gradient that ranks must agree on: the node that holds it and the parameters it belongs to.

    `key` is the first parameter's name; a gradient that an earlier backward of the same step left, and that was used,
    has `#1`, `#2`, ... behind it. Gradients of one `wave` are all there before any of them is used; a step with two
    updates (generator and discriminator) has two waves, which cannot travel together.
    """

    key: str
    names: tuple[str, ...]
    node: fx.Node
    wave: int = 0


def reducible_gradients(graph: StepGraph) -> list[Reducible]:
    """The gradients of a step in the order in which the backward finishes them."""
    found: list[Reducible] = []
    num_earlier: dict[str, int] = {}
    wave, read_so_far = 0, set[fx.Node]()
    for node in graph.graph.nodes:
        if _is_reader(node) and not read_so_far.isdisjoint(node.all_input_nodes):
            wave, read_so_far = wave + 1, set[fx.Node]()
        names: tuple[str, ...] = node.meta.get("gradient_of", ())
        earlier: tuple[str, ...] = node.meta.get("earlier_gradient_of", ())
        if names and _has_elements(node):
            found.append(Reducible(names[0], names, node, wave))
        elif earlier and _has_elements(node) and any(_is_reader(user) for user in node.users):
            number = num_earlier[earlier[0]] = num_earlier.get(earlier[0], 0) + 1
            found.append(Reducible(f"{earlier[0]}#{number}", earlier, node, wave))
        else:
            continue
        read_so_far.add(node)
    return found


def _has_elements(node: fx.Node) -> bool:
    """Nothing travels for an empty gradient."""
    return node.op != "placeholder" and node.meta["val"].numel() > 0


def _is_reader(user: fx.Node) -> bool:
    """Whether a user works with finished gradients (clipping, the update), as opposed to the backward itself."""
    return user.meta.get("phase") is Phase.OPTIMIZER


@register
@dataclass(frozen=True)
class AllReduce(Pass):
    """Let everything behind the backward read gradients averaged over a process group.

    ```
    mm = aten.mm(t, x)                    mm = aten.mm(t, x)
                                          mul = aten.mul(mm, 0.5)
                                     ->   all_reduce = _c10d_functional.all_reduce(mul, 'sum', '0')
                                          wait_tensor = _c10d_functional.wait_tensor(all_reduce)
    sub = aten.sub(param_w, mm)           sub = aten.sub(param_w, wait_tensor)
    ```
    Like DDP, each rank scales its part by `1 / world` before the sum. The backward itself goes on with local values.
    """

    name: ClassVar[str] = "allreduce"

    group: str = ""
    world: int = 1
    average: bool = True

    def apply(self, graph: StepGraph) -> StepGraph:
        for gradient in reducible_gradients(graph):
            self._reduce(graph, gradient)
        return graph

    def _reduce(self, graph: StepGraph, gradient: Reducible) -> None:
        source = gradient.node
        readers = [user for user in source.users if user.op == "call_function" and _is_reader(user)]
        last = _behind_items(source)
        value = source
        if self.average:
            last = value = graph.insert(
                aten.mul.Tensor, (value, 1.0 / self.world), like=source, after=last, phase=Phase.COMM
            )
        elif not source.meta["val"].is_contiguous():
            arguments = {"memory_format": torch.contiguous_format}
            last = value = graph.insert(
                aten.clone.default, (value,), arguments, like=source, after=last, phase=Phase.COMM
            )
        issue = graph.insert(ops.ALL_REDUCE, (value, "sum", self.group), like=source, after=last, phase=Phase.COMM)
        wait = graph.insert(ops.WAIT, (issue,), like=source, after=issue, phase=Phase.COMM)
        issue.meta["reduces"] = ((gradient.key, gradient.names),)
        issue.meta["wave"] = gradient.wave
        wait.meta["reduced_gradient_of"] = gradient.names
        for reader in readers:
            reader.replace_input_with(source, wait)
        _redirect_returned(graph, gradient, lambda node: wait if node is source else node)


def _redirect_returned(graph: StepGraph, gradient: Reducible, swap: Callable[[fx.Node], fx.Node]) -> None:
    """What the step returns as this gradient is the reduced one; another slot's gradient (an input's) stays local."""
    own = {f"{SlotKind.GRAD}.{name}" for name in gradient.names}
    is_last = "#" not in gradient.key

    def result(slot_id: str, value: Any) -> Any:
        is_foreign = slot_id.startswith(f"{SlotKind.GRAD}.") and slot_id not in own
        return value if is_foreign or not is_last else map_nodes(value, swap)

    graph.set_returned(
        outputs=map_nodes(graph.outputs, swap) if is_last else graph.outputs,
        updates=map_nodes(graph.updates, swap),
        results={slot_id: result(slot_id, value) for slot_id, value in graph.results.items()},
    )


def _behind_items(node: fx.Node) -> fx.Node:
    """The last `getitem` of a tuple's row of them, so that the row stays together."""
    while node.next.op == "call_function" and ops.getitem_index(node.next) is not None:
        node = node.next
    return node
