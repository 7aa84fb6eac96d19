"""Which parts of a step graph Inductor gets: maximal runs of ops it can compile, and why they end where they do.

    forward:   embedding ... | bernoulli | mul ... loss       a random op is a border: eager's own order is kept
    backward:  ... mm | all_reduce | mm ... mm | wait | ...   so are collectives: no region holds issue and wait
    optimizer: _fused_adamw                                   one kernel already

The forward and the backward are regions apart: what is computed again in the backward must not be found to be the same
as in the forward.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from wholestep import _sizes_torch, _torch
from wholestep._recording_torch import REQUIRE
from wholestep.graph import Phase, StepGraph, nodes_in, ops

NodePredicate = Callable[[fx.Node], bool]
RegionPredicate = Callable[[Sequence[fx.Node]], bool]

# Node meta: a reason to stay out of regions that cannot be read off the call itself.
NOT_LOWERED = "not_lowered"


@dataclass(frozen=True)
class Break:
    """A call that no region contains, and the reason; `num_nodes` such calls are one break."""

    node: str
    phase: Phase
    reason: str
    num_nodes: int = 1

    def __str__(self) -> str:
        more = f" and {self.num_nodes - 1} more" if self.num_nodes > 1 else ""
        return f"{self.node}{more} ({self.phase}): {self.reason}"


@dataclass(frozen=True)
class Division:
    """A graph's regions, in order, and what is between them, one break for each reason."""

    regions: tuple[tuple[fx.Node, ...], ...]
    breaks: tuple[Break, ...]


def divide(
    graph: StepGraph,
    *,
    min_ops: int = 10,
    node_predicate: NodePredicate | None = None,
    region_predicate: RegionPredicate | None = None,
) -> Division:
    """Cut a functional graph into regions of at least `min_ops` ops that do something, and breaks."""
    regions: list[tuple[fx.Node, ...]] = []
    breaks: list[Break] = []
    open_breaks: list[Break] = []
    for reason, nodes in _runs(graph, node_predicate):
        if not reason:
            num_ops = sum(does_something(node) for node in nodes)
            if num_ops < min_ops:
                reason = f"fewer than {min_ops} ops in a row" if num_ops else ""
            elif region_predicate is not None and not region_predicate(nodes):
                reason = "the region predicate says no"
            else:
                regions.append(tuple(nodes))
                breaks += merged(open_breaks)
                open_breaks = []
                continue
        if reason:
            open_breaks.append(Break(nodes[0].name, nodes[0].meta["phase"], reason, len(nodes)))
    return Division(tuple(regions), (*breaks, *merged(open_breaks)))


def merged(breaks: Iterable[Break]) -> tuple[Break, ...]:
    """One break for each phase and reason, named after the first call it stands for."""
    found: dict[tuple[Phase, str], Break] = {}
    for item in breaks:
        first = found.get((item.phase, item.reason))
        num_nodes = item.num_nodes + (0 if first is None else first.num_nodes)
        found[item.phase, item.reason] = replace(first or item, num_nodes=num_nodes)
    return tuple(found.values())


def _runs(graph: StepGraph, predicate: NodePredicate | None) -> Iterator[tuple[str, list[fx.Node]]]:
    """Calls in a row of one phase that all have the same reason not to be in a region, or none."""
    current: list[fx.Node] = []
    known: tuple[str, Phase] | None = None
    outside: set[fx.Node] = set()
    for node in graph.calls():
        reason = why_not(node)
        if not reason and predicate is not None and not predicate(node):
            reason = "the node predicate says no"
        if node.target is operator.getitem and node.args[0] in outside:
            reason = known[0] if known is not None and known[0] else "it takes apart what is outside"
        kind = (reason, node.meta["phase"])
        if known is not None and kind != known:
            yield known[0], current
            current = []
        known = kind
        current.append(node)
        if reason:
            outside.add(node)
    if known is not None:
        yield known[0], current


def why_not(node: fx.Node) -> str:
    """Why a call cannot be in a region, "" if it can."""
    target: Any = node.target
    if NOT_LOWERED in node.meta:
        return node.meta[NOT_LOWERED]
    if _has_float_symbol(node):
        return "it reads a number that changes from step to step"
    if any(map(_sizes_torch.depends_on_values, _values(node))):
        return "its size depends on values"
    if not ops.is_op(node):
        return "" if ops.is_pure(target) and not _is_ours(target) else "it is not a plain operator"
    if ops.is_collective(target):
        return "it talks to other ranks"
    if node.target is REQUIRE:
        return "it looks at values, and may leave the graph"
    if ops.draws(node):
        return "it draws random numbers, in eager's order"
    if _torch.packet_name(target).startswith("_fused_"):
        return "it is one kernel already"
    if not ops.is_pure(target) and not ops.is_random(target):
        return "it may have effects"
    return ""


def _is_ours(target: Any) -> bool:
    return str(getattr(type(target), "__module__", "")).startswith("wholestep")


def _has_float_symbol(node: fx.Node) -> bool:
    return any(isinstance(value, (torch.SymFloat, torch.SymBool)) for value in _values(node))


def _values(node: fx.Node) -> list[Any]:
    """What a call gives and is given."""
    return [node.meta.get("val"), *(source.meta.get("val") for source in nodes_in((node.args, node.kwargs)))]


def does_something(node: fx.Node) -> bool:
    """Whether a call computes, as opposed to looking at memory in another way."""
    target: Any = node.target
    return ops.is_op(node) and not ops.shares_memory(target) and not _torch.packet_name(target).startswith("empty")
