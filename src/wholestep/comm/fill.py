"""Let the backward write gradients straight into their bucket."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from wholestep import _torch
from wholestep.graph import Phase, StepGraph, ops
from wholestep.passes.base import Pass, register

aten = torch.ops.aten

# What torch's allocators give fresh memory.
_ALIGNMENT_BYTES = 64


@register
@dataclass(frozen=True)
class FillBuckets(Pass):
    """Exchange the concatenation of a bucket for memory that its gradients are computed in.

    ```
    mm = aten.mm(t, x)                             bucket = aten.empty([15])
    sum = aten.sum(dy, [0])                        part = bucket[0:12].view(3, 4); mm = aten.mm.out(t, x, out=part)
    cat = aten.cat([mm.view(12), sum])        ->   part_1 = bucket[12:15]; sum = aten.sum.out(dy, [0], out=part_1)
    all_reduce = all_reduce_(cat, ...)             all_reduce = all_reduce_(bucket, ...)
    ```
    A gradient whose op cannot write to given memory, or that somebody else reads, is copied in as soon as it is there;
    so is one whose place in the bucket is not aligned like fresh memory, since matrix products may round differently
    there.
    """

    name: ClassVar[str] = "fill_buckets"
    requires: ClassVar[tuple[str, ...]] = ("reinplace",)
    needs_functional: ClassVar[bool] = False

    def apply(self, graph: StepGraph) -> StepGraph:
        for node in graph.nodes:
            if node.target is aten.cat.default and node.meta["phase"] is Phase.COMM:
                _fill(graph, node)
        return graph


def _fill(graph: StepGraph, cat: fx.Node) -> None:
    pieces: list[fx.Node] = list(cat.args[0])  # pyright: ignore[reportArgumentType, reportAssignmentType]
    starts = list(itertools.accumulate((piece.meta["val"].numel() for piece in pieces), initial=0))
    aligned = [start * cat.meta["val"].element_size() % _ALIGNMENT_BYTES == 0 for start in starts]
    makers = [_maker(piece) if fits else None for piece, fits in zip(pieces, aligned, strict=False)]
    if all(chain is None for chain in makers):
        return
    value: torch.Tensor = cat.meta["val"]
    first = min(chain[-1] if chain else piece for chain, piece in zip(makers, pieces, strict=True))
    options = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
    place = {"before": first} if first.op == "call_function" else {"after": first}
    bucket = graph.insert(aten.empty.memory_format, ([value.numel()],), options, like=cat, phase=Phase.COMM, **place)
    for piece, chain, start, end in zip(pieces, makers, starts, starts[1:], strict=False):
        if chain is None:
            part = graph.insert(aten.slice.Tensor, (bucket, 0, start, end), like=piece, before=cat, phase=Phase.COMM)
            copied = graph.insert(aten.copy_.default, (part, piece), like=piece, after=part, phase=Phase.COMM)
            _raise_to(piece, [part, copied], bucket)
        else:
            _write_into(graph, chain, bucket, start, end)
    graph.replace({cat: bucket})
    for chain in makers:
        for node in chain or ():
            graph.graph.erase_node(node)


def _raise_to(piece: fx.Node, nodes: list[fx.Node], bucket: fx.Node) -> None:
    """Move nodes up to just behind `piece`, but not into a row of `getitem`s, nor before the bucket is there."""
    anchor = max(piece, bucket)
    while anchor.next.op == "placeholder" or ops.getitem_index(anchor.next) is not None:
        anchor = anchor.next
    for node in nodes:
        anchor.append(node)
        anchor = node


def _maker(piece: fx.Node) -> list[fx.Node] | None:
    """The views from a piece of a bucket down to the op that makes it, if that op can write into the bucket instead."""
    chain = [piece]
    while chain[-1].op == "call_function" and _only_looks(chain[-1].target):
        chain.append(chain[-1].all_input_nodes[0])
    maker = chain[-1]
    if maker.op != "call_function" or out_twin(maker.target) is None or any(len(node.users) != 1 for node in chain):
        return None
    value, flat = maker.meta["val"], piece.meta["val"]
    # A contiguous row of as many elements, from the same place of the same memory, has them in the order of the memory.
    same_order = value.is_contiguous() and flat.dim() == 1 and flat.is_contiguous() and value.numel() == flat.numel()
    return chain if same_order and value.storage_offset() == flat.storage_offset() else None


def _only_looks(target: Any) -> bool:
    return ops.is_view(target) and target is not aten.reshape.default  # which may copy


def _write_into(graph: StepGraph, chain: list[fx.Node], bucket: fx.Node, start: int, end: int) -> None:
    """Compute the end of `chain` into a part of the bucket."""
    maker = chain[-1]
    sizes = list(maker.meta["val"].shape)
    part = graph.insert(aten.slice.Tensor, (bucket, 0, start, end), like=maker, before=maker, phase=Phase.COMM)
    part = graph.insert(aten.view.default, (part, sizes), like=maker, before=maker, phase=Phase.COMM)
    twin: Any = out_twin(maker.target)
    written = graph.insert(twin, maker.args, {**maker.kwargs, "out": part}, like=maker, before=maker)
    for key in ("origins", "gradient_of", "earlier_gradient_of"):
        if key in maker.meta:
            written.meta[key] = maker.meta[key]


@functools.cache
def out_twin(target: Any) -> Any:
    """The operator that computes the same into memory it is given: `mm.default` -> `mm.out`, or None.

    Twins that torch generates by copying the result of the functional operator gain nothing and do not count.
    """
    if not _torch.is_op_overload(target) or _torch.namespace(target) != "aten" or ops.is_view(target):
        return None
    wanted = [(argument.name, str(argument.type)) for argument in _torch.schema(target).arguments]
    for twin in _torch.overloads(_torch.packet_name(target).removesuffix("_")):
        arguments = _torch.schema(twin).arguments
        outs = [argument for argument in arguments if _torch.is_written(argument)]
        rest = [(argument.name, str(argument.type)) for argument in arguments if not _torch.is_written(argument)]
        if len(outs) == 1 and outs[0].name == "out" and rest == wanted and torch.Tag.generated not in _torch.tags(twin):
            return twin
    return None
