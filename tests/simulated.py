"""Step graphs run op by op on ranks that are only simulated: as captured, and as a rotated loop.

What travels is poison in its own memory from issue to wait: whoever reads it early computes NaN, and what somebody
writes there meanwhile is lost when it arrives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from wholestep.capture import capture, tree
from wholestep.graph import Phase, SlotKind, StepGraph, map_nodes, ops
from wholestep.iteration import Kind, derive, moved_nodes
from wholestep.iteration.moves import SHARED
from wholestep.passes import Pipeline, run_passes

ALL_REDUCES = (ops.ALL_REDUCE, torch.ops._c10d_functional.all_reduce_.default)


class Aborted(Exception):
    """A graph was stopped half-way."""


class Wire:
    """Stands in for a process group: the sum over all ranks is `factor` times the local value."""

    def __init__(self, factor: float = 3.0) -> None:
        self.factor = factor
        self.sent: list[str] = []
        self.travelling: dict[int, tuple[Tensor, Tensor]] = {}

    def call(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        target: Any = node.target
        if target in ALL_REDUCES:
            self.sent.append(node.name)
            value = args[0] * self.factor
            buffer = torch.empty_like(value) if target is ops.ALL_REDUCE else args[0]
            self.travelling[buffer.data_ptr()] = buffer, value
            return buffer.fill_(float("nan"))
        if target is ops.WAIT:
            if args[0].data_ptr() not in self.travelling and "applies" in node.meta:
                return args[0]  # after a failure what has arrived may be waited for again
            assert args[0].data_ptr() in self.travelling, f"{node.name} waits for what is not on its way"
            _, value = self.travelling.pop(args[0].data_ptr())
            return args[0].copy_(value)
        return target(*args, **kwargs)


def interpret(
    graph: StepGraph,
    inputs: Mapping[str, Any],
    wire: Wire,
    *,
    stop_at: int | None = None,
    after: Mapping[str, Callable[[], None]] | None = None,
) -> tuple[tuple[Any, ...], dict[str, Any], dict[str, Any]]:
    """Outputs, updates and results of a graph whose inputs are given by slot id.

    `stop_at` is the number of the call at which it fails, not counting those that apply what the call before left.
    """
    values: dict[fx.Node, Any] = {}
    num_calls = 0
    for node in graph.nodes:
        if node.op == "placeholder":
            values[node] = inputs[graph.slots[node.name].id]
        elif node.op == "call_function":
            if num_calls == stop_at and "applies" not in node.meta:
                raise Aborted
            args, kwargs = map_nodes((node.args, node.kwargs), values.__getitem__)
            values[node] = wire.call(node, args, kwargs)
            num_calls += "applies" not in node.meta
            if after is not None and node.name in after:
                after[node.name]()
    return _returned(graph, values)


def _returned(graph: StepGraph, values: dict[fx.Node, Any]) -> tuple[tuple[Any, ...], dict[str, Any], dict[str, Any]]:
    outputs = map_nodes(graph.outputs, values.__getitem__)
    updates: dict[str, Any] = {key: _copy(values[node]) for key, node in graph.updates.items()}
    results: dict[str, Any] = {key: map_nodes(value, values.__getitem__) for key, value in graph.results.items()}
    return outputs, updates, results


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


class PlainLoop:
    """The loop as the user wrote it: one functional graph without collectives, ranks averaged by definition.

    `scale` is what the ranks' average makes of a local gradient, None where nothing travels. The update and what the
    step returns as a gradient see averaged gradients, the backward its own.
    """

    def __init__(self, graph: StepGraph, state: Mapping[str, Any], scale: Callable[[Tensor], Tensor] | None) -> None:
        self.graph = graph
        self.state = {key: _copy(value) for key, value in state.items()}
        self._scale = scale

    def step(self, batch: Mapping[str, Any]) -> tuple[Any, ...]:
        values: dict[fx.Node, Any] = {}
        averaged: dict[fx.Node, Any] = {}
        for node in self.graph.nodes:
            seen = values | averaged if node.op == "output" or node.meta.get("phase") is Phase.OPTIMIZER else values
            if node.op == "placeholder":
                slot_id = self.graph.slots[node.name].id
                values[node] = batch[slot_id] if slot_id in batch else self.state[slot_id]
            elif node.op == "call_function":
                args, kwargs = map_nodes((node.args, node.kwargs), seen.__getitem__)
                target: Any = node.target
                values[node] = target(*args, **kwargs)
                if self._scale is not None and _is_gradient(node):
                    averaged[node] = self._scale(values[node])
        outputs, updates, results = _returned(self.graph, values | averaged)
        outputs = tuple(_copy(value) for value in outputs)
        self.state |= {key: _copy(value) for key, value in (updates | results).items()}
        return outputs


def _is_gradient(node: fx.Node) -> bool:
    return bool(node.meta.get("gradient_of") or node.meta.get("earlier_gradient_of"))


class RotatedLoop:
    """The graphs that `derive` makes of a step, run as the runtime would, in memory of its own."""

    def __init__(self, source: StepGraph, state: Mapping[str, Any], wire: Wire, finish: str = "") -> None:
        self.source = source
        self.state = {key: _copy(value) for key, value in state.items()}
        self.wire = wire
        self.carries: dict[str, Any] = {}
        self.waiting: frozenset[int] = frozenset()
        self._blocks = frozenset[int](node.meta["next_iteration"] for node in moved_nodes(source)) - {SHARED}
        self._finish = Pipeline.parse(finish)
        self._known: dict[Any, StepGraph] = {}

    def again(self, state: Mapping[str, Any]) -> RotatedLoop:
        """The same loop from the beginning."""
        fresh = RotatedLoop(self.source, state, Wire(self.wire.factor))
        fresh._finish, fresh._known = self._finish, self._known
        return fresh

    def graph(self, kind: Kind, blocks: frozenset[int] | None = None) -> StepGraph:
        if (kind, blocks) not in self._known:
            derived = derive(self.source, kind, blocks)
            derived.verify()
            self._known[kind, blocks] = run_passes(derived, self._finish)
        return self._known[kind, blocks]

    def step(self, batch: Mapping[str, Any], *, is_last: bool = False, stop_at: int | None = None) -> tuple[Any, ...]:
        """One call; `stop_at` makes it fail after so many ops, with what was pending applied as far as it got."""
        if self.waiting:
            kind = Kind.CLEANUP if is_last else Kind.MAIN
        else:
            kind = Kind.SETUP
        outputs = self._run(self.graph(kind), batch, stop_at)
        self.waiting = self._blocks
        if is_last:
            self.carries.clear() if kind is Kind.CLEANUP else self.flush()
            self.waiting = frozenset()
        return outputs

    def flush(self) -> None:
        if self.waiting:
            self._run(self.graph(Kind.FLUSH, self.waiting), {}, None)
        self.waiting = frozenset()
        self.carries.clear()

    def _run(self, graph: StepGraph, batch: Mapping[str, Any], stop_at: int | None) -> tuple[Any, ...]:
        last = {node.meta["applies"]: node.name for node in graph.calls() if node.meta.get("applies", SHARED) != SHARED}
        after = {name: lambda block=block: self._applied(block) for block, name in last.items()}
        inputs = {**self.state, **self.carries, **batch}
        outputs, updates, results = interpret(graph, inputs, self.wire, stop_at=stop_at, after=after)
        for slot_id, value in updates.items():
            self.state[slot_id].copy_(value)
        self.carries = {key: value for key, value in results.items() if key.startswith("carry.")}
        self.state |= {key: value for key, value in results.items() if not key.startswith("carry.")}
        return outputs

    def _applied(self, block: int) -> None:
        self.waiting -= {block}


def unequal(expected: Mapping[Any, Any], found: Mapping[Any, Any]) -> list[Any]:
    """Names whose values differ, bit for bit; NaN is what poison leaves and equals nothing."""
    return [name for name, value in expected.items() if name not in found or not _is_equal(value, found[name])]


def _is_equal(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    return type(left) is type(right) and left == right


@dataclass(frozen=True)
class Trial:
    """A captured step, functional, with the values it would be called with. Nothing here changes it: tests share it."""

    graph: StepGraph
    state: dict[str, Any]
    batch: dict[str, Any]

    @staticmethod
    def of(function: Callable[..., Any], *args: Any, passes: str = "simplify,cse,dce") -> Trial:
        captured = capture(function, args, {})
        for optimizer, parameter, entries in captured.initial_state:
            optimizer.state[parameter] = entries
        leaves, _ = tree.flatten((args, {}))
        graph = run_passes(captured.graph, Pipeline.parse(passes))
        values = {key: captured.bindings[key].read(leaves) for key in graph.placeholders()}
        values = {key: value.detach() if isinstance(value, Tensor) else value for key, value in values.items()}
        brought = {slot.id for slot in graph.slots_of_kind(SlotKind.BATCH, SlotKind.LR)}
        return Trial(
            graph,
            {key: value for key, value in values.items() if key not in brought},
            {key: value for key, value in values.items() if key in brought},
        )

    def after(self, passes: str) -> StepGraph:
        """A copy of the graph, rewritten and verified."""
        graph = run_passes(self.graph.copy(), Pipeline.parse(passes))
        graph.verify(deep=True)
        return graph

    def assert_same(self, graph: StepGraph, *, average: float | None = None, num_steps: int = 3) -> None:
        """Run a rewritten graph as a loop, functional and in place: it computes what the captured one does.

        `average` is what the rewritten graph multiplies gradients with before it sends them, None if it sends none.
        """
        scale = None if average is None else (lambda value: (value * average) * Wire().factor)
        for finish in ("", "reinplace", "reinplace,fill_buckets"):
            plain, loop = PlainLoop(self.graph, self.state, scale), RotatedLoop(graph, self.state, Wire(), finish)
            for number in range(num_steps):
                batch = {
                    key: value * (1 + number) if key.startswith("lr") else value for key, value in self.batch.items()
                }
                torch.manual_seed(number)
                expected = plain.step(batch)
                torch.manual_seed(number)
                found = loop.step(batch)
                assert unequal(dict(enumerate(expected)), dict(enumerate(found))) == [], f"outputs of step {number}"
            loop.flush()
            assert unequal(plain.state, loop.state) == [], f"state in the end, {finish or 'functional'}"
            assert not loop.wire.travelling
