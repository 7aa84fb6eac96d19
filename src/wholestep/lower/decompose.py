"""Break ops down into those that Inductor fuses best, one by one, so that every op keeps its place and its provenance.

```
gelu = aten.gelu(x)              mul = aten.mul(x, 0.5)
                          ->     mul_1 = aten.mul(x, 0.7071067811865476); erf = aten.erf(mul_1)
                                 add = aten.add(erf, 1); mul_2 = aten.mul(mul, add)
```

Numbers change within the rounding of the dtype. Random ops, collectives and whatever else stays outside of regions is
left as it is.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from wholestep import _torch
from wholestep.graph import StepGraph, map_nodes, ops
from wholestep.lower.region import kind_of, signature_of
from wholestep.lower.regions import NOT_LOWERED, why_not
from wholestep.passes.base import Pass, register


@register
@dataclass(frozen=True)
class Decompose(Pass):
    """Apply Inductor's decompositions to all ops that a region may contain."""

    name: ClassVar[str] = "decompose"
    after: ClassVar[tuple[str, ...]] = ("simplify", "cse", "chunk_loss")

    def apply(self, graph: StepGraph) -> StepGraph:
        from wholestep import _inductor_torch  # takes seconds

        known: dict[str, fx.Graph | None] = {}
        replacements: dict[fx.Node, fx.Node] = {}
        for node in graph.nodes:
            if not _has_tensors(node) or why_not(node) or _torch.packet_name(node.target).startswith("empty"):
                continue
            if not _inductor_torch.has_decomposition(node.target):
                continue
            key = signature_of(node)
            if key not in known:
                known[key] = _decomposition(graph, node)
            found = known[key]
            if found is not None and found.find_nodes(op="get_attr"):
                node.meta[NOT_LOWERED] = "Inductor needs a constant for it"
            elif found is not None:
                replacements |= _inlined(graph, node, found)
        graph.replace(replacements)
        return graph


def _has_tensors(node: fx.Node) -> bool:
    """Whether a node is an op that makes tensors; sizes are what they are."""
    return ops.is_op(node) and isinstance(node.meta["val"], (torch.Tensor, list, tuple))


def _decomposition(graph: StepGraph, node: fx.Node) -> fx.Graph | None:
    """The graph that an op comes to, with its tensor and size arguments for inputs; None if it is the op itself."""
    from wholestep import _inductor_torch

    sources = node.all_input_nodes

    def call(*values: Any) -> Any:
        given = dict(zip(sources, values))
        args, kwargs = map_nodes((node.args, node.kwargs), given.__getitem__)
        return node.target(*args, **kwargs)  # pyright: ignore

    found = _inductor_torch.decomposed(graph.fake_mode, call, [source.meta["val"] for source in sources])
    calls = [item for item in found.nodes if item.op == "call_function"]
    return None if [item.target for item in calls] == [node.target] else found


def _inlined(graph: StepGraph, node: fx.Node, found: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Copy a decomposition in front of a node; returns who takes the place of the node, or of its items."""
    returned, made = insert_graph(graph, found, node.all_input_nodes, before=node)
    if isinstance(returned, fx.Node):
        replacements = {node: _own(graph, node, returned)}
    else:
        items = [user for user in node.users if user.target is operator.getitem]
        assert len(items) == len(node.users)
        replacements = {item: _own(graph, node, returned[item.args[1]]) for item in items}
    if made and "origins" in node.meta:
        made[-1].meta["origins"] = (*made[-1].meta.get("origins", ()), *node.meta["origins"])
    _keep_marks(node, made, set(replacements.values()))
    for old, new in replacements.items():
        keep_layout(old, new)
    return replacements


def insert_graph(
    graph: StepGraph, found: fx.Graph, inputs: Sequence[fx.Node], *, before: fx.Node
) -> tuple[Any, list[fx.Node]]:
    """Copy a small graph in front of a node, with its provenance; returns what it returns, and all new nodes."""
    env: dict[fx.Node, fx.Node] = dict(zip(found.find_nodes(op="placeholder"), inputs, strict=True))
    made: list[fx.Node] = []
    for item in found.nodes:
        if item.op == "call_function":
            args, kwargs = map_nodes((item.args, item.kwargs), env.__getitem__)
            env[item] = graph.insert(item.target, args, kwargs, like=before, before=before)
            made.append(env[item])
    return map_nodes(found.output_node().args[0], env.__getitem__), made


def keep_layout(old: fx.Node, new: fx.Node) -> None:
    """Give a node that takes the place of another the layout that views behind it were traced for."""
    if kind_of(new.meta["val"]) != kind_of(old.meta["val"]):
        new.meta["val"] = old.meta["val"]


def _own(graph: StepGraph, node: fx.Node, value: fx.Node) -> fx.Node:
    """A decomposition's result; a copy if it is an argument, whose memory the op itself would not have returned."""
    if value not in node.all_input_nodes or ops.shares_memory(node.target):
        return value
    return graph.insert(torch.ops.aten.clone.default, (value,), like=node, before=node)


def _keep_marks(node: fx.Node, made: Sequence[fx.Node], results: set[fx.Node]) -> None:
    """Marks for memory plans hold for all parts of an op, but what is to be saved are its results."""
    policy = node.meta.get("checkpoint_policy", "")
    for item in made:
        item.meta |= {key: node.meta[key] for key in ("checkpoint_region", "in_chunk") if key in node.meta}
        if policy and (item in results or not policy.endswith("_save")):
            item.meta["checkpoint_policy"] = policy
