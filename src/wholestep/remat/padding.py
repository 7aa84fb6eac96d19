"""One padded copy of a matrix where a compiler asks for two, one of them transposed.

Inductor pads matrices whose sizes do not suit the hardware. The gradient of a linear layer's output is an argument of
two products, in one of them transposed, and is padded for each:

```
a = constant_pad_nd(x, [0, 7, 0, 0])                    a = constant_pad_nd(x, [0, 7, 0, 0])
t = permute(x, [1, 0])                           ->     b = permute(a, [1, 0])
b = constant_pad_nd(t, [0, 0, 0, 7])
```

With a large vocabulary `x` is the gradient of the logits, and the second copy is the peak of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from wholestep import _torch
from wholestep.graph import ops

_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm")


def share_paddings(module: fx.GraphModule) -> int:
    """Make transposed paddings transposes of the plain ones, in place; returns how many.

    Only products may read them: they take matrices in any layout.
    """
    graph = module.graph
    position = {node: index for index, node in enumerate(graph.nodes)}
    plain = {key: node for node in reversed(graph.nodes) if (key := _padding(node)) is not None}
    num_shared = 0
    for node in list(graph.nodes):
        key = _transposed_padding(node)
        twin = None if key is None else plain.get(key)
        if key is None or twin is None or not all(_is_product(user) for user in node.users):
            continue
        if position[node] < position[twin]:
            node.prepend(twin)
            position[twin] = position[node]
        _replace_by_transposed(graph, node, twin)
        num_shared += 1
    if num_shared:
        module.recompile()
    return num_shared


def _replace_by_transposed(graph: fx.Graph, node: fx.Node, twin: fx.Node) -> None:
    permuted = node.args[0]
    assert isinstance(permuted, fx.Node)
    target: Any = permuted.target
    with graph.inserting_before(node):
        shared = graph.call_function(target, (twin, permuted.args[1]))
    shared.meta = dict(node.meta)
    with _torch.fake_mode_of(twin.meta["val"]):
        shared.meta["val"] = target(twin.meta["val"], permuted.args[1])
    node.replace_all_uses_with(shared)
    graph.erase_node(node)


def _padding(node: fx.Node) -> tuple[fx.Node, tuple[Any, ...]] | None:
    """What a node pads with zeros, and by how much at both ends of each dimension, first dimension first."""
    if not ops.is_op(node) or _torch.packet_name(node.target) != "constant_pad_nd":
        return None
    source, amounts, *value = node.args
    if not isinstance(source, fx.Node) or any(value) or node.kwargs:
        return None
    assert isinstance(amounts, Sequence)
    pairs = list(zip(amounts[::2], amounts[1::2]))[::-1]
    pairs = [(0, 0)] * (source.meta["val"].dim() - len(pairs)) + pairs
    return source, tuple(pairs)


def _transposed_padding(node: fx.Node) -> tuple[fx.Node, tuple[Any, ...]] | None:
    """The same for the padding of a permuted tensor, in terms of the tensor."""
    found = _padding(node)
    if found is None or not ops.is_op(found[0]) or _torch.packet_name(found[0].target) != "permute":
        return None
    source, order = found[0].args
    assert isinstance(source, fx.Node)
    assert isinstance(order, Sequence)
    pairs: list[Any] = [None] * len(order)
    for dimension, pair in zip(order, found[1]):
        assert isinstance(dimension, int)
        pairs[dimension] = pair
    return source, tuple(pairs)


def _is_product(node: fx.Node) -> bool:
    return ops.is_op(node) and _torch.packet_name(node.target) in _PRODUCTS
