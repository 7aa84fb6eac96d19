"""Join the all-reduces of gradients into buckets: one message instead of many."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from wholestep.comm.blocks import CommBlock, find_blocks
from wholestep.errors import PassError
from wholestep.graph import Phase, StepGraph, ops
from wholestep.passes.base import Pass, register

aten = torch.ops.aten

MEGABYTE = 1024 * 1024


@register
@dataclass(frozen=True)
class Bucket(Pass):
    """Send several gradients as one: flatten, concatenate, one collective, split, reshape.

    ```
    all_reduce = all_reduce(mul, 'sum', '0')              cat = aten.cat([view, view_1])
    wait = wait_tensor(all_reduce)                        mul = aten.mul(cat, 0.5)
    all_reduce_1 = all_reduce(mul_1, 'sum', '0')     ->   all_reduce = all_reduce(mul, 'sum', '0')
    wait_1 = wait_tensor(all_reduce_1)                    wait = wait_tensor(all_reduce)
                                                          split = aten.split_with_sizes(wait, [12, 3])
                                                          view_2 = split[0].view(3, 4); view_3 = split[1].view(3)
    ```
    `groups` names the buckets (`"a.weight a.bias;b.weight"`), in the order in which they are to be issued on every
    rank. Without it, buckets are filled in the order of the backward: a first one of `first_mb`, so that communication
    starts early, then of `mb` each. A bucket never mixes process group, reduce op, dtype or device.
    """

    name: ClassVar[str] = "bucket"
    requires: ClassVar[tuple[str, ...]] = ("allreduce",)

    mb: float = 25.0
    first_mb: float = 1.0
    groups: str = ""

    def apply(self, graph: StepGraph) -> StepGraph:
        blocks = {_key(block): block for block in find_blocks(graph) if "reduces" in block.collective.meta}
        if self.groups:
            buckets = _named_buckets(blocks, parse_groups(self.groups))
        else:
            sizes = [(key, block.num_bytes, _kind(block)) for key, block in blocks.items()]
            if not (0 < self.mb < float("inf") and 0 < self.first_mb < float("inf")):
                raise PassError(f"bucket: sizes are megabytes, more than 0, not {self.mb} and {self.first_mb}")
            filled = fill_buckets(sizes, int(self.mb * MEGABYTE), int(self.first_mb * MEGABYTE))
            buckets = [[blocks[key] for key in keys] for keys in filled]
        for index, members in enumerate(buckets):
            _join(graph, index, members)
        return graph


def parse_groups(text: str) -> list[list[str]]:
    """Bucket membership from its text form."""
    return [group.split() for group in text.split(";")]


def format_groups(buckets: Sequence[Sequence[str]]) -> str:
    """The text form of bucket membership."""
    return ";".join(" ".join(keys) for keys in buckets)


def fill_buckets(gradients: Sequence[tuple[str, int, Any]], limit_bytes: int, first_bytes: int) -> list[list[str]]:
    """Buckets of neighbouring gradients: (key, bytes, kind) each, in the order of the backward.

    A bucket is closed when it is at least half full and the next gradient would take it past its limit: biases ride
    with the weights around them instead of travelling alone. Each kind (group, reduce op, dtype, device) has its own
    buckets, ordered by their last gradient.
    """
    buckets: list[list[str]] = []
    finished_at: list[int] = []
    open_bucket: dict[Any, tuple[int, int]] = {}
    for position, (key, num_bytes, kind) in enumerate(gradients):
        index, filled = open_bucket.get(kind, (-1, 0))
        limit = min(first_bytes, limit_bytes) if index == 0 else limit_bytes
        if index < 0 or (filled + num_bytes > limit and 2 * filled >= limit):
            index, filled = len(buckets), 0
            buckets.append([])
            finished_at.append(position)
        buckets[index].append(key)
        finished_at[index] = position
        open_bucket[kind] = (index, filled + num_bytes)
    order = sorted(range(len(buckets)), key=finished_at.__getitem__)
    return [buckets[index] for index in order]


def _kind(block: CommBlock) -> tuple[Any, ...]:
    return *block.kind, block.collective.meta["wave"]


def _key(block: CommBlock) -> str:
    [(key, _)] = block.collective.meta["reduces"]
    return key


def _named_buckets(blocks: dict[str, CommBlock], groups: list[list[str]]) -> list[list[CommBlock]]:
    named = [key for keys in groups for key in keys]
    unknown = [key for key in named if key not in blocks]
    missing = [key for key in blocks if key not in named]
    if unknown or missing or len(named) != len(set(named)):
        twice = [key for index, key in enumerate(named) if key in named[:index]]
        problem = f"'{(unknown or missing or twice)[0]}'"
        what = "which has no gradient" if unknown else "left out" if missing else "named twice"
        raise PassError(f"the buckets do not fit this step's gradients: {problem} is {what}")
    for keys in groups:
        if len({_kind(blocks[key]) for key in keys}) > 1:
            raise PassError(
                f"'{keys[0]}' and others of its bucket differ in group, reduce op, dtype or device, or are not all "
                "there before the first of them is used"
            )
    return [[blocks[key] for key in keys] for keys in groups]


def _join(graph: StepGraph, index: int, members: list[CommBlock]) -> None:
    """Exchange the members' collectives for one, behind the last of their gradients."""
    last = members[-1] if len(members) == 1 else max(members, key=_position(graph))
    anchor = last.collective
    sources = [_local_value(block) for block in members]
    flat = [_flatten(graph, source, anchor) for source, _ in sources]
    value = flat[0]
    if len(flat) > 1:
        value = graph.insert(aten.cat.default, (flat,), like=sources[0][0], before=anchor, phase=Phase.COMM)
    [scale] = {scale for _, scale in sources}
    if scale is not None:
        value = graph.insert(aten.mul.Tensor, (value, scale), like=sources[0][0], before=anchor, phase=Phase.COMM)
    elif value is sources[0][0]:  # the gradient's own memory is not the bucket's to send
        value = graph.insert(aten.clone.default, (value,), like=value, before=anchor, phase=Phase.COMM)
    arguments = (value, members[0].reduce_op, members[0].group)
    issue = graph.insert(ops.ALL_REDUCE, arguments, like=sources[0][0], before=anchor, phase=Phase.COMM)
    wait = graph.insert(ops.WAIT, (issue,), like=sources[0][0], before=anchor, phase=Phase.COMM)
    issue.meta["reduces"] = tuple(entry for block in members for entry in block.collective.meta["reduces"])
    issue.meta["wave"] = members[0].collective.meta["wave"]
    issue.meta["bucket"] = wait.meta["bucket"] = index
    parts = _split(graph, wait, [source for source, _ in sources], anchor)
    for block, part in zip(members, parts, strict=True):
        [(_, names)] = block.collective.meta["reduces"]
        part.meta["reduced_gradient_of"] = names
    graph.replace({block.wait: part for block, part in zip(members, parts, strict=True)})
    for block in members:
        _erase(graph, block.collective)


