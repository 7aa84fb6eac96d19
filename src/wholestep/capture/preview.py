"""What nodes of a trace compute in this very call: run on its real tensors, while the step is being traced.

Traced nodes are functions, so that nothing is written. Random numbers are drawn from where the generators are before
the step, in the order of the graph, and the generators are put back. Memory is that of an eager step: a value goes
after its last use, but for some bytes that spare the next look work, and for what was drawn, as nobody can again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from wholestep import _recording_torch, _torch
from wholestep.capture.build import target_of
from wholestep.graph import map_nodes, ops

if TYPE_CHECKING:
    from wholestep.capture.session import Session

_KEPT_BYTES = 2**26


class Preview:
    """Runs parts of one trace ahead of the graph."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._known: dict[fx.Node, Any] = {}
        self._kept_bytes = 0
        self._states: list[torch.Tensor] = []
        """Of all generators: where they are after the draws that have been made."""

    def read(self, node: fx.Node, read: Callable[[Any], Any]) -> Any:
        """What can be read from what a node computes."""
        return self.read_all([node], lambda values: read(values[0]))

    def read_all(self, nodes: Sequence[fx.Node], read: Callable[[list[Any]], Any]) -> Any:
        """What can be read from what some nodes compute."""
        generators = _recording_torch.generators()
        before = [generator.get_state() for generator in generators]
        try:
            with _recording_torch.untraced(), _torch.real_kernels():
                values = list[Any]()
                for node in nodes:
                    _put(generators, self._states)
                    values.append(self._value(node))
                    self._states = [generator.get_state() for generator in generators]
                return read(values)
        finally:
            _put(generators, before)

    def _value(self, node: fx.Node) -> Any:
        todo = self._todo(node)
        last_use = {source: other for other in todo for source in other.all_input_nodes}
        values: dict[fx.Node, Any] = {}
        reals = self._session.reals()
        for other in todo:
            values[other] = value = self._run(other, reals, values)
            self._kept_bytes += 0 if other.op == "placeholder" else _num_bytes(value)
            if ops.has_effect(other) or self._kept_bytes <= _KEPT_BYTES:
                self._known[other] = value
            for source in other.all_input_nodes:
                if last_use[source] is other and source is not node:
                    values.pop(source, None)
        return values[node] if node in values else self._known[node]

    def _todo(self, node: fx.Node) -> list[fx.Node]:
        """The nodes to run, in order: what a node needs, and all draws before it, each with what it needs."""
        order = [*node.graph.nodes]
        before = order[: order.index(node)]
        draws = [other for other in before if ops.has_effect(other) and other.target is not _recording_torch.REQUIRE]
        pending, todo = [node, *draws], set[fx.Node]()
        while pending:
            other = pending.pop()
            if other not in todo and other not in self._known:
                todo.add(other)
                pending += other.all_input_nodes
        return [other for other in order if other in todo]

    def _run(self, node: fx.Node, reals: dict[str, Any], values: dict[fx.Node, Any]) -> Any:
        if node.op == "placeholder":
            return reals[node.name]
        if node.op == "get_attr":
            return getattr(self._session.tracer.root, str(node.target))
        args, kwargs = map_nodes(
            (node.args, node.kwargs), lambda one: values[one] if one in values else self._known[one]
        )
        return target_of(node)(*args, **kwargs)


def _num_bytes(value: Any) -> int:
    parts = value if isinstance(value, (list, tuple)) else [value]
    return sum(part.numel() * part.element_size() for part in parts if isinstance(part, torch.Tensor))


def _put(generators: list[torch.Generator], states: list[torch.Tensor]) -> None:
    for generator, state in zip(generators, states):
        generator.set_state(state)
