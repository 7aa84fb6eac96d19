"""GELU's hyperbolic tangent without the tangent.

Where only `1 + tanh(u)` and `1 - tanh(u)²` are wanted, an exponential will do:

    e = exp(-2u),  s = 1 / (1 + e):     1 + tanh(u) = 2 s,     1 - tanh(u)² = 4 e s²

On the CPU a vectorised tangent costs three times as much, and in a small language model no kernel but those of matrix
products takes longer than GELU's. Digits are won rather than lost: `1 + tanh(u)` cancels where the tangent is near -1.
A tangent that is wanted by itself stays: near zero it has digits that `2 s - 1` has not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

aten = torch.ops.aten
# Types that have room for exp(_LARGEST). Beyond it `s` is next to nothing in any case, and `e` must not overflow.
_DTYPES = (torch.float32, torch.float64)
_LARGEST = 80.0


def replace_tanh(graph: fx.Graph) -> None:
    """Rewrite every tangent on the CPU that nobody wants for itself."""
    for node in graph.find_nodes(op="call_function", target=aten.tanh.default):
        value = node.meta["val"]
        if value.device.type != "cpu" or value.dtype not in _DTYPES:
            continue
        sums = [user for user in node.users if _is_call(user, aten.add.Tensor, (node, 1), (1, node))]
        squares = [user for user in node.users if _is_call(user, aten.mul.Tensor, (node, node))]
        rests = [user for square in squares for user in square.users]
        are_rests = all(_is_rest(user, square) for square in squares for user in square.users)
        if len(sums) + len(squares) == len(node.users) and are_rests:
            _replace(graph, node, sums, rests)
            for unused in (*rests, *squares, *sums, node):
                graph.erase_node(unused)


def _is_call(node: fx.Node, target: object, *allowed: tuple[object, ...]) -> bool:
    return node.target is target and not node.kwargs and node.args in allowed


def _is_rest(node: fx.Node, square: fx.Node) -> bool:
    return _is_call(node, aten.sub.Tensor, (1, square)) or _is_call(node, aten.rsub.Scalar, (square, 1))


def _replace(graph: fx.Graph, node: fx.Node, sums: list[fx.Node], rests: list[fx.Node]) -> None:
    """Give the readers of `1 + tanh(u)` and of `1 - tanh(u)²` something else to read."""

    def call(target: Any, *args: Any) -> fx.Node:
        made = graph.call_function(target, args)
        made.meta = dict(node.meta)
        return made

    with graph.inserting_before(node):
        power = call(aten.clamp_max.default, call(aten.mul.Tensor, node.args[0], -2), _LARGEST)
        exponential = call(aten.exp.default, power)
        share = call(aten.reciprocal.default, call(aten.add.Tensor, exponential, 1))
        twice = call(aten.mul.Tensor, share, 2)
        for item in sums:
            item.replace_all_uses_with(twice)
        for item in rests:
            item.replace_all_uses_with(call(aten.mul.Tensor, call(aten.mul.Tensor, exponential, twice), twice))
