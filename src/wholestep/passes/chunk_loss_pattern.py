"""Finding loss heads: the last linear layer, the cross entropy behind it, and the backward of both.

A value is *wide* if it has a row of classes for each row of the activation: logits, their casts, log-probabilities, the
gradients of all these. A head is the linear layer with all wide values that come of it, and the *exits*: ops that read
wide values and make narrow ones.

    activation ── linear ── [casts, moves of rows] ── log_softmax ── nll_loss            exits: the loss
                                                           └─ nll_backward ── log_softmax_backward ── [...]
                                                                    exits: gradients of weight, bias, activation

Wide ops must treat each row by itself, so that they can run on some of the rows. Ops that only move rows (views, the
shift of a causal language model) are followed on row numbers: every op is known to see the same row in all its
arguments, and the gradient of the weight to meet each row with the activation that it came from.

Inputs of a head must be there before the loss is. Of the gradient that arrives at the loss this is true as long as it
does not depend on the loss's own value.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from wholestep import _sizes_torch, _torch
from wholestep.graph import StepGraph, map_nodes, ops

aten = torch.ops.aten

LOSS = aten.nll_loss_forward.default
_LOSS_BACKWARD = aten.nll_loss_backward.default
_ROW_BY_ROW = frozenset(
    {aten._log_softmax.default, aten._log_softmax_backward_data.default, _LOSS_BACKWARD, aten._to_copy.default}
)
_KEEPING_ZEROS = frozenset({aten._to_copy.default})
_LINEAR = frozenset({aten.mm.default, aten.addmm.default})
_VIEWS = frozenset({aten.view.default, aten._unsafe_view.default})
_SAME = frozenset({aten.clone.default, aten.detach.default, aten.alias.default})
_SLICES = frozenset({aten.slice.Tensor, aten.slice_backward.default})
_PERMUTING = frozenset({aten.transpose.int, aten.permute.default})
_MOVES = _VIEWS | _SAME | _SLICES | _PERMUTING
_SHAPE_ONLY = frozenset({aten.ones_like.default, aten.zeros_like.default, aten.full_like.default})
_MEAN, _SUM = 1, 2
_DROPPED = -1
_MAX_USEFUL = 64


class _NoHead(Exception):
    """Why a loss has no head that can be chunked."""


@dataclass(frozen=True, eq=False)
class Head:
    """A head that can run on some rows at a time; all nodes in graph order.

    `enter` moves rows from the activation's order to the loss's, `leave` moves them back: ops to be repeated on
    narrow values; empty where the order is the same. `sizes` ask the logits for the number of their rows.
    """

    linear: fx.Node
    loss: fx.Node
    wide: tuple[fx.Node, ...]
    exits: tuple[fx.Node, ...]
    enter: tuple[fx.Node, ...]
    leave: tuple[fx.Node, ...]
    sizes: tuple[fx.Node, ...]

    @property
    def activation(self) -> fx.Node:
        return _operands(self.linear)[0]

    @property
    def num_rows(self) -> int:
        """Rows that the loss sees (at the size seen while tracing)."""
        return _torch.optimization_hint(self.log_probabilities.meta["val"].shape[0])

    @property
    def log_probabilities(self) -> fx.Node:
        assert isinstance(self.loss.args[0], fx.Node)
        return self.loss.args[0]

    @property
    def source(self) -> str:
        return self.linear.meta.get("source", "")

    def inputs(self) -> list[fx.Node]:
        """What the head reads, without what it makes itself."""
        own = {*self.wide, *self.exits, *loss_items(self.loss).values()}
        read = (source for node in (*self.wide, *self.exits) for source in node.all_input_nodes)
        return [node for node in dict.fromkeys(read) if node not in own]

    @property
    def useful_chunks(self) -> int:
        """The fewest chunks of which each has no more bytes of logits than the head needs besides."""
        besides = sum(_num_bytes(node) for node in (self.activation, *self.exits) if node is not self.loss)
        chunks = -(-self.peak_wide_bytes // max(besides, 1))
        return max(1, min(chunks, self.num_rows, _MAX_USEFUL))

    @property
    def peak_wide_bytes(self) -> int:
        """The most bytes of wide values that are alive at once."""
        order = sorted([*self.wide, *self.exits])
        owner: dict[fx.Node, fx.Node] = {}
        last: dict[fx.Node, int] = {}
        for position, node in enumerate(order):
            read = [owner[source] for source in node.all_input_nodes if source in owner]
            if node in self.wide:
                owner[node] = read[0] if ops.is_view(node.target) and read else node
            last |= dict.fromkeys([*read, *([owner[node]] if node in owner else [])], position)
        live = [
            sum(_num_bytes(value) for value in last if order.index(value) <= position <= last[value])
            for position in range(len(order))
        ]
        return max(live)


def find_heads(graph: StepGraph) -> tuple[list[Head], list[str]]:
    """Heads of a functional graph that can be chunked (and are not yet), and for each loss that has none the reason."""
    heads: list[Head] = []
    reasons: list[str] = []
    for node in graph.calls():
        if node.meta.get("in_chunk"):
            continue
        if node.target is aten.nll_loss2d_forward.default:
            reasons.append(f"{_place(node)} has its classes in dimension 1; put them last and flatten the rest")
        if node.target is not LOSS:
            continue
        try:
            heads.append(_Finder(graph, node).head())
        except _NoHead as reason:
            reasons.append(str(reason))
    if not heads and not reasons:
        reasons.append("there is no cross entropy of class indices in this step")
    return heads, reasons


def loss_items(loss: fx.Node) -> dict[int, fx.Node]:
    """`getitem`s of a loss: 0 is its value, 1 the number of targets that count."""
    return {index: user for user in loss.users if (index := ops.getitem_index(user)) is not None}


def row_inputs(node: fx.Node, head: Head) -> list[fx.Node]:
    """Of what a wide op or the loss reads from outside the head: that which has something for each row."""
    if node.target in (LOSS, _LOSS_BACKWARD):
        return [node.args[1 if node.target is LOSS else 2]]  # pyright: ignore[reportReturnType]
    if node is head.linear or not _is_row_by_row(node):
        return []
    rows = _torch.expression(head.log_probabilities.meta["val"].shape[0])
    outside = [source for source in node.all_input_nodes if source not in head.wide]
    return [source for source in outside if len(_shape(source)) == 2 and _shape(source)[0] == rows]


def is_move(node: fx.Node) -> bool:
    """Whether an op only moves whole rows."""
    return node.target in _MOVES


def is_shape_only(node: fx.Node) -> bool:
    """Whether a number does not depend on what it is computed from: the gradient of a loss begins with `ones_like`."""
    return node.target in _SHAPE_ONLY and node.meta["val"].dim() == 0


def late_ancestors(head: Head) -> list[fx.Node]:
    """What a head's inputs are computed from (themselves included) and that stands behind its first exit, in order."""
    found: set[fx.Node] = set()
    pending = head.inputs()
    while pending:
        node = pending.pop()
        if node not in found and node.op == "call_function" and node > head.exits[0]:
            found.add(node)
            pending += () if is_shape_only(node) else node.all_input_nodes
    return sorted(found)


