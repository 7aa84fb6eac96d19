"""Step graphs as text: Python that runs, with phase, type, module path and source line beside each op."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from wholestep import _torch
from wholestep.graph.step_graph import StepGraph
from wholestep.graph.verify import describe

_CODE_WIDTH = 96
_PASS_WIDTH = 80


def print_graph(graph: StepGraph) -> str:
    """The graph as a Python module with one function `step`; the signature names each slot, one per line."""
    passes = ", ".join(_shortened(str(record)) for record in graph.history) or "capture"
    modules = {_module_of(node.target) for node in graph.calls() if not _torch.is_op_overload(node.target)}
    lines = [f"# Step graph: {graph.num_ops} ops, {len(graph.slots)} slots, after {passes}"]
    lines += [f"import {module}" for module in sorted({"math", "operator", "torch", *modules} - {"builtins"})]
    lines += ["from torch import device, inf, nan", "", "", "def step("]
    lines += _signature_lines(graph)
    phase = None
    for node in graph.nodes:
        if node.op == "output":
            lines += _return_lines(graph)
        elif node.op == "call_function":
            if node.meta["phase"] is not phase:
                phase = node.meta["phase"]
                lines.append(f"    # {phase}")
            lines.append(format_line(node))
    return "\n".join(lines) + "\n"


def format_line(node: fx.Node) -> str:
    """A call as a line of a function, with type, module path and source line of its result."""
    notes = [describe(node.meta["val"]), node.meta.get("fqn", ""), node.meta.get("source", "")]
    return _with_comment(f"    {node.name} = {format_call(node)}", notes)


def _shortened(text: str) -> str:
    """A pass without the middle of very long options."""
    return text if len(text) <= _PASS_WIDTH else f"{text[: _PASS_WIDTH - 20]}…{text[-18:]}"


def _signature_lines(graph: StepGraph) -> list[str]:
    return [
        *(
            _with_comment(f"    {node.name},", [describe(node.meta["val"]), slot_id])
            for slot_id, node in graph.placeholders().items()
        ),
        "):",
    ]


def _return_lines(graph: StepGraph) -> list[str]:
    lines = ["    return {", f"        'outputs': {_format(graph.outputs)},"]
    for entry, values in (("updates", graph.updates), ("results", graph.results)):
        lines.append(f"        '{entry}': {{")
        lines += [f"            {slot_id!r}: {_format(value)}," for slot_id, value in values.items()]
        lines.append("        },")
    return [*lines, "    }"]


def _with_comment(code: str, notes: list[str]) -> str:
    comment = "  ".join(note for note in notes if note)
    return f"{code:<{_CODE_WIDTH}}  # {comment}" if comment else code


def format_call(node: fx.Node) -> str:
    """A call as an expression in Python."""
    if node.target is operator.getitem:
        return f"{_format(node.args[0])}[{_format(node.args[1])}]"
    arguments = [_format(arg) for arg in node.args]
    arguments += [f"{name}={_format(value)}" for name, value in node.kwargs.items()]
    return f"{format_target(node.target)}({', '.join(arguments)})"


def format_target(target: Any) -> str:
    """A call target as Python: `torch.ops.aten.add.Tensor`, `operator.mul`."""
    if _torch.is_op_overload(target):
        return f"torch.ops.{target}"
    if not hasattr(target, "__qualname__"):
        return str(target)
    module = _module_of(target)
    return target.__qualname__ if module == "builtins" else f"{module}.{target.__qualname__}"


def _module_of(target: Any) -> str:
    return "operator" if target.__module__ == "_operator" else str(target.__module__)


def _format(value: Any) -> str:
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_format(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(_format(item) for item in value)}]"
    if isinstance(value, tuple):
        return f"({', '.join(_format(item) for item in value)}{',' if len(value) == 1 else ''})"
    if isinstance(value, slice):
        return f"slice({_format(value.start)}, {_format(value.stop)}, {_format(value.step)})"
    if isinstance(value, torch.layout | torch.memory_format | torch.dtype):
        return str(value)
    return repr(value)
