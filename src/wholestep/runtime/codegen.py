"""From a step graph to the Python function that runs it.

FX can generate code too; ours is made for small ops, where a step's time is Python's. Every operator is a global of the
generated function (no attribute chain per call) and, where torch has a generated binding that reaches the very same
operator, that binding (half the price of calling through `torch.ops`). A value is dropped after its last use.
"""

from __future__ import annotations

import functools
import itertools
import linecache
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from wholestep import _torch
from wholestep.capture.layouts import dense_strides, memory_order
from wholestep.graph import StepGraph, map_nodes, ops
from wholestep.runtime.collectives import Collective
from wholestep.runtime.journal import GONE, Journal, Places, at_once, returns_nothing, writes

Step = Callable[..., tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]]

_numbers = itertools.count()
# No node is called so.
_GIVEN_AWAY = "__arguments__"
_JOURNAL, _GIVEN, _DONE, _TODO = "__journal__", "__given__", "__done__", "__todo__"
_known_bindings: dict[tuple[Any, ...], Callable[..., Any]] = {}


def generate(
    graph: StepGraph,
    restride: Mapping[str, tuple[int, ...]] | None = None,
    after: Mapping[str, Callable[[], None]] | None = None,
    places: Places | None = None,
) -> Step:
    """Compile a graph to `step(inputs) -> (outputs, updates, results)`.

    `inputs` is a list in slot order, which is emptied; updates and results come in the order of the graph's dicts.
    `restride` names values whose memory is to be laid out anew (see `run_checked`), `after` names ops behind which
    something is to be called. With `places` it is `step(inputs, journal)`: inputs that have a place are not in the
    list, but in the journal, and ops that have one note there that they have run.
    """
    writer = _Writer(graph, restride or {}, after or {}, places)
    source = writer.source()
    filename = f"<wholestep step {next(_numbers)}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    exec(compile(source, filename, "exec"), writer.names)
    return writer.names["step"]


