"""Numbers that change from step to step come to regions in a tensor, so that a whole update can be one region.

An optimizer that is not fused computes with learning rates and step counts as Python numbers, between ops:

```
add = aten.add(step, 1)                               add = aten.add(step, 1)
item = aten._local_scalar_dense(add)                  item = aten._local_scalar_dense(add)
neg = -(lr / (1.0 - 0.9**item))                ->     neg = -(lr / (1.0 - 0.9**item))
root = aten.sqrt(exp_avg_sq)                          numbers = pack([neg], device)
new = aten.addcdiv(p, exp_avg, root, value=neg)       root = aten.sqrt(exp_avg_sq)
                                                      new = p + numbers[0].float() * (exp_avg / root)
```

What the numbers need comes first; the rest, from `numbers` on, is for Inductor. Python computes them as in eager, in
float64, and every op rounds them as its kernel would: to the dtype of the result, to float32 if that is shorter.
Foreach ops on the CPU are taken apart, since their tensors are to be read once and not once for each op. On a GPU they
stay: a kernel for each parameter takes longer to launch than they take to run.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from wholestep import _torch
from wholestep.graph import StepGraph, map_nodes, nodes_in, ops
from wholestep.lower.decompose import insert_graph, keep_layout
from wholestep.lower.region import signature_of_call
from wholestep.lower.regions import NOT_LOWERED, does_something, why_not

aten = torch.ops.aten

_FOREACH = "_foreach_"
# Their scalars are rounded to float32, not to their own dtype.
_SHORT_FLOATS = (torch.float16, torch.bfloat16)


def pack(numbers: Sequence[float], device: torch.device) -> torch.Tensor:
    """Numbers as one tensor of float64, on its way to the device while Python goes on."""
    if _torch.is_faking():
        return torch.empty(len(numbers), dtype=torch.float64, device=device)
    is_far = device.type == "cuda"
    packed = torch.tensor(numbers, dtype=torch.float64, device="cpu", pin_memory=is_far)
    return packed.to(device, non_blocking=True)


pack.is_pure_call = True  # pyright: ignore[reportFunctionMemberAccess]


def _add(x: Any, y: Any, alpha: Any = 1) -> torch.Tensor:
    return torch.add(x, y if isinstance(alpha, int) and alpha == 1 else y * alpha)


def _sub(x: Any, y: Any, alpha: Any = 1) -> torch.Tensor:
    return torch.sub(x, y if isinstance(alpha, int) and alpha == 1 else y * alpha)


def _addcmul(x: Any, left: Any, right: Any, value: Any = 1) -> torch.Tensor:
    return x + value * left * right


def _addcdiv(x: Any, left: Any, right: Any, value: Any = 1) -> torch.Tensor:
    return x + value * (left / right)


# By an op's name: what it computes for one tensor, if a number may be a tensor without dimensions.
_FORMULAS: dict[str, Callable[..., torch.Tensor]] = {
    "add": _add,
    "sub": _sub,
    "addcmul": _addcmul,
    "addcdiv": _addcdiv,
    **{name: getattr(torch, name) for name in ("mul", "div", "pow", "lerp", "maximum", "minimum")},
    **{name: getattr(torch, name) for name in ("sqrt", "rsqrt", "neg", "reciprocal", "abs", "sign")},
}


@dataclass(frozen=True)
class _Part:
    """The call of an op for one tensor: all of a plain call, one item of a foreach call."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: fx.Node


def lower_numbers(graph: StepGraph, *, min_ops: int) -> None:
    """Rewrite ops that read numbers wherever a run of at least `min_ops` ops can become a region by that."""
    known: dict[str, fx.Graph] = {}
    for _, nodes in itertools.groupby(list(graph.calls()), lambda node: (node.meta["phase"], node.meta.get("applies"))):
        run = list(nodes)
        early = _early(run)
        front = _with_ancestors([node for node in run if node in early and _is_number(node)], run)
        segments = [found for found in _segments(run, early, front) if _is_worth_it(found, min_ops)]
        if segments:
            _bring_to_front(run, front)
        for segment in segments:
            _rewrite(graph, segment, known)


def _early(run: Sequence[fx.Node]) -> set[fx.Node]:
    """Calls of a run that need nothing from it but numbers and tensors without dimensions."""
    late = set(run)
    for node in run:
        if _is_small(node.meta["val"]) and ops.is_pure(node.target) and late.isdisjoint(node.all_input_nodes):
            late.remove(node)
    return set(run) - late


def _is_small(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_small(item) for item in value)
    return value.dim() == 0 if isinstance(value, torch.Tensor) else True


def _is_number(node: fx.Node) -> bool:
    return isinstance(node.meta["val"], (torch.SymFloat, torch.SymBool))


def _numbers_of(node: fx.Node) -> list[fx.Node]:
    return [source for source in node.all_input_nodes if _is_number(source)]


def _with_ancestors(nodes: Sequence[fx.Node], run: Sequence[fx.Node]) -> set[fx.Node]:
    """Nodes with all that they are computed from within a run."""
    found = set(nodes)
    for node in reversed(run):
        if node in found:
            found.update(node.all_input_nodes)
    return found & set(run)


