"""Move updates, with the wait for their gradients, to the next iteration's first read of what they change."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from wholestep.errors import PassError
from wholestep.graph import Phase, StepGraph, ops
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
        along = absorbed(graph, moved)
        if chosen:
            units = _units(graph, [set(block.nodes) for block in chosen], along)
            move_to_next_iteration(graph, *units)
        return graph

    def _chosen(self, blocks: list[UpdateBlock]) -> list[UpdateBlock]:
        if self.buckets == "all":
            return [block for block in blocks if not block.problem]
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


def _units(graph: StepGraph, blocks: list[set[fx.Node]], along: set[fx.Node]) -> list[list[fx.Node]]:
    """Blocks with the nodes that move along, such that each can be applied whether or not the others have been.

    A node along for several blocks forms a unit of its own if it can be computed again at any time: from carried values
    only. If it looks at a slot that some update changes, its blocks become one.
    """
    position = {node: index for index, node in enumerate(graph.graph.nodes)}
    owner = {node: index for index, block in enumerate(blocks) for node in block}
    serves: dict[fx.Node, set[int]] = {}
    for node in sorted(along, key=position.__getitem__, reverse=True):
        users = [user for user in node.users if user.op == "call_function"]
        serves[node] = {index for user in users for index in (serves.get(user) or {owner[user]})}
    leader = list(range(len(blocks)))
    for node in along:
        if len(serves[node]) > 1 and _looks_at_changing_slot(graph, node, along):
            first = min(leader[index] for index in serves[node])
            merged = {leader[index] for index in serves[node]}
            leader = [first if index in merged else index for index in leader]
    units: dict[int, set[fx.Node]] = {}
    for index, block in enumerate(blocks):
        units.setdefault(leader[index], set()).update(block)
    shared: list[set[fx.Node]] = []
    for node in along:
        leaders = {leader[index] for index in serves[node]}
        units[leaders.pop()].add(node) if len(leaders) == 1 else shared.append({node})
    return [sorted(unit, key=position.__getitem__) for unit in (*units.values(), *shared)]


def _looks_at_changing_slot(graph: StepGraph, node: fx.Node, along: set[fx.Node]) -> bool:
    changing = {graph.placeholder(slot_id) for slot_id in graph.updates}
    pending = [node]
    while pending:
        for source in pending.pop().all_input_nodes:
            if source in changing:
                return True
            if source in along:
                pending.append(source)
    return False
