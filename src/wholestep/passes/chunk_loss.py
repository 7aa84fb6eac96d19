"""Compute a loss head some rows at a time, so that all its logits are never there at once.

The graph is the whole step, so the gradient that will arrive at the loss is usually known before the loss is: it is
one, or one over the number of micro-batches, or a loss scale. Then forward and backward of a chunk of rows can stand
together. Logits of one chunk are made, used for the loss and for all gradients, and gone before the next chunk begins;
nothing is computed twice.

    loss, d_weight = 0, 0                                  number of targets that count: from the targets alone
    for rows in chunks:
        logits     = x[rows] @ weight
        loss      += cross_entropy(logits, targets[rows])
        d_logits   = its gradient
        d_weight  += d_logits.T @ x[rows]
        d_x[rows]  = d_logits @ weight.T

Sums over rows are added up in another order than in one piece; nothing else about the numbers changes. Half precision
sums are added up in float32.

*Phases.* All of a chunk is backward, its logits too: it runs once, and no part of it may be computed again. To the
planner of `remat` the forward ends in front of the head, and what reads the loss comes behind it.

*Gradients.* The weight's gradient is finished before the rest of the backward begins. Its parts are marked `in_chunk`:
`overlap` must not move them away, as they would hold the logits of their chunk.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import fx

from wholestep import _torch
from wholestep.errors import PassError
from wholestep.graph import LossHead, Phase, StepGraph, map_nodes
from wholestep.passes.base import Pass, register
from wholestep.passes.chunk_loss_pattern import (
    LOSS,
    Head,
    find_heads,
    is_move,
    is_shape_only,
    late_ancestors,
    loss_items,
    move_arguments,
    row_inputs,
)

aten = torch.ops.aten

_SUM = 2
_FILLS: dict[Any, int] = {aten.ones_like.default: 1, aten.zeros_like.default: 0}


@register
@dataclass(frozen=True)
class ChunkLoss(Pass):
    """Run each loss head in `chunks` parts; what is no head that can be chunked stays as it is.

    ```
    mm = aten.mm(x, w)                                       part = x[0:40]; mm = aten.mm(part, w); ...
    _log_softmax = aten._log_softmax(mm, 1, False)      ->   part_1 = x[40:80]; mm_1 = aten.mm(part_1, w); ...
    nll_loss_forward = ...                                   loss = (nll[0] + nll_1[0]) / count
    ```
    """

    name: ClassVar[str] = "chunk_loss"
    after: ClassVar[tuple[str, ...]] = ("simplify", "cse")
    chunks: int = 2

    def apply(self, graph: StepGraph) -> StepGraph:
        if self.chunks < 2:
            raise PassError(f"chunk_loss: chunks is a number of chunks, 2 or more, not {self.chunks}")
        while heads := find_heads(graph)[0]:  # anew each time: two heads may be in each other's way
            _Chunking(graph, heads[0], self.chunks).run()
            graph.eliminate_dead_code()
        return graph


def mark_logits(graph: StepGraph) -> tuple[list[LossHead], list[str]]:
    """Note on logits whose they are; returns heads that can be chunked, and why other losses have none."""
    heads, reasons = find_heads(graph)
    descriptions = [_described(head, 1) for head in heads]
    for head, description in zip(heads, descriptions):
        for node in head.wide:
            node.meta["loss_head"] = description
    return descriptions, reasons


def _described(head: Head, num_chunks: int) -> LossHead:
    return LossHead(head.linear.name, head.source, num_chunks, head.useful_chunks)


@dataclass
class _Chunking:
    """One head, rewritten in front of its first exit.

    Of an exit, chunks so far have left a sum over rows (`sums`) or some rows each (`rows`).
    """

    graph: StepGraph
    head: Head
    num_chunks: int
    sums: dict[fx.Node, fx.Node] = field(default_factory=dict)
    rows: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)

    def run(self) -> None:
        self._raise_inputs()
        self.description = _described(self.head, self.num_chunks)
        self.activation = self._moved(self.head.activation, self.head.enter)
        self.num_targets = self._count_targets()
        for start, end in self._bounds():
            self._chunk(start, end)
        replacements: dict[fx.Node, fx.Node] = {}
        for node in self.head.exits:
            if node is self.head.loss:
                items = loss_items(node)
                replacements |= {
                    item: self._loss() if index == 0 else self.num_targets for index, item in items.items()
                }
            elif node in self.sums:
                replacements |= self._finished_sum(node)
            else:
                replacements[node] = self._joined(node)
        self.graph.replace(replacements)

    def _call(self, target: Any, args: tuple[Any, ...], like: fx.Node, **kwargs: Any) -> fx.Node:
        node = self.graph.insert(target, args, kwargs, like=like, before=self.head.exits[0], phase=Phase.BACKWARD)
        node.meta["in_chunk"] = True
        node.meta.pop("loss_head", None)  # not everything that is like logits is logits
        return node

    def _raise_inputs(self) -> None:
        """Bring what the head reads in front of it: neither sizes nor the gradient of the loss wait for the loss."""
        head, replacements = self.head, dict[fx.Node, fx.Node]()
        for node in head.sizes:
            size = self.graph.insert(aten.sym_size.int, (head.activation, 0), like=node, before=node)
            replacements[node] = size
        self.graph.replace(replacements)
        replacements.clear()
        for node in late_ancestors(head):
            if is_shape_only(node):
                value = node.meta["val"]
                fill = _FILLS.get(node.target, node.args[-1])
                options = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
                replacements[node] = self._call(aten.full.default, ([], fill), node, **options)
            else:
                head.exits[0].prepend(node)
        self.graph.replace(replacements)

    def _count_targets(self) -> fx.Node:
        loss = self.head.loss
        _, targets, _, _, ignored = loss.args
        counts = self._call(aten.ne.Scalar, (targets, ignored), loss)
        count = self._call(aten.sum.default, (counts,), loss)
        return self._call(aten._to_copy.default, (count,), loss, dtype=loss.meta["val"][1].dtype)

    def _bounds(self) -> list[tuple[Any, Any]]:
        """First and last row of each chunk: numbers, or nodes that compute them from a symbolic size."""
        size = self.activation.meta["val"].shape[0]
        if not isinstance(size, torch.SymInt):
            num_chunks = min(self.num_chunks, size)
            borders = [index * size // num_chunks for index in range(num_chunks + 1)]
            return list(itertools.pairwise(borders))
        like = self.head.loss
        last = self._call(aten.sym_size.int, (self.activation, 0), like)
        inner = [
            self._call(operator.floordiv, (self._call(operator.mul, (last, index), like), self.num_chunks), like)
            for index in range(1, self.num_chunks)
        ]
        return list(zip([0, *inner], [*inner, last]))

    def _chunk(self, start: Any, end: Any) -> None:
        """One chunk's copy of all wide ops, and its part of every exit."""
        head = self.head
        activation = self._call(aten.slice.Tensor, (self.activation, 0, start, end), head.exits[0])
        copies = {head.activation: activation}
        items = loss_items(head.loss)
        copies |= {items[1]: self.num_targets} if 1 in items else {}
        for node in sorted([*head.wide, *head.exits]):
            for source in row_inputs(node, head):
                if source not in copies:
                    copies[source] = self._call(aten.slice.Tensor, (source, 0, start, end), head.exits[0])
            for source in node.all_input_nodes:
                if source.target is aten.t.default and source.args[0] is head.activation:
                    copies[source] = self._call(aten.t.default, (activation,), source)
            args, kwargs = map_nodes((node.args, node.kwargs), lambda source: copies.get(source, source))
            if node in head.exits:
                self._add_part(node, args)
            elif is_move(node):
                copies[node] = args[0]
            else:
                copies[node] = self._call(node.target, args, node, **kwargs)
                copies[node].meta["loss_head"] = self.description

    def _add_part(self, node: fx.Node, args: tuple[Any, ...]) -> None:
        if node.target is LOSS:
            log_probabilities, targets, weight, _, ignored = args
            both = self._call(LOSS, (log_probabilities, targets, weight, _SUM, ignored), node)
            self._add_to_sum(node, self._call(operator.getitem, (both, 0), node))
        elif node.target is aten.sum.dim_IntList and args[1] == [0]:
            self._add_to_sum(node, self._call(node.target, args, node))
        elif node.target is aten.mm.default and self._is_sum_over_rows(node):
            if node in self.sums and not _is_half(node.meta["val"].dtype):
                self.sums[node] = self._call(aten.addmm.default, (self.sums[node], *args), node)
            else:
                self._add_to_sum(node, self._call(node.target, args, node))
        else:
            self.rows.setdefault(node, []).append(self._call(node.target, args, node))

    def _is_sum_over_rows(self, product: fx.Node) -> bool:
        """Whether a product is the gradient of the weight, not that of the activation."""
        return product.args[0] not in self.head.wide or product.args[0].target is aten.t.default  # pyright: ignore

    def _add_to_sum(self, node: fx.Node, part: fx.Node) -> None:
        if node in self.sums:
            self.sums[node] = self._call(aten.add.Tensor, (self.sums[node], part), node)
        elif _is_half(part.meta["val"].dtype):
            self.sums[node] = self._call(aten._to_copy.default, (part,), node, dtype=torch.float32)
        else:
            self.sums[node] = part

    def _loss(self) -> fx.Node:
        loss = self.head.loss
        total = self.sums[loss]
        if loss.args[3] != _SUM:
            total = self._call(aten.div.Tensor, (total, self.num_targets), loss)
        return self._as_dtype(total, loss.meta["val"][0].dtype, loss)

    def _finished_sum(self, node: fx.Node) -> dict[fx.Node, fx.Node]:
        """A sum in place of the exit; one that was cast to the sum's own dtype in place of the cast."""
        total, users = self.sums[node], list(node.users)
        dtype = total.meta["val"].dtype
        is_cast = len(users) == 1 and users[0].target is aten._to_copy.default
        if is_cast and dtype != node.meta["val"].dtype and users[0].meta["val"].dtype == dtype:
            return {users[0]: total}
        return {node: self._as_dtype(total, node.meta["val"].dtype, node)}

    def _as_dtype(self, value: fx.Node, dtype: torch.dtype, like: fx.Node) -> fx.Node:
        if value.meta["val"].dtype == dtype:
            return value
        return self._call(aten._to_copy.default, (value,), like, dtype=dtype)

    def _joined(self, node: fx.Node) -> fx.Node:
        """The parts of a value that has rows; the gradient of the activation in the activation's own order."""
        joined = self._call(aten.cat.default, (self.rows[node],), node)
        return self._moved(joined, self.head.leave) if node.target is aten.mm.default else joined

    def _moved(self, value: fx.Node, moves: Sequence[fx.Node]) -> fx.Node:
        """A narrow value with its rows moved like those of the logits."""
        width = value.meta["val"].shape[-1]
        for move in moves:
            if _torch.packet_name(move.target) in ("view", "_unsafe_view") and not value.meta["val"].is_contiguous():
                value = self._call(aten.clone.default, (value,), move, memory_format=torch.contiguous_format)
            value = self._call(move.target, (value, *move_arguments(move, width)), move, **move.kwargs)
        return value


def _is_half(dtype: torch.dtype) -> bool:
    return dtype in (torch.float16, torch.bfloat16)
