"""Move updates, with the wait for their gradients, to the next iteration's first read of what they change."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from wholestep.errors import PassError
from wholestep.graph import Phase, StepGraph, nodes_in, ops
from wholestep.iteration.moves import absorbed, cannot_move, leaf_closure, move_to_next_iteration
from wholestep.passes.base import Pass, register

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class UpdateBlock:
    """Updates that hang together: everything that depends on the gradients of some buckets.

    `problem` says why the block has to stay in its iteration; empty if it may move.
    """

    buckets: tuple[int, ...]
    nodes: frozenset[fx.Node]
    problem: str = ""


def update_blocks(graph: StepGraph, names: Sequence[str] = ()) -> list[UpdateBlock]:
    """The step's updates as blocks, in bucket order.

    Buckets whose updates need each other's gradients (a global norm) share one block. Without communication, the
    gradients of the step (or only those of the named parameters and modules) count as one bucket, number 0.
    """
    closures: list[tuple[set[int], set[fx.Node]]] = []
    for bucket, seeds in _seeds(graph, names).items():
        buckets, nodes = {bucket}, leaf_closure(seeds)
        apart: list[tuple[set[int], set[fx.Node]]] = []
        for other_buckets, other_nodes in closures:
            if nodes.isdisjoint(other_nodes):
                apart.append((other_buckets, other_nodes))
            else:
                buckets |= other_buckets
                nodes |= other_nodes
        closures = [*apart, (buckets, nodes)]
    blocks = [UpdateBlock(tuple(sorted(b)), frozenset(n), _problem(graph, n)) for b, n in closures]
    return sorted(blocks, key=lambda block: block.buckets)


def _seeds(graph: StepGraph, names: Sequence[str]) -> dict[int, list[fx.Node]]:
    """Where the update of each bucket begins: at the wait, or at the readers of gradients that do not travel."""
    waits = [node for node in graph.calls() if node.target is ops.WAIT and "bucket" in node.meta]
    if waits:
        return {node.meta["bucket"]: [node] for node in waits}
    gradients = {node for name, node in graph.gradients.items() if not names or _is_named(name, names)}
    readers = [
        node for node in graph.calls(Phase.OPTIMIZER) if any(source in gradients for source in node.all_input_nodes)
    ]
    return {0: readers} if readers else {}


def _is_named(name: str, names: Sequence[str]) -> bool:
    return any(name == wanted or name.startswith(f"{wanted}.") for wanted in names)


def _problem(graph: StepGraph, nodes: set[fx.Node]) -> str:
    for node in graph.nodes:
        if node in nodes:
            reason = cannot_move(graph, node, nodes)
            if reason is not None:
                return f"'{node.name}' cannot move: {reason}"
    return ""


@register
@dataclass(frozen=True)
class Rotate(Pass):
    """Let the updates of some buckets run in the next iteration, each just before its first reader there.

    `buckets` is `"all"` (whatever may move), empty (none), or the numbers of buckets: `"0 2 3"`. The pass only notes on
    the nodes where they run; `iteration.derive` makes the graphs of the loop from that. Asking by number for a bucket
    that cannot move raises `PassError` with the reason, or with `strict=false` leaves it where it is. Where nothing
    travels, `names` limits the move to the updates of some parameters or modules.
    """

    name: ClassVar[str] = "rotate"
    after: ClassVar[tuple[str, ...]] = ("allreduce", "bucket", "split_optimizer", "overlap", "simplify", "cse")

    buckets: str = "all"
    names: str = ""
    strict: bool = True

    def apply(self, graph: StepGraph) -> StepGraph:
        chosen = self._chosen(update_blocks(graph, self.names.split()))
        moved = {node for block in chosen for node in block.nodes}
        if chosen:
            units, shared = _units(graph, moved | absorbed(graph, moved))
            move_to_next_iteration(graph, *units, shared=shared)
        return graph

    def _chosen(self, blocks: list[UpdateBlock]) -> list[UpdateBlock]:
        if self.buckets == "all":
            return [block for block in blocks if not block.problem]
        strange = [text for text in self.buckets.split() if not text.isdigit()]
        if strange:
            raise PassError(f"buckets are numbers, 'all' or nothing, not '{strange[0]}'")
        wanted = {int(text) for text in self.buckets.split()}
        chosen = [block for block in blocks if wanted & set(block.buckets)]
        known = {bucket for block in blocks for bucket in block.buckets}
        if wanted - known:
            raise PassError(f"there is no bucket {min(wanted - known)}; this step has {len(known)}")
        movable: list[UpdateBlock] = []
        for block in chosen:
            missing = set(block.buckets) - wanted
            why = block.problem or (f"its update also needs bucket {min(missing)}, which is to stay" if missing else "")
            if why and self.strict:
                raise PassError(f"bucket {block.buckets[0]} cannot move to the next iteration: {why}")
            if why:
                logger.info("bucket %d stays in its iteration: %s", block.buckets[0], why)
            else:
                movable.append(block)
        return movable


def _units(graph: StepGraph, moved: set[fx.Node]) -> tuple[list[list[fx.Node]], list[fx.Node]]:
    """Moved nodes as units that can be applied each whether or not the others have been, and what they share.

    A call may fail between two updates; those that were made must not be made again. Nodes that look at a slot which
    some update changes, those that depend on them, and all others of the same slot form one unit. What depends on
    carried values only (a wait, a learning rate) is shared: it can be computed again at any time.
    """
    order = [node for node in graph.nodes if node in moved]
    slots = graph.placeholders()
    changing = {slots[slot_id] for slot_id, value in graph.updates.items() if value in moved}
    kept = {*graph.updates.values(), *nodes_in(graph.results)}
    unit_of: dict[fx.Node, fx.Node] = {}

    def find(node: fx.Node) -> fx.Node:
        while unit_of[node] is not node:
            node = unit_of[node]
        return node

    for node in order:
        bound = [source for source in node.all_input_nodes if source in changing or source in unit_of]
        if not bound and node not in kept:
            continue
        unit_of[node] = node
        written = [slots[slot_id] for slot_id, value in graph.updates.items() if value is node]
        for other in (*bound, *written):
            unit_of.setdefault(other, other)
            unit_of[find(other)] = find(node)
    units: dict[fx.Node, list[fx.Node]] = {}
    for node in order:
        if node in unit_of:
            units.setdefault(find(node), []).append(node)
    return list(units.values()), [node for node in order if node not in unit_of]