def _position(graph: StepGraph) -> Any:
    order = {node: position for position, node in enumerate(graph.graph.nodes)}
    return lambda block: order[block.collective]


def _local_value(block: CommBlock) -> tuple[fx.Node, float | None]:
    """The gradient before it was scaled, and the scale."""
    [sent] = block.inputs
    if sent.target is aten.mul.Tensor and sent.meta["phase"] is Phase.COMM:
        source, scale = sent.args
        assert isinstance(source, fx.Node)
        assert isinstance(scale, float)
        return source, scale
    if sent.target is aten.clone.default and sent.meta["phase"] is Phase.COMM:
        assert isinstance(sent.args[0], fx.Node)
        return sent.args[0], None
    return sent, None


def _erase(graph: StepGraph, node: fx.Node) -> None:
    sources = node.all_input_nodes
    graph.graph.erase_node(node)
    for source in sources:
        if not source.users and source.op == "call_function" and source.meta["phase"] is Phase.COMM:
            _erase(graph, source)


def _memory_order(value: torch.Tensor) -> list[int] | None:
    """The dims of a tensor from outermost to innermost in memory; None if it has gaps or overlaps."""
    dims = sorted(range(value.dim()), key=lambda dim: (-value.stride(dim), dim))
    return dims if value.permute(dims).is_contiguous() else None


def _flatten(graph: StepGraph, source: fx.Node, before: fx.Node) -> fx.Node:
    """The elements of a gradient in a row, as they lie in memory (a view) where it is dense, copied otherwise."""
    value = source.meta["val"]
    dims = _memory_order(value)
    if dims is None:
        return graph.insert(aten.reshape.default, (source, [-1]), like=source, before=before, phase=Phase.COMM)
    if dims != sorted(dims):
        source = graph.insert(aten.permute.default, (source, dims), like=source, before=before, phase=Phase.COMM)
    if value.dim() == 1:
        return source
    return graph.insert(aten.view.default, (source, [value.numel()]), like=source, before=before, phase=Phase.COMM)


def _split(graph: StepGraph, wait: fx.Node, sources: list[fx.Node], before: fx.Node) -> list[fx.Node]:
    """The reduced bucket as gradients again: views, each with the layout of the local gradient it stands for."""
    pieces = [wait]
    if len(sources) > 1:
        sizes = [source.meta["val"].numel() for source in sources]
        split = graph.insert(aten.split_with_sizes.default, (wait, sizes), like=wait, before=before, phase=Phase.COMM)
        pieces = [
            graph.insert(operator.getitem, (split, index), like=source, before=before, phase=Phase.COMM)
            for index, source in enumerate(sources)
        ]
    return [_unflatten(graph, piece, source, before) for piece, source in zip(pieces, sources, strict=True)]


def _unflatten(graph: StepGraph, piece: fx.Node, source: fx.Node, before: fx.Node) -> fx.Node:
    value = source.meta["val"]
    dims = _memory_order(value) or list(range(value.dim()))
    if value.dim() != 1:
        sizes = [value.shape[dim] for dim in dims]
        piece = graph.insert(aten.view.default, (piece, sizes), like=source, before=before, phase=Phase.COMM)
    if dims != sorted(dims):
        inverse = [dims.index(dim) for dim in range(value.dim())]
        piece = graph.insert(aten.permute.default, (piece, inverse), like=source, before=before, phase=Phase.COMM)
    return piece
