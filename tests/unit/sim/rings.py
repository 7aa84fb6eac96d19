"""All-reduces as single messages, round by round: the slow way, to hold the formulas of `sim.cluster` against.

one ring     rank i passes a piece to rank i + 1, 2 (n - 1) times; a piece leaves when the one before it has left and
             the piece that it is made of has come in
two levels   g - 1 rounds inside each node, 2 (m - 1) rounds between equal places of the m nodes, g - 1 rounds inside
"""

from __future__ import annotations

from collections.abc import Sequence

from wholestep.sim.cluster import Cluster
from wholestep.sim.engine import Engine


def ring_us(cluster: Cluster, ranks: Sequence[int], num_bytes: float, ready_us: Sequence[float]) -> float:
    """When one ring over all ranks is done, if each rank takes part from its moment on."""
    engine = Engine()
    ready = {rank: engine.add(("ready", rank), moment) for rank, moment in zip(ranks, ready_us, strict=True)}
    rounds = 2 * (len(ranks) - 1)
    _add_rounds(engine, cluster, ranks, num_bytes / len(ranks), rounds, ready)
    return max(engine.run()[1])


def two_level_us(cluster: Cluster, ranks: Sequence[int], num_bytes: float, ready_us: Sequence[float]) -> float:
    """The same in two levels; every node has as many of the ranks."""
    engine = Engine()
    ready = {rank: engine.add(("ready", rank), moment) for rank, moment in zip(ranks, ready_us, strict=True)}
    nodes: dict[int, list[int]] = {}
    for rank in ranks:
        nodes.setdefault(cluster.node_of(rank), []).append(rank)
    num_each = len(ranks) // len(nodes)
    for node in nodes.values():
        ready |= _add_rounds(engine, cluster, node, num_bytes / num_each, num_each - 1, ready)
    for place in range(num_each):
        column = [node[place] for node in nodes.values()]
        ready |= _add_rounds(engine, cluster, column, num_bytes / len(ranks), 2 * (len(column) - 1), ready)
    for node in nodes.values():
        ready |= _add_rounds(engine, cluster, node, num_bytes / num_each, num_each - 1, ready)
    return max(engine.run()[1])


def _add_rounds(
    engine: Engine, cluster: Cluster, ranks: Sequence[int], num_bytes: float, num_rounds: int, ready: dict[int, int]
) -> dict[int, int]:
    """Pass pieces on round by round; for each rank the task by which it has its last piece."""
    come_in = {rank: ready[rank] for rank in ranks}
    left = dict(come_in)
    for _ in range(num_rounds):
        sent: dict[int, int] = {}
        arriving: dict[int, int] = {}
        for index, rank in enumerate(ranks):
            target = ranks[(index + 1) % len(ranks)]
            wire = cluster.wire(rank, target)
            sent[rank] = engine.add(("ring", rank, target), wire.time_us(num_bytes), [left[rank], come_in[rank]])
            arriving[target] = sent[rank]
        left, come_in = sent, arriving
    return {rank: engine.add(("phase", rank), 0.0, [left[rank], come_in[rank]]) for rank in ranks}