def _segments(run: Sequence[fx.Node], early: set[fx.Node], front: set[fx.Node]) -> list[list[fx.Node]]:
    """What is left of a run behind `front`, cut where something cannot be in a region whatever becomes of numbers."""
    segments: list[list[fx.Node]] = [[]]
    inside = set(run)
    for node in run:
        if node in front:
            continue
        is_known = all(number in early or number not in inside for number in _numbers_of(node))
        if why_not(node) and not (is_known and _numbers_of(node) and _parts(node)):
            segments.append([])
        else:
            segments[-1].append(node)
    return segments


def _is_worth_it(segment: Sequence[fx.Node], min_ops: int) -> bool:
    """Whether a segment is long enough for a region, and its ops that read numbers have others to be fused with.

    SGD without momentum and decay is one op for each parameter: there is nothing to fuse, and it is not faster.
    """
    made = {node for node in segment if does_something(node) or node.target is operator.getitem}
    is_chained = any(_numbers_of(node) and not made.isdisjoint(node.all_input_nodes) for node in segment)
    return is_chained and sum(len(_parts(node)) or does_something(node) for node in segment) >= min_ops


def _parts(node: fx.Node) -> list[_Part]:
    """The calls that a call consists of, if it has a formula; none otherwise."""
    if not ops.is_op(node) or NOT_LOWERED in node.meta or not node.kwargs.keys() <= {"alpha", "value"}:
        return []
    packet = _torch.packet_name(node.target)
    name = packet.removeprefix(_FOREACH)
    if name not in _FORMULAS:
        return []
    if name == packet:
        result = node.meta["val"]
        return [_Part(name, node.args, dict(node.kwargs), node)] if result.is_floating_point() else []
    items = [user for user in node.users if ops.getitem_index(user) is not None]
    values = [item.meta["val"] for item in items]
    if len(items) < len(node.users) or not all(x.is_floating_point() and x.device.type == "cpu" for x in values):
        return []
    return [_share(name, node, item) for item in items]


def _share(name: str, node: fx.Node, item: fx.Node) -> _Part:
    """What one item of a foreach call has a share in."""
    index: Any = item.args[1]

    def share_of(value: Any) -> Any:
        return value[index] if isinstance(value, (list, tuple)) else value

    args = tuple(share_of(value) for value in node.args)
    return _Part(name, args, {key: share_of(value) for key, value in node.kwargs.items()}, item)


def _bring_to_front(run: Sequence[fx.Node], front: set[fx.Node]) -> None:
    anchor = next(node for node in run if node not in front)
    is_behind = False
    for node in run:
        is_behind = is_behind or node is anchor
        if is_behind and node in front:
            anchor.prepend(node)


def _rewrite(graph: StepGraph, segment: Sequence[fx.Node], known: dict[str, fx.Graph]) -> None:
    """Pack the numbers of a segment in front of it, one tensor for each device, and let its ops read them there."""
    parts = [part for node in segment for part in _parts(node)]
    wanted: dict[torch.device, dict[fx.Node, None]] = {}
    for part in parts:
        numbers = [source for source in nodes_in((part.args, part.kwargs)) if _is_number(source)]
        wanted.setdefault(part.result.meta["val"].device, {}).update(dict.fromkeys(numbers))
    taken: dict[tuple[torch.device, fx.Node], fx.Node] = {}
    for device, numbers in wanted.items():
        if numbers:
            packed = graph.insert(pack, (list(numbers), device), like=segment[0], before=segment[0])
        for index, number in enumerate(numbers):
            item = graph.insert(aten.select.int, (packed, 0, index), like=segment[0], before=segment[0])  # pyright: ignore
            taken[device, number] = item
    replacements = {part.result: _computed(graph, part, taken, known) for part in parts}
    graph.replace(replacements)


def _computed(
    graph: StepGraph, part: _Part, taken: dict[tuple[torch.device, fx.Node], fx.Node], known: dict[str, fx.Graph]
) -> fx.Node:
    """A part's formula, in ops of the graph in front of its result."""
    value = part.result.meta["val"]
    args, kwargs = map_nodes((part.args, part.kwargs), lambda source: taken.get((value.device, source), source))
    sources = list(dict.fromkeys(nodes_in((args, kwargs))))
    selected = set(taken.values())
    is_number = [source in selected for source in sources]
    key = f"{value.dtype} {is_number} {signature_of_call(part.name, args, kwargs)}"
    if key not in known:
        known[key] = _traced(graph, part, (args, kwargs), sources, is_number)
    new, _ = insert_graph(graph, known[key], sources, before=part.result)
    keep_layout(part.result, new)
    return new


def _traced(
    graph: StepGraph, part: _Part, arguments: Any, sources: Sequence[fx.Node], is_number: Sequence[bool]
) -> fx.Graph:
    """What a part comes to in ops that Inductor likes; its inputs are `sources`, of which some are packed numbers."""
    from wholestep import _inductor_torch  # takes seconds

    dtype = part.result.meta["val"].dtype
    computed_in = torch.float32 if dtype in _SHORT_FLOATS else dtype

    def rounded(value: torch.Tensor, is_number: bool) -> torch.Tensor:
        return value.to(computed_in) if is_number or value.dtype in _SHORT_FLOATS else value

    def call(*values: torch.Tensor) -> torch.Tensor:
        given = dict(zip(sources, map(rounded, values, is_number)))
        args, kwargs = map_nodes(arguments, given.__getitem__)
        return _FORMULAS[part.name](*args, **kwargs).to(dtype)

    return _inductor_torch.decomposed(graph.fake_mode, call, [source.meta["val"] for source in sources])