class _Writer:
    """Collects the text of the function and the globals it needs."""

    def __init__(
        self,
        graph: StepGraph,
        restride: Mapping[str, tuple[int, ...]],
        after: Mapping[str, Callable[[], None]],
        places: Places | None,
    ) -> None:
        self.graph = graph
        self.restride = restride
        self.after = after
        self.places = Places({}, {}, frozenset()) if places is None else places
        self.is_journaled = places is not None
        self.names: dict[str, Any] = {"inf": float("inf"), "nan": float("nan")}
        self._global_of: dict[Any, str] = {}

    def source(self) -> str:
        nodes = self.graph.nodes
        inputs = [node.name for node in nodes if node.op == "placeholder" and node.name not in self.places.given]
        dead_after = _dead_after(nodes)
        lines = [f"def step(inputs, {_JOURNAL}):" if self.is_journaled else "def step(inputs):"]
        if self.is_journaled:
            lines.append(f"    {_GIVEN}, {_DONE} = {_JOURNAL}.given, {_JOURNAL}.done")
        if inputs:
            lines.append(f"    [{', '.join(inputs)}] = inputs")
            lines.append("    inputs.clear()")
        for node in nodes:
            if node.op == "call_function":
                dead = dead_after[node]
                if node.name in self.places.done:
                    lines += [f"    {line}" for line in self._noted(node)]
                    lines += self._dropped(dead)
                    lines += self._call_after(node)
                    continue
                if empties_arguments(node):
                    lines.append(f"    {_GIVEN_AWAY} = {self._text(node.args[0])}")
                    lines += self._dropped([name for name in dead if name != node.name])
                    dead = [name for name in dead if name == node.name]
                lines.append(f"    {self._statement(node)}")
                if node.name in self.restride:
                    lines.append(f"    {node.name} = {self._laid_out(node)}")
                lines += self._dropped(dead)
                lines += self._call_after(node)
        returned = (self.graph.outputs, tuple(self.graph.updates.values()), tuple(self.graph.results.values()))
        lines.append(f"    return {self._text(returned)}")
        return "\n".join(lines) + "\n"

    def _call_after(self, node: fx.Node) -> list[str]:
        function = self.after.get(node.name)
        return [] if function is None else [f"    {self._global(function, 'mark')}()"]

    def _dropped(self, names: list[str]) -> list[str]:
        """Let go of values: those in the journal make room for a mark."""
        own = [name for name in names if name not in self.places.given and name not in self.places.done]
        lines = [f"    del {', '.join(own)}"] if own else []
        return [*lines, *(f"    {self._place(name)} = {GONE!r}" for name in names if name not in own)]

    def _place(self, name: str) -> str:
        if name in self.places.given:
            return f"{_GIVEN}[{self.places.given[name]}]"
        return f"{_DONE}[{self.places.done[name]}]"

    def _noted(self, node: fx.Node) -> list[str]:
        """An op of the call before: it runs unless that has been noted, and notes it in one opcode (see `journal`)."""
        index = self.places.done[node.name]
        if node.target is operator.getitem:
            function, arguments = self._global(operator.getitem, "getitem"), list(node.args)
        else:
            stem = _torch.packet_name(node.target) if ops.is_op(node) else getattr(node.target, "__name__", "call")
            called = at_once(node, best_binding(self.graph, node))
            called = LaidOut(called, node, self.restride[node.name]) if node.name in self.restride else called
            function, arguments = self._global(called, stem), list(node.args)
        if index in self.places.waits:
            return [f"{_JOURNAL}.wait({index}, {function}, {self._text(arguments[0])})"]
        if node.kwargs:
            named = ", ".join(f"{name}={self._text(value)}" for name, value in node.kwargs.items())
            function = f"{self._global(functools.partial, 'partial')}({function}, {named})"
        todo = f"{self._global(itertools.starmap, 'starmap')}({function}, ({self._text(tuple(arguments))},))"
        if returns_nothing(node):
            todo = f"{self._global(zip, 'zip')}({todo})"
        lines = [f"{_TODO} = {todo}", f"if {_DONE}[{index}] is None: {_DONE}[{index}:{index + 1}] = {_TODO}"]
        return [*lines, f"{_TODO} = None"] if node.kwargs else lines  # which hold values

    def _statement(self, node: fx.Node) -> str:
        if node.target is operator.getitem:
            return f"{node.name} = {self._text(node.args[0])}[{self._text(node.args[1])}]"
        stem = _torch.packet_name(node.target) if ops.is_op(node) else getattr(node.target, "__name__", "call")
        function = self._global(best_binding(self.graph, node), stem)
        if empties_arguments(node):
            return f"{node.name} = {function}({_GIVEN_AWAY})"
        arguments = [self._text(argument) for argument in node.args]
        arguments += [f"{name}={self._text(value)}" for name, value in node.kwargs.items()]
        return f"{node.name} = {function}({', '.join(arguments)})"

    def _laid_out(self, node: fx.Node) -> str:
        """A value in the layout that its fake value promises; with a dynamic batch, strides depend on the call."""
        fake = node.meta["val"]
        if _has_fixed_strides(fake):
            return f"{self._global(with_strides, 'with_strides')}({node.name}, {self.restride[node.name]})"
        return f"{self._global(with_order, 'with_order')}({node.name}, {memory_order(fake.stride())})"

    def _text(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            has_place = value.name in self.places.given or value.name in self.places.done
            return self._place(value.name) if has_place else value.name
        if isinstance(value, list):
            return f"[{', '.join(self._text(item) for item in value)}]"
        if isinstance(value, tuple):
            return f"({', '.join(self._text(item) for item in value)}{',' if len(value) == 1 else ''})"
        if isinstance(value, (bool, int, float, str, type(None))):
            return repr(value)
        return self._global(value, type(value).__name__)

    def _global(self, value: Any, stem: str) -> str:
        """A global name, with a number that no node's name ends in, for an operator, dtype, device or other object."""
        if value not in self._global_of:
            self._global_of[value] = f"{stem}_{len(self._global_of)}_"
            self.names[self._global_of[value]] = value
        return self._global_of[value]


def empties_arguments(node: fx.Node) -> bool:
    """Whether a call takes all its arguments as a list, out of which it takes them: they go while it runs."""
    return getattr(node.target, "empties_arguments", False)


def _dead_after(nodes: list[fx.Node]) -> dict[fx.Node, list[str]]:
    """Names to drop behind each node: values it was the last to read, or its own result if nobody reads it."""
    dead: dict[fx.Node, list[str]] = {node: [] for node in nodes}
    seen: set[fx.Node] = set()
    for node in reversed(nodes):
        for value in (node, *node.all_input_nodes):
            if value not in seen and node.op == "call_function":
                dead[node].append(value.name)
            seen.add(value)
    return dead


def run_checked(
    graph: StepGraph,
    inputs: list[Any],
    after: Mapping[str, Callable[[], None]] | None = None,
    places: Places | None = None,
    journal: Journal | None = None,
) -> tuple[Any, dict[str, tuple[int, ...]]]:
    """Run a graph op by op and hold each result against its fake value; returns what `step` would, and corrections.

    A few kernels lay out their result otherwise than torch's fake kernels say, and the graph was traced (which reshape
    is a view, which gradient needs a copy) for the latter. Such a result is brought into the layout that was promised,
    here and, given to `generate`, from then on. With `places`, values of the call before are those of `journal`.
    """
    run = _CheckedRun(graph, inputs, places, journal)
    dead_after = _dead_after(graph.nodes)
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if places is not None and node.name in places.done:
            run.note(node)
            dead = dead_after[node]
        else:
            dead = run.call(node, dead_after[node])
        run.drop(dead)
        if after is not None and node.name in after:
            after[node.name]()
    returned = (graph.outputs, tuple(graph.updates.values()), tuple(graph.results.values()))
    return map_nodes(returned, run.value), run.corrections


def finish_journal(graph: StepGraph, places: Places, journal: Journal) -> None:
    """Run what a graph has left undone of the call before, and nothing else."""
    run = _CheckedRun(graph, [], places, journal)
    for node in graph.calls():
        if node.name in places.done and journal.done[places.done[node.name]] is None:
            run.note(node)


class _CheckedRun:
    """Values of a graph that runs op by op."""

    def __init__(self, graph: StepGraph, inputs: list[Any], places: Places | None, journal: Journal | None) -> None:
        self.corrections: dict[str, tuple[int, ...]] = {}
        self._graph = graph
        self._places = Places({}, {}, frozenset()) if places is None else places
        self._journal = Journal(self._places, []) if journal is None else journal
        names = [node.name for node in graph.placeholders().values() if node.name not in self._places.given]
        self._values = dict(zip(names, inputs, strict=True)) if inputs else {}
        inputs.clear()

    def value(self, node: fx.Node) -> Any:
        if node.name in self._places.given:
            return self._journal.given[self._places.given[node.name]]
        if node.name in self._places.done:
            return self._journal.done[self._places.done[node.name]]
        return self._values[node.name]

    def drop(self, names: list[str]) -> None:
        """Let go of values, as generated code does."""
        for name in names:
            if name in self._places.given:
                self._journal.given[self._places.given[name]] = GONE
            elif name in self._places.done:
                self._journal.done[self._places.done[name]] = GONE
            else:
                del self._values[name]

    def call(self, node: fx.Node, dead: list[str]) -> list[str]:
        """Run an op; returns which of the values that are dead then are still there."""
        args, kwargs = map_nodes((node.args, node.kwargs), self.value)
        if empties_arguments(node):
            args = ([*args[0]],)  # a list of FX's own kind cannot be emptied
            self.drop([name for name in dead if name != node.name])
            dead = [name for name in dead if name == node.name]
        self._values[node.name] = LaidOut(best_binding(self._graph, node), node, None, self.corrections)(
            *args, **kwargs
        )
        return dead

    def note(self, node: fx.Node) -> None:
        """Run an op of the call before, unless that has been noted."""
        index = self._places.done[node.name]
        args, kwargs = map_nodes((node.args, node.kwargs), self.value)
        function = at_once(node, best_binding(self._graph, node))
        if index in self._places.waits:
            self._journal.wait(index, function, args[0])
        elif returns_nothing(node):
            self._journal.run_for_effect(index, function, args, kwargs)
        else:
            checked = function if writes(node) else LaidOut(function, node, None, self.corrections)
            args = ([*args[0]],) if empties_arguments(node) else args
            self._journal.run(index, checked, args, kwargs)


class LaidOut:
    """A function whose result is brought into the layout that its node promises, if it has another one.

    Either `strides` says which ones are to be corrected, or each result is looked at and `corrections` are noted.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        node: fx.Node,
        strides: tuple[int, ...] | None,
        corrections: dict[str, tuple[int, ...]] | None = None,
    ) -> None:
        self._function = function
        self._node = node
        self._strides = strides
        self._corrections = corrections

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self._function(*args, **kwargs)
        if self._corrections is None:
            fake = self._node.meta["val"]
            fixed = _has_fixed_strides(fake)
            return with_strides(result, self._strides) if fixed else with_order(result, memory_order(fake.stride()))  # pyright: ignore[reportArgumentType]
        promised = _promised_strides(self._node, result)
        if promised is None:
            return result
        self._corrections[self._node.name] = promised
        return with_strides(result, promised)


def with_strides(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """A tensor in another memory layout: a copy, unless only dimensions of size 1 have other strides."""
    if all(old == new or size == 1 for size, old, new in zip(tensor.shape, tensor.stride(), strides, strict=True)):
        return tensor.as_strided(tensor.shape, strides)
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def with_order(tensor: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """A dense tensor with its dimensions in another order in memory, outermost first."""
    return with_strides(tensor, dense_strides(tensor.shape, order))


def _has_fixed_strides(fake: torch.Tensor) -> bool:
    return not any(isinstance(stride, torch.SymInt) for stride in fake.stride())


def _strides_of(fake: torch.Tensor, shape: Sequence[int]) -> tuple[int, ...] | None:
    """The strides that a fake value has for these sizes; None if they are symbolic and leave gaps.

    A graph need not run first with the batch size it was traced with: those of the loop come a call later.
    """
    if _has_fixed_strides(fake):
        return tuple(map(int, fake.stride()))
    order = memory_order(fake.stride())
    traced = [_torch.optimization_hint(size) for size in fake.shape]
    is_dense = dense_strides(traced, order) == tuple(map(_torch.optimization_hint, fake.stride()))
    return dense_strides(shape, order) if is_dense else None


def _promised_strides(node: fx.Node, result: Any) -> tuple[int, ...] | None:
    """The strides a result should have according to its fake value, None if it has them (or has no elements).

    Those of dimensions of size 1 count: the kernels that read the result choose their memory format by them.
    """
    fake = node.meta.get("val")
    if not isinstance(result, torch.Tensor) or not isinstance(fake, torch.Tensor) or ops.written_arguments(node.target):
        return None
    if ops.is_op(node) and ops.shares_memory(node.target):
        return None
    promised = _strides_of(fake, result.shape)
    return None if promised is None or promised == result.stride() or result.numel() == 0 else promised


def best_binding(graph: StepGraph, node: fx.Node) -> Callable[..., Any]:
    """The cheapest callable that reaches exactly the node's operator with its arguments."""
    target: Any = node.target
    if not ops.is_op(node):
        return target
    if target is torch.ops.aten._local_scalar_dense.default:
        return torch.Tensor.item
    if ops.is_collective(target):
        return Collective(_torch.direct_call(target), node)
    key = (target, *(_kind(value) for value in node.args), *((name, _kind(v)) for name, v in node.kwargs.items()))
    if key not in _known_bindings:
        candidates = _torch.generated_bindings(target)
        fitting = (binding for binding in candidates if _reaches(graph, node, binding))
        _known_bindings[key] = next(fitting, _torch.direct_call(target))
    return _known_bindings[key]


def _kind(value: Any) -> Any:
    """What overload resolution looks at."""
    if isinstance(value, fx.Node):
        inner = value.meta.get("val")
        return ("node", type(inner), inner.dim() == 0 if isinstance(inner, torch.Tensor) else None)
    if isinstance(value, (list, tuple)):
        return (type(value), *sorted({str(_kind(item)) for item in value}))
    return type(value)


class _Recorder(_torch.TorchDispatchMode):
    """Remembers which operators a call reaches, and with which arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, list[Any]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if _torch.namespace(func) != "prim":  # questions about metadata that fake tensors ask themselves
            self.calls.append((func, _signature(func, args, kwargs or {})))
        return func(*args, **(kwargs or {}))


def _signature(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """All arguments of a call in schema order, defaults filled in (a binding may have defaults of its own)."""
    arguments = _torch.schema(target).arguments
    given = {argument.name: value for argument, value in zip(arguments, args, strict=False)} | kwargs
    return [_comparable(given.get(argument.name, argument.default_value)) for argument in arguments]


def _comparable(value: Any) -> Any:
    """Tensors by identity, symbolic sizes by expression, sequences as tuples."""
    if isinstance(value, torch.Tensor):
        return ("tensor", id(value))
    if isinstance(value, (list, tuple)):
        return tuple([_comparable(item) for item in value])
    return _torch.expression(value)


def _reaches(graph: StepGraph, node: fx.Node, binding: Callable[..., Any]) -> bool:
    """Try a binding on the node's fake arguments: does it call the node's operator, once, with the same arguments?"""
    args, kwargs = map_nodes((node.args, node.kwargs), lambda source: source.meta["val"])
    recorder = _Recorder()
    try:
        with torch.no_grad(), graph.fake_mode, recorder:
            binding(*args, **kwargs)
    except Exception:  # a binding with another signature: not a candidate
        return False
    return recorder.calls == [(node.target, _signature(node.target, args, kwargs))]