def move_arguments(node: fx.Node, width: int) -> tuple[Any, ...]:
    """Arguments of a move behind its first, for rows of another width."""
    rest = node.args[1:]
    if node.target in _VIEWS or node.target is aten.slice_backward.default:
        sizes: Any = rest[0]
        return ([*sizes[:-1], width], *rest[1:])
    return rest


def _operands(linear: fx.Node) -> tuple[fx.Node, fx.Node]:
    """The activation and the weight of a matrix product."""
    activation, weight = linear.args[-2:]
    assert isinstance(activation, fx.Node)
    assert isinstance(weight, fx.Node)
    return activation, weight


def _num_bytes(node: fx.Node) -> int:
    value = node.meta["val"]
    return _torch.optimization_hint(value.numel()) * value.element_size()


def _place(node: fx.Node) -> str:
    return f"{node.name} ({node.meta.get('source', 'no source')})"


@dataclass
class _Finder:
    """Collects the head of one loss; `rows[node]` are the numbers of the rows that a wide value holds."""

    graph: StepGraph
    loss: fx.Node
    rows: dict[fx.Node, torch.Tensor] = field(default_factory=dict)
    exits: list[fx.Node] = field(default_factory=list)
    sizes: list[fx.Node] = field(default_factory=list)
    _transposed: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def head(self) -> Head:
        self._check_loss()
        path = self._path()
        self.linear = path[-1]
        self._collect()
        self._check_exits()
        enter = tuple(node for node in reversed(path) if is_move(node))
        head = Head(
            self.linear,
            self.loss,
            tuple(sorted({*self.rows, *self._transposed})),
            tuple(self.exits),
            () if torch.equal(self.rows[self._log_probabilities], self.rows[self.linear]) else enter,
            self._leave(),
            tuple(self.sizes),
        )
        self._check_row_inputs(head)
        self._check_order(head)
        return head

    @property
    def _log_probabilities(self) -> fx.Node:
        return self.loss.args[0]  # pyright: ignore[reportReturnType]

    def _check_loss(self) -> None:
        _, _, weight, reduction, _ = self.loss.args
        if weight is not None:
            raise _NoHead(f"{_place(self.loss)} weights its classes")
        if reduction not in (_MEAN, _SUM):
            raise _NoHead(f"{_place(self.loss)} returns a loss for each row; reduce it by mean or sum")
        value = self._log_probabilities.meta["val"]
        if value.dim() != 2 or _torch.optimization_hint(value.shape[0]) < 2:
            raise _NoHead(f"{_place(self.loss)} has a single row")
        if _sizes_torch.depends_on_values(value):
            raise _NoHead(f"{_place(self.loss)} has a number of rows that depends on values")

    def _path(self) -> list[fx.Node]:
        """From the log-probabilities up to the linear layer."""
        path = [self._log_probabilities]
        while path[-1].target is aten._to_copy.default:  # autocast takes the loss in float32
            path += path[-1].all_input_nodes
        if path[-1].target is not aten._log_softmax.default or path[-1].args[1] not in (1, -1):
            raise _NoHead(f"{_place(self.loss)} is not taken of a log_softmax over the last dimension")
        while path[-1].target not in _LINEAR:
            node = path[-1]
            sources = [source for source in node.all_input_nodes if _is_wide_as(source, _shape(node)[-1])]
            if node.op != "call_function" or len(sources) != 1 or not (is_move(node) or _is_row_by_row(node)):
                raise _NoHead(f"what {_place(self.loss)} is taken of does not come from a linear layer: {_place(node)}")
            path.append(sources[0])
        linear = path[-1]
        bias = linear.args[0].meta["val"] if len(linear.args) == 3 else None  # pyright: ignore
        if linear.kwargs or (bias is not None and bias.dim() != 1):
            raise _NoHead(f"{_place(linear)} is more than a linear layer")
        return path

    def _collect(self) -> None:
        size = _torch.optimization_hint(self.linear.meta["val"].shape[0])
        self.rows[self.linear] = torch.arange(size)
        for node in self.graph.nodes:
            read = [source for source in node.all_input_nodes if source in self.rows or source in self._transposed]
            if read:
                self._add(node, read)

    def _add(self, node: fx.Node, read: list[fx.Node]) -> None:
        if node.op == "output":
            raise _NoHead(f"the step returns the logits, or something they are made into: {_place(read[0])}")
        if any(source in self._transposed for source in read) or node.target in _LINEAR:
            self._add_product(node, read)
        elif node.target is aten.t.default:
            self._transposed[node] = read[0]
        elif is_move(node):
            self.rows[node] = self._moved(node, read[0])
        elif node.target is LOSS or self._is_sum(node):
            if node.target is LOSS and node is not self.loss:
                raise _NoHead(f"the logits of {_place(self.loss)} have another loss, {_place(node)}")
            self.exits.append(node)
        elif node.target is aten.sym_size.int and node.args == (self.linear, 0):
            self.sizes.append(node)
        elif _is_row_by_row(node):
            self.rows[node] = self._common_rows(node, read)
        else:
            raise _NoHead(f"{_place(node)}, {node.target}, reads the logits too")

    def _is_sum(self, node: fx.Node) -> bool:
        """Over rows: the gradient of a bias. Over classes: what label smoothing needs."""
        return node.target is aten.sum.dim_IntList and node.args[1] in ([0], [1], [-1]) and not node.kwargs

    def _add_product(self, node: fx.Node, read: list[fx.Node]) -> None:
        """Gradients: `mm(d, w)` of the activation, `mm(t(d), x)` or `mm(t(x), d)` of the weight."""
        activation = _operands(self.linear)[0]
        left, right = _operands(node) if node.target is aten.mm.default else (None, None)
        is_own = (
            (left in self.rows and len(read) == 1)
            or (left in self._transposed and right is activation)
            or (
                right in self.rows and left is not None and left.target is aten.t.default and left.args[0] is activation
            )
        )
        if not is_own:
            raise _NoHead(f"{_place(node)}, {node.target}, reads the logits too")
        self.exits.append(node)

    def _moved(self, node: fx.Node, source: fx.Node) -> torch.Tensor:
        """Row numbers behind a move; the classes stand for a dimension of size 1."""
        if _shape(node)[-1] != _shape(source)[-1] or _touches_last(node, len(_shape(source)) - 1):
            raise _NoHead(f"{_place(node)}, {node.target}, does more to the logits than to move rows")
        arguments = map_nodes(move_arguments(node, 1), lambda size: _torch.optimization_hint(size.meta["val"]))
        arguments = _with_hints(arguments)
        numbers = self.rows[source].unsqueeze(-1) - _DROPPED
        if node.target in _VIEWS:
            moved = numbers.reshape(arguments[0])
        else:
            target: Any = node.target
            moved = target(numbers, *arguments)
        return moved.squeeze(-1) + _DROPPED

    def _common_rows(self, node: fx.Node, read: list[fx.Node]) -> torch.Tensor:
        rows = self.rows[read[0]]
        if any(not torch.equal(self.rows[source], rows) for source in read[1:]):
            raise _NoHead(f"{_place(node)}, {node.target}, joins different rows of the logits")
        if _shape(node) != _shape(read[0]):
            raise _NoHead(f"{_place(node)}, {node.target}, changes the shape of the logits")
        if bool((rows == _DROPPED).any()) and node.target not in _KEEPING_ZEROS:
            raise _NoHead(f"{_place(node)}, {node.target}, works on rows that the loss does not see")
        return rows

    def _check_exits(self) -> None:
        """Each row that the loss sees is in each gradient once, at its own place, and no other row is."""
        seen, place = self.rows[self._log_probabilities], self.rows[self.linear]
        in_place = torch.where(torch.isin(place, seen), place, _DROPPED)
        for node in self.exits:
            expected = seen if self._is_forward(node) else in_place
            if not torch.equal(self.rows[self._wide_source(node)], expected):
                raise _NoHead(f"{_place(node)}, {node.target}, does not have the rows of the loss in their order")

    @staticmethod
    def _is_forward(exit_: fx.Node) -> bool:
        return exit_.target is LOSS or (exit_.target is aten.sum.dim_IntList and exit_.args[1] != [0])

    def _wide_source(self, exit_: fx.Node) -> fx.Node:
        sources = [self._transposed.get(source, source) for source in exit_.all_input_nodes]
        return next(source for source in sources if source in self.rows)

    def _leave(self) -> tuple[fx.Node, ...]:
        """Moves from the loss's rows to those of the gradients."""
        seen = self.rows[self._log_probabilities]
        path = [self._wide_source(node) for node in self.exits if not self._is_forward(node)][:1]
        while path and not torch.equal(self.rows[path[-1]], seen):
            above = [source for source in path[-1].all_input_nodes if source in self.rows]
            if not above:
                raise _NoHead(f"{_place(path[-1])}, {path[-1].target}, is not the gradient of {_place(self.loss)}")
            path.append(above[0])
        return tuple(node for node in reversed(path[:-1]) if is_move(node))

    def _check_row_inputs(self, head: Head) -> None:
        """What wide ops read besides is there for all rows alike, or has the loss's rows."""
        seen = self.rows[self._log_probabilities]
        for node in head.wide:
            if node is self.linear or not _is_row_by_row(node):
                continue
            per_row = row_inputs(node, head)
            for source in node.all_input_nodes:
                is_for_all = len(_shape(source)) < 2 or _shape(source)[0] == 1
                fits = torch.equal(self.rows[node], seen) if source in per_row else is_for_all
                if source not in self.rows and not fits:
                    raise _NoHead(f"{_place(node)}, {node.target}, joins the logits with {_place(source)}")

    def _check_order(self, head: Head) -> None:
        """Inputs must not depend on what the head makes, other than by its shape, and be free to come first."""
        later = _downstream(self.exits)
        for node in head.inputs():
            if node in later:
                raise _NoHead(f"{_place(node)}, which the gradient of the loss needs, depends on the loss itself")
        for node in late_ancestors(head):
            if ops.has_effect(node):
                raise _NoHead(f"{_place(node)}, {node.target}, has to stay behind the loss")


