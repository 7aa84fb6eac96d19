"""Issue collectives as early as their inputs allow, wait for them as late as their first reader allows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from wholestep.comm.blocks import find_blocks
from wholestep.errors import PassError
from wholestep.graph import Phase, StepGraph, ops
from wholestep.passes.base import Pass, register


@register
@dataclass(frozen=True)
class Overlap(Pass):
    """Reorder the step around its buckets; no value changes.

    ```
    backward of layer 2            backward of layer 2
    all_reduce_0                   all_reduce_0                 issued in bucket order on every rank
    wait_0                    ->   backward of layer 1          runs while bucket 0 travels
    backward of layer 1            all_reduce_1
    all_reduce_1                   wait_0, update of layer 2    runs while bucket 1 travels
    wait_1                         wait_1, update of layer 1
    update of layers 1, 2
    ```
    What needs no reduced gradient comes first, then what needs bucket 0 only, then bucket 1, and so on. `late` lists
    buckets (`"7 8"`) whose gradients are to be computed behind all others: what makes a weight's gradient is needed by
    nobody else in the backward, and while a more urgent bucket travels there is time for it.
    """

    name: ClassVar[str] = "overlap"
    requires: ClassVar[tuple[str, ...]] = ("bucket",)
    after: ClassVar[tuple[str, ...]] = ("split_optimizer",)

    late: str = ""

    def apply(self, graph: StepGraph) -> StepGraph:
        chains = _chains(graph)
        if chains:
            late = [node for bucket in self.late.split() for node in own_nodes(_sources(chains[int(bucket)]))]
            graph.reorder(_with_chains(graph, chains, _rest(graph, chains, late)))
            for chain in chains:
                chain[-1].meta["is_ordered"] = True
            sink_waits(graph)
        return graph


def _chains(graph: StepGraph) -> list[list[fx.Node]]:
    """For each bucket in issue order: its collective and the nodes that only prepare what it sends."""
    blocks = [block for block in find_blocks(graph) if "bucket" in block.collective.meta]
    blocks.sort(key=lambda block: block.collective.meta["bucket"])
    position = {node: index for index, node in enumerate(graph.graph.nodes)}
    chains: list[list[fx.Node]] = []
    for block in blocks:
        chain = {block.collective}
        pending = [block.collective]
        while pending:
            for source in pending.pop().all_input_nodes:
                is_preparation = source.op == "call_function" and source.meta["phase"] is Phase.COMM
                if is_preparation and source.target is not ops.WAIT and set(source.users) <= chain:
                    chain.add(source)
                    pending.append(source)
        chains.append(sorted(chain, key=position.__getitem__))
    return chains


def own_nodes(gradients: Iterable[fx.Node]) -> list[fx.Node]:
    """The part of the backward that serves these gradients and nothing else, in graph order."""
    own: set[fx.Node] = set()
    pending = list(gradients)
    while pending:
        node = pending.pop()
        is_own = node.op == "call_function" and node.meta["phase"] is Phase.BACKWARD and not ops.has_effect(node)
        is_own = is_own and not node.meta.get("in_chunk")  # it would hold the logits of its chunk
        if is_own and all(user in own or user.meta.get("phase") is not Phase.BACKWARD for user in node.users):
            own.add(node)
            pending.extend(node.all_input_nodes)
    return sorted(own)


def _sources(chain: list[fx.Node]) -> list[fx.Node]:
    """The gradients that a chain sends."""
    return [node for node in _inputs(chain) if node.op == "call_function"]


def _rest(graph: StepGraph, chains: list[list[fx.Node]], late: list[fx.Node]) -> list[fx.Node]:
    """All other calls, sorted by the last bucket they need; in their old order if that would swap random ops.

    Of those that need none, `late` ones come behind the rest of the backward.
    """
    chained = {node for chain in chains for node in chain}
    needs: dict[fx.Node, int] = {}
    for node in graph.calls():
        own = node.meta.get("bucket", -1) if node.target is ops.WAIT else -1
        needs[node] = max([own, *(needs.get(source, -1) for source in node.all_input_nodes)])
    rest = [node for node in graph.calls() if node not in chained]
    number = {node: 1 + index for index, node in enumerate(late)}
    ordered = sorted(rest, key=lambda node: (needs[node], _turn(node, number) if needs[node] < 0 else 0))
    effects = [node.meta["effect"] for node in ordered if "effect" in node.meta]
    return ordered if effects == sorted(effects) else rest


def _turn(node: fx.Node, late: dict[fx.Node, int]) -> int:
    """Forward and backward first, then late gradients in their order, then what depends on neither (step counters)."""
    return late.get(node, len(late) + 1 if node.meta["phase"] is Phase.OPTIMIZER else 0)


def _with_chains(graph: StepGraph, chains: list[list[fx.Node]], rest: list[fx.Node]) -> list[fx.Node]:
    """`rest` with each chain behind its last input, and behind the chain before it."""
    done = {node for node in graph.graph.nodes if node.op == "placeholder"}
    order: list[fx.Node] = []
    waiting = [(chain, _inputs(chain)) for chain in chains]
    held: list[fx.Node] = []
    for index, node in enumerate(rest):
        if set(node.all_input_nodes) <= done and not held:
            order.append(node)
            done.add(node)
        else:
            held.append(node)
        following = rest[index + 1] if index + 1 < len(rest) else None
        if following is not None and ops.getitem_index(following) is not None:
            continue
        while waiting and waiting[0][1] <= done:
            chain, _ = waiting.pop(0)
            order += chain
            done.update(chain)
        held = _release(held, order, done)
    if waiting or held:
        bucket = waiting[0][0][-1].meta["bucket"] if waiting else held[0].name
        raise PassError(f"bucket {bucket} would have to be issued before its gradients are there: reorder the buckets")
    return order


def _inputs(chain: list[fx.Node]) -> set[fx.Node]:
    return {source for node in chain for source in node.all_input_nodes} - set(chain)


def _release(held: list[fx.Node], order: list[fx.Node], done: set[fx.Node]) -> list[fx.Node]:
    """Append held-back nodes whose inputs have appeared meanwhile."""
    while held and set(held[0].all_input_nodes) <= done:
        node = held.pop(0)
        order.append(node)
        done.add(node)
    return held


def sink_waits(graph: StepGraph) -> None:
    """Put every wait, with the views that unpack it, just before the first node that works with the result."""
    for block in reversed(find_blocks(graph)):
        if block.wait.op == "output" or not block.users:
            continue
        first = block.users[0]
        for node in (block.wait, *block.unpacking):
            first.prepend(node)
