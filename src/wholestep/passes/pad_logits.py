"""Give a loss head as many classes as suit the hardware.

A vocabulary of 50257 leaves every row of the logits at an odd address: matrix products are padded one by one, each with
a copy of its own, and kernels over rows cannot read several numbers at once. Here the weight is padded once, and the
head with its backward runs on the wider rows. Classes that do not exist have a logit of minus infinity: their
probability is zero, and so is their gradient, exactly.

    logits   = x @ pad(weight).T                        [rows, 50304]
    loss     = cross_entropy(where(class < 50257, logits, -inf), targets)
    d_logits = its gradient                             zero for classes from 50257 on
    d_x      = d_logits @ pad(weight)
    d_weight = (d_logits.T @ x)[:50257]
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import fx

from wholestep.errors import PassError
from wholestep.graph import StepGraph, map_nodes
from wholestep.passes.base import Pass, register
from wholestep.passes.chunk_loss_pattern import Head, find_heads, is_move, move_arguments

aten = torch.ops.aten

_SUM = aten.sum.dim_IntList
# Fewer classes are not worth a thought.
_MIN_CLASSES = 1024


@register
@dataclass(frozen=True)
class PadLogits(Pass):
    """Round the classes of each loss head with at least `min_classes` of them up to a multiple.

    ```
    t = aten.t(w)                                pad = aten.constant_pad_nd(w, [0, 0, 0, 47]); t = aten.t(pad)
    mm = aten.mm(x, t)                    ->     mm = aten.mm(x, t)
    _log_softmax = ...(mm, 1, False)             where = aten.where(lt, mm, -inf); _log_softmax = ...(where, 1, False)
    ```
    """

    name: ClassVar[str] = "pad_logits"
    after: ClassVar[tuple[str, ...]] = ("simplify", "cse")
    multiple: int = 64
    min_classes: int = _MIN_CLASSES

    def apply(self, graph: StepGraph) -> StepGraph:
        if self.multiple < 2:
            raise PassError(f"pad_logits: multiple is a number, 2 or more, not {self.multiple}")
        for head in find_heads(graph)[0]:
            classes = head.linear.meta["val"].shape[1]
            if isinstance(classes, int) and classes >= self.min_classes and not _is_bound(head, classes):
                extra = -classes % self.multiple
                if extra:
                    _Padding(graph, head, classes, extra).run()
                    graph.eliminate_dead_code()
        return graph


def _is_bound(head: Head, classes: int) -> bool:
    """Whether something else has a number for each class, or is computed from all of them."""
    if any(node.target is _SUM and node.args[1] != [0] for node in head.exits):
        return True
    own = {*head.wide, *_products(head)}
    others = [source for node in own if node not in _products(head) for source in node.all_input_nodes]
    shapes = [tuple(source.meta["val"].shape) for source in others if source not in own and _is_tensor(source)]
    return any(shape and shape[-1] == classes for shape in shapes)


def _products(head: Head) -> list[fx.Node]:
    return [head.linear, *(node for node in head.exits if node.target is aten.mm.default)]


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


@dataclass
class _Padding:
    """One head, written again with `extra` more classes."""

    graph: StepGraph
    head: Head
    classes: int
    extra: int
    copies: dict[fx.Node, fx.Node] = field(default_factory=dict)
    _padded: dict[tuple[fx.Node, int], fx.Node] = field(default_factory=dict)

    def run(self) -> None:
        replacements: dict[fx.Node, fx.Node] = {}
        for node in sorted([*self.head.wide, *self.head.exits]):
            if node in self.head.exits:
                replacements[node] = self._exit(node)
            else:
                self.copies[node] = self._wide(node)
        logits = self.copies[self.head.linear]
        replacements |= {node: self._call(node, aten.sym_size.int, logits, 0) for node in self.head.sizes}
        self.graph.replace(replacements)

    def _call(self, node: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A new call where a node of the old head stands."""
        return self.graph.insert(target, args, kwargs, like=node, before=node)

    def _mapped(self, node: fx.Node) -> tuple[Any, dict[str, Any]]:
        return map_nodes((node.args, node.kwargs), lambda source: self.copies.get(source, source))

    def _wide(self, node: fx.Node) -> fx.Node:
        args, kwargs = self._mapped(node)
        if node is self.head.linear:
            *bias, activation, weight = args
            bias = [self._pad(node, item, 0) for item in bias]
            return self._call(node, node.target, *bias, activation, self._pad(node, weight, 1))
        if is_move(node):
            return self._call(node, node.target, args[0], *move_arguments(node, self.classes + self.extra), **kwargs)
        if node.target is aten._log_softmax.default:
            args = (self._without_extra(node, args[0]), *args[1:])
        return self._call(node, node.target, *args, **kwargs)

    def _exit(self, node: fx.Node) -> fx.Node:
        args, kwargs = self._mapped(node)
        if node.target is not aten.mm.default:
            made = self._call(node, node.target, *args, **kwargs)
            return self._cut(node, made, made.meta["val"].dim() - 1) if node.target is _SUM else made
        left, right = node.args
        if right in self.copies:  # mm(t(x), d), the gradient of a weight
            return self._cut(node, self._call(node, node.target, *args), 1)
        assert isinstance(left, fx.Node)
        if left.target is aten.t.default:  # mm(t(d), x), too
            return self._cut(node, self._call(node, node.target, *args), 0)
        assert isinstance(right, fx.Node)
        return self._call(node, node.target, args[0], self._pad(node, right, 0))

    def _cut(self, node: fx.Node, value: fx.Node, dim: int) -> fx.Node:
        cut = self._call(node, aten.slice.Tensor, value, dim, 0, self.classes)
        return cut if dim == 0 else self._call(node, aten.clone.default, cut, memory_format=torch.contiguous_format)

    def _pad(self, place: fx.Node, value: fx.Node, dim: int) -> fx.Node:
        """A tensor with zeros behind a dimension; a transposed one is the padded one transposed."""
        if value.target is aten.t.default:
            source = value.args[0]
            assert isinstance(source, fx.Node)
            return self._call(place, aten.t.default, self._pad(place, source, 1 - dim))
        if (value, dim) not in self._padded:
            behind = [0, 0] * (value.meta["val"].dim() - 1 - dim)
            self._padded[value, dim] = self._call(place, aten.constant_pad_nd.default, value, [*behind, 0, self.extra])
        return self._padded[value, dim]

    def _without_extra(self, node: fx.Node, logits: fx.Node) -> fx.Node:
        """Logits of minus infinity for the classes that do not exist."""
        value = logits.meta["val"]
        numbers = self._call(
            node, aten.arange.default, self.classes + self.extra, device=value.device, pin_memory=False
        )
        exists = self._call(node, aten.lt.Scalar, numbers, self.classes)
        never = self._call(
            node, aten.full.default, [], -torch.inf, dtype=value.dtype, device=value.device, pin_memory=False
        )
        return self._call(node, aten.where.self, exists, logits, never)
