"""The invariants of a step graph. Run before and after every pass, so a wrong rewrite fails where it happened."""

from __future__ import annotations

import operator
from typing import Any, cast

import torch
from torch import fx

from wholestep import _torch
from wholestep.errors import GraphError
from wholestep.graph import ops
from wholestep.graph.phase import Phase
from wholestep.graph.step_graph import StepGraph, map_nodes


def verify_graph(graph: StepGraph, *, deep: bool = False) -> None:
    """Raise `GraphError` unless the graph is well formed.

    Checked: FX lint (defined before use, no orphans), every input has a slot, every call has a phase and a fake value,
    `getitem` agrees with its tuple, effects (randomness, collectives) keep the order they were captured in, buckets are
    issued in the order of their numbers, updates fit their slots, and, while the graph is functional, nothing writes to
    a tensor.
    """
    try:
        graph.graph.lint()
    except RuntimeError as error:
        raise GraphError(f"the graph is not well formed: {error}") from error
    last_effect = last_bucket = -1
    for node in graph.nodes:
        if node.op == "placeholder" and (node.name not in graph.slots or "val" not in node.meta):
            raise GraphError(f"input '{node.name}' has no {'slot' if node.name not in graph.slots else 'fake value'}")
        if node.op != "call_function":
            continue
        _verify_call(graph, node)
        effect = node.meta.get("effect")
        if effect is not None and effect < last_effect:
            raise GraphError(f"'{node.name}' ({node.target}) has moved behind an effect that was captured after it")
        last_effect = last_effect if effect is None else effect
        if "bucket" in node.meta and node.target is not ops.WAIT and node.meta.get("is_ordered"):
            if node.meta["bucket"] < last_bucket:
                raise GraphError(f"bucket {node.meta['bucket']} ('{node.name}') is issued after bucket {last_bucket}")
            last_bucket = node.meta["bucket"]
    _verify_updates(graph)
    if deep:
        _verify_values(graph)


def _verify_call(graph: StepGraph, node: fx.Node) -> None:
    if not isinstance(node.meta.get("phase"), Phase):
        raise GraphError(f"'{node.name}' ({node.target}) has no phase")
    if "val" not in node.meta:
        raise GraphError(f"'{node.name}' ({node.target}) has no fake value")
    if graph.is_functional and ops.written_arguments(node.target):
        raise GraphError(f"'{node.name}' ({node.target}) writes to its arguments in a functional graph")
    if node.target is operator.getitem:
        producer, index = node.args
        assert isinstance(producer, fx.Node)
        items = producer.meta["val"]
        if not isinstance(items, (list, tuple)) or not isinstance(index, int) or not -len(items) <= index < len(items):
            raise GraphError(f"'{node.name}' takes item {index} of '{producer.name}', which has no such item")
        if describe(items[index]) != describe(node.meta["val"]):
            raise GraphError(f"'{node.name}' does not have the type of item {index} of '{producer.name}'")


def _verify_updates(graph: StepGraph) -> None:
    placeholders = {slot.id: name for name, slot in graph.slots.items()}
    by_name = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    for slot_id, value in graph.updates.items():
        if slot_id not in placeholders:
            raise GraphError(f"the step updates '{slot_id}', which is not one of its slots")
        old, new = by_name[placeholders[slot_id]].meta["val"], value.meta["val"]
        if (_sizes(old), old.dtype, old.device) != (_sizes(new), new.dtype, new.device):
            raise GraphError(f"the new value of '{slot_id}' is {describe(new)}, its slot holds {describe(old)}")


def _verify_values(graph: StepGraph) -> None:
    """Recompute each op on its arguments' fake values and compare the type of the result."""
    for node in graph.calls():
        args, kwargs = map_nodes((node.args, node.kwargs), lambda arg: arg.meta["val"])
        if any(
            isinstance(value, (torch.SymInt, torch.SymFloat)) for value in _leaves((args, kwargs, node.meta["val"]))
        ):
            continue
        with graph.fake_mode, torch.no_grad():
            value = cast(Any, node.target)(*args, **kwargs)
        if describe(value) != describe(node.meta["val"]):
            raise GraphError(
                f"'{node.name}' ({node.target}) yields {describe(value)}, but its fake value is "
                f"{describe(node.meta['val'])}"
            )


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in _leaves(item)]
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in _leaves(item)]
    return [value]


def _sizes(value: torch.Tensor) -> tuple[Any, ...]:
    return tuple(_torch.expression(size) for size in value.shape)


_DTYPE_NAMES = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "b8",
}


def describe(value: Any) -> str:
    """A value's type in short: `f32[4, 128]`, `(f32[4], i64[])`, `float`."""
    if isinstance(value, torch.Tensor):
        sizes = ", ".join(str(size) for size in _sizes(value))
        return f"{_DTYPE_NAMES.get(value.dtype, str(value.dtype).removeprefix('torch.'))}[{sizes}]"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(describe(item) for item in value)})"
    names = {torch.SymInt: "int", torch.SymFloat: "float", torch.SymBool: "bool"}
    return names.get(type(value), type(value).__name__)