def _downstream(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    pending = list(nodes)
    while pending:
        for user in pending.pop().users:
            if user not in found and (user.op == "output" or not is_shape_only(user)):
                found.add(user)
                pending.append(user)
    return found


def _is_row_by_row(node: fx.Node) -> bool:
    if not ops.is_op(node) or ops.has_effect(node) or not isinstance(node.meta["val"], torch.Tensor):
        return False
    return node.target in _ROW_BY_ROW or torch.Tag.pointwise in _torch.tags(node.target)


def _is_wide_as(node: fx.Node, width: Any) -> bool:
    return len(_shape(node)) > 1 and _shape(node)[-1] == width


def _touches_last(node: fx.Node, last: int) -> bool:
    """Whether a move does something to the dimension of the classes."""
    if node.target in _SLICES:
        position = 1 if node.target is aten.slice.Tensor else 2
        return (node.args[position] if len(node.args) > position else 0) in (last, -1)
    if node.target is aten.transpose.int:
        return any(dim in (last, -1) for dim in node.args[1:])
    if node.target is aten.permute.default:
        order: Any = node.args[1]
        return order[-1] not in (last, -1)
    return False


def _shape(node: fx.Node) -> tuple[Any, ...]:
    """Sizes in a form that can be compared; () for plain numbers."""
    value = node.meta.get("val")
    return tuple(_torch.expression(size) for size in value.shape) if isinstance(value, torch.Tensor) else ()


def _with_hints(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_with_hints(item) for item in value)
    return _torch.optimization_hint(value) if isinstance(value, torch.SymInt) else value
