"""Where a graph and eager part: the first op whose result eager has not computed, and what that is likely due to."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from wholestep import _torch
from wholestep.capture import Capture
from wholestep.graph import InLayout, Phase, StepGraph, map_nodes, ops
from wholestep.passes.cse import is_uninitialised
from wholestep.runtime.codegen import best_binding
from wholestep.runtime.guards import Call
from wholestep.runtime.rounding import EagerLog

# Ops of eager that are looked at for the counterpart of one of the graph; passes move and merge them a little.
_WINDOW = 500
# Results that differ by less than this many units in the last place are rounded otherwise.
_ROUNDING_UNITS = 64


def explain(capture: Capture, call: Call, log: EagerLog) -> str:
    """Run a graph op by op beside eager's results; says which op is the first to differ, and the likely cause.

    The state of the world is changed, and has to be put back afterwards.
    """
    other_path = _other_attention(capture.graph, log)
    found = _first_unlike_eager(capture, call, log)
    if found is None:
        return other_path or "every op of forward and backward gives what eager's gives: the update differs"
    node, value = found
    where = f"{_name(node.target)} ({node.meta['phase'].value}{_module(node)}{_source(node)})"
    return f"the first op that differs is {where}: {other_path or _cause(node, value, log)}"


def _first_unlike_eager(capture: Capture, call: Call, log: EagerLog) -> tuple[fx.Node, torch.Tensor | None] | None:
    """The first op whose result eager has not computed, and that result; without it if eager runs no such op.

    Ops that eager does not run may be right nevertheless: functionalisation makes some. `strangers` has, for each value
    that depends on such an op, the op; it is to blame as soon as an op that eager does run gives something else.
    """
    graph, position = capture.graph, 0
    values: dict[fx.Node, Any] = {}
    strangers: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            values[node] = capture.bindings[graph.slots[node.name].id].read(call.leaves)
        if not _is_run(node, values):
            continue
        args, kwargs = map_nodes((node.args, node.kwargs), values.__getitem__)
        with torch.no_grad():
            values[node] = best_binding(graph, node)(*args, **kwargs)
        stranger = next((strangers[source] for source in node.all_input_nodes if source in strangers), None)
        result = next((leaf for leaf in _torch.tree_leaves(values[node]) if isinstance(leaf, torch.Tensor)), None)
        candidates: list[int] = []
        if result is not None and _is_comparable(node):
            candidates = [index for index in _window(position, log) if _is_like(log, index, node, result)]
            match = next((index for index in candidates if _same(log.results[index][1], result)), None)
            if match is not None:
                position = max(position, match + 1)
                continue
            stranger = stranger or (None if candidates else node)
        if candidates:
            return (node, result) if stranger is None else (stranger, None)
        if stranger is not None:
            strangers[node] = stranger
    left = [value for value in (*graph.outputs, *graph.results.values()) if isinstance(value, fx.Node)]
    return next(((strangers[node], None) for node in left if node in strangers), None)


def _is_run(node: fx.Node, values: dict[fx.Node, Any]) -> bool:
    """Whether a node is one of forward and backward, and does not read what the update leaves."""
    if node.op != "call_function" or node.meta["phase"] is Phase.OPTIMIZER:
        return False
    return all(source in values for source in node.all_input_nodes)


def _window(position: int, log: EagerLog) -> range:
    return range(max(0, position - _WINDOW), min(position + _WINDOW, len(log.results)))


def _is_comparable(node: fx.Node) -> bool:
    """Whether a node computes: views and memory that is yet to be filled do not."""
    is_op = ops.is_op(node) or isinstance(node.target, InLayout)
    return is_op and not ops.is_view(node.target) and not is_uninitialised(node)


def _is_like(log: EagerLog, index: int, node: fx.Node, result: torch.Tensor) -> bool:
    func, value = log.results[index]
    return _name(func) == _name(node.target) and (value.shape, value.dtype) == (result.shape, result.dtype)


def _name(target: Any) -> str:
    """An operator's name, the same for its in-place twin."""
    target = target.in_place if isinstance(target, InLayout) else target
    name = _torch.packet_name(target) if _torch.is_op_overload(target) else getattr(target, "__name__", str(target))
    return name.removesuffix("_").removesuffix("_like")


def _same(left: torch.Tensor, right: torch.Tensor) -> bool:
    if torch.equal(left, right):
        return True
    return left.is_floating_point() and bool(((left == right) | (left.isnan() & right.isnan())).all())


def _cause(node: fx.Node, value: torch.Tensor | None, log: EagerLog) -> str:
    if value is None:
        return "eager runs no such op, or not on tensors of this shape"
    if ops.is_op(node) and ops.draws(node):
        return "it draws other random numbers"
    alike = (index for index in range(len(log.results)) if _is_like(log, index, node, value))
    nearest = min(_distance(log.results[index][1], value) for index in alike)
    return "it is rounded otherwise" if nearest <= _ROUNDING_UNITS else "it computes something else"


def _distance(left: torch.Tensor, right: torch.Tensor) -> float:
    """The largest difference in units in the last place of the largest value."""
    if not left.is_floating_point() or left.numel() == 0:
        return float("inf")
    unit = float(left.double().abs().max()) * torch.finfo(left.dtype).eps
    return float((left.double() - right.double()).abs().max()) / max(unit, 1e-300)


def _other_attention(graph: StepGraph, log: EagerLog) -> str:
    """Kernels of attention that only one of the two runs."""
    own = {_name(node.target) for node in graph.calls() if ops.is_op(node)}
    eagers = {_name(func) for func, _ in log.results}
    ours, theirs = ([name for name in sorted(a - b) if "attention" in name] for a, b in ((own, eagers), (eagers, own)))
    if not ours and not theirs:
        return ""
    none = "none of its own"
    return f"attention takes another path: {', '.join(ours) or none}, in eager {', '.join(theirs) or none}"


def _module(node: fx.Node) -> str:
    return f" of {node.meta['fqn']}" if node.meta.get("fqn") else ""


def _source(node: fx.Node) -> str:
    return f", {node.meta['source']}" if node.meta.get("source") else ""
