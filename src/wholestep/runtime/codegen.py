"""From a step graph to the Python function that runs it.

FX can generate code too; ours is made for small ops, where a step's time is Python's. Every operator is a global of the
generated function (no attribute chain per call) and, where torch has a generated binding that reaches the very same
operator, that binding (half the price of calling through `torch.ops`). A value is dropped after its last use.
"""

from __future__ import annotations

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

Step = Callable[[list[Any]], tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]]

_numbers = itertools.count()
# No node is called so.
_GIVEN_AWAY = "__arguments__"
_known_bindings: dict[tuple[Any, ...], Callable[..., Any]] = {}


def generate(
    graph: StepGraph,
    restride: Mapping[str, tuple[int, ...]] | None = None,
    after: Mapping[str, Callable[[], None]] | None = None,
) -> Step:
    """Compile a graph to `step(inputs) -> (outputs, updates, results)`.

    `inputs` is a list in slot order, which is emptied; updates and results come in the order of the graph's dicts.
    `restride` names values whose memory is to be laid out anew (see `run_checked`), `after` names ops behind which
    something is to be called.
    """
    writer = _Writer(graph, restride or {}, after or {})
    source = writer.source()
    filename = f"<wholestep step {next(_numbers)}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    exec(compile(source, filename, "exec"), writer.names)
    return writer.names["step"]


class _Writer:
    """Collects the text of the function and the globals it needs."""

    def __init__(
        self, graph: StepGraph, restride: Mapping[str, tuple[int, ...]], after: Mapping[str, Callable[[], None]]
    ) -> None:
        self.graph = graph
        self.restride = restride
        self.after = after
        self.names: dict[str, Any] = {"inf": float("inf"), "nan": float("nan")}
        self._global_of: dict[Any, str] = {}

    def source(self) -> str:
        nodes = self.graph.nodes
        inputs = [node.name for node in nodes if node.op == "placeholder"]
        dead_after = _dead_after(nodes)
        lines = ["def step(inputs):"]
        if inputs:
            lines.append(f"    [{', '.join(inputs)}] = inputs")
            lines.append("    inputs.clear()")
        for node in nodes:
            if node.op == "call_function":
                dead = dead_after[node]
                if empties_arguments(node):
                    lines.append(f"    {_GIVEN_AWAY} = {self._text(node.args[0])}")
                    given = [name for name in dead if name != node.name]
                    lines += [f"    del {', '.join(given)}"] if given else []
                    dead = [name for name in dead if name == node.name]
                lines.append(f"    {self._statement(node)}")
                if node.name in self.restride:
                    lines.append(f"    {node.name} = {self._laid_out(node)}")
                lines += [f"    del {', '.join(dead)}"] if dead else []
                if node.name in self.after:
                    lines.append(f"    {self._global(self.after[node.name], 'applied')}()")
        returned = (self.graph.outputs, tuple(self.graph.updates.values()), tuple(self.graph.results.values()))
        lines.append(f"    return {self._text(returned)}")
        return "\n".join(lines) + "\n"

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
            return value.name
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
    graph: StepGraph, inputs: list[Any], after: Mapping[str, Callable[[], None]] | None = None
) -> tuple[Any, dict[str, tuple[int, ...]]]:
    """Run a graph op by op and hold each result against its fake value; returns what `step` would, and corrections.

    A few kernels lay out their result otherwise than torch's fake kernels say, and the graph was traced (which reshape
    is a view, which gradient needs a copy) for the latter. Such a result is brought into the layout that was promised,
    here and, given to `generate`, from then on.
    """
    corrections: dict[str, tuple[int, ...]] = {}
    values: dict[str, Any] = {}
    nodes = graph.nodes
    dead_after = _dead_after(nodes)
    for node in nodes:
        if node.op == "placeholder":
            values[node.name] = inputs[len(values)]
        elif node.op == "call_function":
            if len(values) >= len(inputs) and inputs:
                inputs.clear()
            args, kwargs = map_nodes((node.args, node.kwargs), lambda source: values[source.name])
            if empties_arguments(node):
                args = ([*args[0]],)  # a list of FX's own kind cannot be emptied
                values.update(dict.fromkeys(dead_after[node]))
            result = best_binding(graph, node)(*args, **kwargs)
            promised = _promised_strides(node, result)
            if promised is not None:
                corrections[node.name] = promised
                result = with_strides(result, promised)
            values[node.name] = result
            del args, kwargs, result
            for name in dead_after[node]:
                del values[name]
            if after is not None and node.name in after:
                after[node.name]()
    returned = (graph.outputs, tuple(graph.updates.values()), tuple(graph.results.values()))
    return map_nodes(returned, lambda source: values[source.name]), corrections


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
