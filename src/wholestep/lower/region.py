"""A part of a step graph that runs as one op: compiled by Inductor, or op by op if that does not work."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from wholestep import _torch
from wholestep.graph import nodes_in
from wholestep.graph.printer import format_line
from wholestep.lower.tanh import replace_tanh

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Outcome:
    """What compiling came to: code, or the reason why there is none. `mode` is whose sizes it knows, if it has any."""

    run: Callable[[list[Any]], Sequence[Any]] | None
    failure: str = ""
    strides: Sequence[tuple[int, ...] | None] | None = None
    mode: weakref.ref[Any] | None = None


# Regions that are the same op for op share what was compiled, within a process.
_outcomes: dict[str, _Outcome] = {}


class Region:
    """A functional graph with tensors and sizes for inputs and tensors for outputs; the target of a node.

    It takes its inputs as a list and empties it, so that they may go as soon as they are used. `prepare` compiles it,
    in `fake_mode`'s symbols: what Inductor assumes about sizes is noted there. `written` has the numbers of the inputs
    that it ends with writing to.
    """

    # Who calls it gives away its arguments: generated code keeps no name for those nobody reads any more.
    empties_arguments = True

    def __init__(
        self, name: str, module: fx.GraphModule, fake_mode: Any, written: frozenset[int] = frozenset()
    ) -> None:
        self.name = name
        self.module = module
        self.fake_mode = fake_mode
        self.written = written
        self.failure = ""
        self._run: Callable[[list[Any]], Sequence[Any]] | None = None
        self._strides: Sequence[tuple[int, ...] | None] | None = None
        self._traced = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]

    @property
    def __name__(self) -> str:
        return self.name

    def __str__(self) -> str:
        return f"regions.{self.name}"

    @property
    def code(self) -> str:
        """The region as Python, for readers."""
        inputs = [node.name for node in self.module.graph.find_nodes(op="placeholder")]
        returned: Any = self.module.graph.output_node().args[0]
        lines = [f"def {self.name}({', '.join(inputs)}):", *(format_line(node) for node in self.calls)]
        return "\n".join([*lines, f"    return [{', '.join(node.name for node in returned)}]"])

    @property
    def calls(self) -> list[fx.Node]:
        return [node for node in self.module.graph.nodes if node.op == "call_function"]

    @property
    def num_ops(self) -> int:
        return len(self.calls)

    @property
    def is_pure_call(self) -> bool:
        return not self.written

    @property
    def is_compiled(self) -> bool:
        return self._run is not None and not self.failure

    def __call__(self, inputs: list[Any]) -> Sequence[Any]:
        if _torch.is_faking():
            return self.module(*inputs)
        self.prepare()
        assert self._run is not None
        if not _torch.is_profiling():
            return self._run(inputs)
        with torch.profiler.record_function(f"wholestep::{self.name}"):
            return self._run(inputs)

    def prepare(self, free_outputs: frozenset[int] = frozenset()) -> None:
        """Compile it, unless that has been done; outputs of these numbers may have any strides."""
        if self._run is None:
            self._run = self._compiled(free_outputs)

    def strides_of(self, output: int) -> tuple[int, ...] | None:
        """The strides that an output has as compiled; None for those that were promised."""
        return None if self._strides is None else self._strides[output]

    def _compiled(self, free_outputs: frozenset[int]) -> Callable[[list[Any]], Sequence[Any]]:
        key = f"{sorted(free_outputs)}\n{signature(self.module.graph)}"
        mode = None
        if _has_symbols(self.module.graph):  # what was assumed about sizes is known to one capture only
            key = f"{id(self.fake_mode)}\n{key}"
            mode = weakref.ref(self.fake_mode)
        known = _outcomes.get(key)
        if known is None or (known.mode is not None and known.mode() is not self.fake_mode):
            known = _outcomes[key] = self._outcome(mode, free_outputs)
        self.failure, self._strides = known.failure, known.strides
        return known.run or self._op_by_op

    def _outcome(self, mode: weakref.ref[Any] | None, free_outputs: frozenset[int]) -> _Outcome:
        from wholestep import _inductor_torch  # takes seconds

        try:
            module = copied(self.module)
            replace_tanh(module.graph)
            run, strides = _inductor_torch.compile_functional(module, self.fake_mode, free_outputs)
            return _Outcome(run, strides=strides, mode=mode)
        except Exception as error:  # whatever it is: the step can run without
            text = str(error).strip()
            failure = f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__
            logger.warning("region '%s' is not compiled and runs op by op: %s", self.name, failure)
            return _Outcome(None, failure, mode=mode)

    def _op_by_op(self, inputs: list[Any]) -> Sequence[Any]:
        # A region before this one may have chosen another layout, in which views of this one do not work.
        for index, traced in enumerate(self._traced):
            if index not in self.written:
                inputs[index] = _as_traced(inputs[index], traced)
        return fx.Interpreter(self.module).boxed_run(inputs)


def _as_traced(value: Any, traced: Any) -> Any:
    """A value with the strides it was traced with, if those are fixed."""
    if not isinstance(value, torch.Tensor) or any(isinstance(size, torch.SymInt) for size in traced.stride()):
        return value
    if value.stride() == traced.stride():
        return value
    return torch.empty_strided(value.shape, traced.stride(), dtype=value.dtype, device=value.device).copy_(value)


def _has_symbols(graph: fx.Graph) -> bool:
    values = [node.meta.get("val") for node in graph.nodes]
    sizes = [size for value in values if isinstance(value, torch.Tensor) for size in value.shape]
    return any(isinstance(item, torch.SymInt) for item in (*values, *sizes))


def copied(module: fx.GraphModule) -> fx.GraphModule:
    """A module for somebody who rewrites what he is given."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    return _torch.graph_module(module, graph)


def signature(graph: fx.Graph) -> str:
    """A text that is the same for graphs that compute the same from inputs of the same kind."""
    number = {node: f"%{index}" for index, node in enumerate(graph.nodes)}
    lines = [
        f"{node.op} {node.target if node.op == 'call_function' else ''} {_text((node.args, node.kwargs), number)} "
        f"{kind_of(node.meta.get('val'))}"
        for node in graph.nodes
    ]
    return "\n".join(lines)


def signature_of(node: fx.Node) -> str:
    """The same for a single call."""
    return signature_of_call(node.target, node.args, node.kwargs)


def signature_of_call(target: Any, args: Any, kwargs: Any) -> str:
    """The same for a call that is no node."""
    number = {source: f"%{index}" for index, source in enumerate(dict.fromkeys(nodes_in((args, kwargs))))}
    kinds = [kind_of(source.meta.get("val")) for source in number]
    return f"{target} {_text((args, kwargs), number)} {kinds}"


def _text(value: Any, name: Mapping[fx.Node, str]) -> str:
    if isinstance(value, fx.Node):
        return name[value]
    if isinstance(value, (list, tuple)):
        return f"[{','.join(_text(item, name) for item in value)}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{_text(item, name)}' for key, item in value.items())}}}"
    return repr(value)


def kind_of(value: Any) -> str:
    """Type and layout of a value as text."""
    if isinstance(value, torch.Tensor):
        sizes = [str(_torch.expression(size)) for size in (*value.shape, *value.stride(), value.storage_offset())]
        return f"{value.dtype} {value.device} {sizes}"
    if isinstance(value, (list, tuple)):
        return f"[{','.join(kind_of(item) for item in value)}]"
    return str(_torch.expression(value))
