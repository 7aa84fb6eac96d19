"""Put a run of nodes into a graph of its own, and one call in its place.

```
mm = aten.mm(x, w)                                    forward = regions.forward([x, w])
relu = aten.relu(mm)                           ->     relu = forward[0]
t = aten.t(relu)                                      t = aten.t(relu)
mm_1 = aten.mm(grad, t)                               mm_1 = aten.mm(grad, t)
```

Only tensors come out, each with memory of its own: views and sizes that others want are taken anew behind the call.
Every symbol in a region's sizes is an input of its own: what Inductor's cache knows about a region is in those terms,
not in those of the sizes of tensors.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from wholestep import _torch
from wholestep.graph import StepGraph, map_nodes, ops
from wholestep.lower.region import Region

_SYM_SIZE = torch.ops.aten.sym_size.int


def outline(graph: StepGraph, nodes: Sequence[fx.Node], name: str) -> Region:
    """Replace nodes that stand in a row by a call of a region made of them; returns the region."""
    inside = set(nodes)
    anchor = nodes[-1].next
    inputs = list(dict.fromkeys(source for node in nodes for source in node.all_input_nodes if source not in inside))
    inputs += _missing_sizes(graph, nodes, inputs)
    wanted = _wanted_outside(nodes, inside)
    exported = [node for node in wanted if not _is_taken_anew(node)]
    region = Region(name, _module(nodes, inputs, exported), graph.fake_mode)
    with graph.graph.inserting_before(anchor):
        call = graph.graph.create_node("call_function", region, (inputs,), name=name)
    call.meta |= {"val": tuple(node.meta["val"] for node in exported), "phase": nodes[0].meta["phase"], "fqn": ""}
    outer: dict[fx.Node, fx.Node] = {}
    for index, node in enumerate(exported):
        with graph.graph.inserting_before(anchor):
            outer[node] = graph.graph.call_function(operator.getitem, (call, index))
        outer[node].meta = dict(node.meta)
    for node in wanted:
        if node not in outer:
            with graph.graph.inserting_before(anchor):
                outer[node] = graph.graph.node_copy(node, lambda source: outer.get(source, source))
    for node, new in outer.items():
        node.replace_all_uses_with(new, delete_user_cb=lambda user: user not in inside)
    for node in reversed(nodes):
        graph.graph.erase_node(node)
    return region


def _missing_sizes(graph: StepGraph, nodes: Sequence[fx.Node], inputs: Sequence[fx.Node]) -> list[fx.Node]:
    """Where to read the symbols that occur in values of nodes and are no input themselves."""
    given = {_torch.expression(node.meta["val"]) for node in inputs if isinstance(node.meta["val"], torch.SymInt)}
    used: dict[Any, None] = {}
    for size in (size for node in (*inputs, *nodes) for size in _sizes(node.meta["val"])):
        used |= dict.fromkeys(sorted(_torch.expression(size).free_symbols, key=str))
    found = (_size_node(graph, symbol, nodes[0]) for symbol in used if symbol not in given)
    return [node for node in found if node is not None]


def _size_node(graph: StepGraph, symbol: Any, start: fx.Node) -> fx.Node | None:
    """A node before `start` whose value is a symbol: an input, or a size of one; None if no input tells it."""
    for node in graph.graph.find_nodes(op="placeholder"):
        value = node.meta["val"]
        if isinstance(value, torch.SymInt) and _torch.expression(value) == symbol:
            return node
        sizes = [_torch.expression(size) for size in value.shape] if isinstance(value, torch.Tensor) else []
        if symbol in sizes:
            return _read_size(graph, node, sizes.index(symbol), start)
    return None


def _read_size(graph: StepGraph, node: fx.Node, dim: int, start: fx.Node) -> fx.Node:
    """A size of an input, read in front of everything: the input may be gone where a backward begins."""
    calls = list(graph.calls())
    for known in itertools.takewhile(lambda call: call.target is _SYM_SIZE and call is not start, calls):
        if known.args == (node, dim):
            return known
    return graph.insert(_SYM_SIZE, (node, dim), like=calls[0], before=calls[0])


def _sizes(value: Any) -> Iterator[Any]:
    """Whatever a value tells about sizes, if it is a symbol."""
    if isinstance(value, torch.Tensor):
        for size in (*value.shape, *value.stride(), value.storage_offset()):
            yield from _sizes(size)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _sizes(item)
    elif isinstance(value, torch.SymInt):
        yield value


def _wanted_outside(nodes: Sequence[fx.Node], inside: set[fx.Node]) -> list[fx.Node]:
    """Nodes that others read, and what those of them that are taken anew are made of, in order."""
    wanted = {node for node in nodes if any(user not in inside for user in node.users)}
    for node in reversed(nodes):
        if node in wanted and _is_taken_anew(node):
            wanted |= {source for source in node.all_input_nodes if source in inside}
    return [node for node in nodes if node in wanted]


def _is_taken_anew(node: fx.Node) -> bool:
    """Views, sizes and what is computed from sizes: no work, and no tensors with memory of their own."""
    if not isinstance(node.meta["val"], torch.Tensor):
        return True
    source = node.args[0] if node.target is operator.getitem else node  # pieces of a split are views as well
    return isinstance(source, fx.Node) and ops.is_op(source) and ops.shares_memory(source.target)


def _module(nodes: Sequence[fx.Node], inputs: Sequence[fx.Node], exported: Sequence[fx.Node]) -> fx.GraphModule:
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        env[node] = graph.placeholder(node.name)
        env[node].meta["val"] = node.meta["val"]
    for node in nodes:
        env[node] = graph.node_copy(node, env.__getitem__)
    graph.output(tuple(map_nodes(list(exported), env.__getitem__)))
    return _torch.graph_module(torch.nn.Module(), graph)
