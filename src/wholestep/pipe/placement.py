"""Which stage each op of a step belongs to.

The graph is that of one micro-batch: forward, loss and backward. Its forward is a sequence of calls, and a *border* is
a place in it: what comes before is an earlier stage. Values may be read by any later stage.

    forward      f0 f1 f2 | f3 f4 | f5 f6 loss         borders 3 and 5: three stages
    backward     a backward op goes where the forward op is that it differentiates, but never to a later stage than what
                 it reads from other backward ops: gradients travel towards the first stage only

So an action of a stage never waits for a later forward or for an earlier backward, whatever the model looks like, and
any schedule for a chain of stages will do.

Stages grow along the forward, so "not later than" can be said of places in it, without any border: every call has an
*anchor*, the number of a forward call whose stage it shares, wherever the borders are. Balancing counts on that.

Some values are *free*: made of the batch and constants alone (masks, positions, tables for rotary embeddings), or of
weights alone (casts and transposes), without any work worth speaking of. They belong to no stage. Whoever reads one
rebuilds it, so that no constant travels and no transposed weight is kept for the backward.
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from wholestep.cost import node_flops
from wholestep.errors import SplitError
from wholestep.graph import Phase, SlotKind, StepGraph, nodes_in, ops


@dataclass(frozen=True)
class Placement:
    """The stage of every call that is not free. Inputs of the graph have none: they are where they are read."""

    stage_of: Mapping[fx.Node, int]
    free: frozenset[fx.Node]
    num_stages: int

    def is_bound(self, node: fx.Node) -> bool:
        """Whether a node is a call that happens on one stage only."""
        return node in self.stage_of


def place(graph: StepGraph, borders: Sequence[int]) -> Placement:
    """Place the calls of a functional graph; `borders` are numbers of forward calls at which a new stage begins."""
    if list(borders) != sorted(borders):
        raise SplitError(f"borders rise along the forward, unlike {list(borders)}")
    anchors, free = find_anchors(graph)
    stage_of = {node: bisect_right(borders, anchor) for node, anchor in anchors.items()}
    return Placement(stage_of, free, len(borders) + 1)


def find_anchors(graph: StepGraph) -> tuple[dict[fx.Node, int], frozenset[fx.Node]]:
    """The anchor of every bound call, and the calls that are free."""
    free = frozenset(free_nodes(graph)).difference(nodes_in(graph.output_node.args))
    anchors = {node: number for number, node in enumerate(forward_calls(graph)) if node not in free}
    twins = graph.forward_twins()
    for node in graph.calls():
        if node not in free and node not in anchors:
            anchors[node] = _late_anchor(node, twins.get(node), anchors)
        producer = node.args[0] if node.target is operator.getitem else None
        if isinstance(producer, fx.Node) and producer in anchors:
            anchors[node] = anchors[producer]  # tuples do not travel
    return anchors, free


def forward_calls(graph: StepGraph) -> list[fx.Node]:
    """The calls that borders count: those of the forward, up to the first one of a backward."""
    calls: list[fx.Node] = []
    for node in graph.calls():
        if node.meta["phase"] is not Phase.FORWARD:
            break
        calls.append(node)
    return calls


def _late_anchor(node: fx.Node, twin: fx.Node | None, anchors: Mapping[fx.Node, int]) -> int:
    """The anchor of a call behind the forward."""
    sources = [source for source in node.all_input_nodes if source in anchors]
    late = [anchors[source] for source in sources if source.meta["phase"] is not Phase.FORWARD]
    own = [anchors[twin]] if twin is not None and twin in anchors else []
    if node.meta["phase"] is Phase.FORWARD and not late:  # what the step returns beside the loss
        return max((anchors[source] for source in sources), default=0)
    if late or own:
        return min(late + own)
    return max((anchors[source] for source in sources), default=0)


def free_nodes(graph: StepGraph) -> list[fx.Node]:
    """Calls that may be repeated wherever their values are read, at next to no cost, in order."""
    roots = {node: _root(graph, node) for node in graph.placeholders().values()}
    found: list[fx.Node] = []
    for node in graph.calls():
        kinds = {kind for source in node.all_input_nodes for kind in roots.get(source, _BOUND)}
        if not _is_cheap(node) or len(kinds) > 1 or kinds & _BOUND:
            continue
        roots[node] = frozenset(kinds)
        found.append(node)
    return found


_BOUND = frozenset({"bound"})


def _root(graph: StepGraph, node: fx.Node) -> frozenset[str]:
    slot = graph.slots[node.name]
    if slot.kind is SlotKind.PARAM:
        return frozenset({"weights"})
    if slot.kind is SlotKind.BATCH:
        return frozenset({"data"})
    # Constants are everywhere; a buffer that the forward changes is another one for each micro-batch.
    is_fixed = slot.kind in (SlotKind.BUFFER, SlotKind.CONSTANT) and slot.id not in graph.updates
    return frozenset() if is_fixed else _BOUND


def _is_cheap(node: fx.Node) -> bool:
    target: Any = node.target
    if ops.has_effect(node) or not ops.is_pure(target) or node_flops(node):
        return False
    return isinstance(node.meta["val"], (torch.Tensor, int, float, bool)) or target is operator.getitem
