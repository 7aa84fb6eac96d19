"""Clusters that need not be there: nodes with equal ranks, a link inside a node and one between nodes.

Ranks count node by node. Each rank has ports of its own, one out and one in, to the link inside its node and to the one
between nodes; where ranks share an adapter, write down what is left for each.

An all-reduce of b bytes over n ranks is done in the shortest of these ways:

    one ring     2 (n - 1) rounds of b / n, each as long as the slowest hop of the ring              (`_flat`)
    two levels   with g ranks in each of m nodes: 2 (g - 1) rounds of b / g inside the node, and between
                 2 (m - 1) rounds of b / (g m) between the nodes, on all g ranks at once              (`_two_level`)
    a tree       with `trees`, and more than two nodes: as two levels, but between the nodes bytes go up a tree and down
                 again, piece by piece: 2 log2(m) latencies, and twice b / g at the link's speed      (`_tree`)

In a round every rank passes one piece to the next one. A hop that takes h is never without work: its n-th piece is
there when the n - 1 before it have left, if no other hop is slower. So rounds of unequal hops take as long as the
slowest, and a ring of equal hops whose ranks begin at different times ends 2 (n - 1) h after the last began; one of
unequal hops may be done a little earlier, which is not counted on. Tests hold rings against single messages. The
tree is what NCCL takes where rings have too many rounds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wholestep import _strict_json as strict_json
from wholestep.cost import DeviceModel, Wire
from wholestep.errors import SimulationError
from wholestep.sim.costs import CostModel
from wholestep.sim.files import parsed, read_bytes, readable

FORMAT = "wholestep-cluster"
VERSION = 1
MAX_RANKS = 2**20


@dataclass(frozen=True)
class Collective:
    """What an all-reduce takes: its time, and how many bytes each rank sends inside its node and to others."""

    time_us: float
    inside_bytes: float
    between_bytes: float


@dataclass(frozen=True)
class Cluster:
    """Nodes of equal ranks, and what joins them."""

    num_nodes: int
    ranks_per_node: int
    device: DeviceModel
    inside: Wire
    between: Wire
    trees: bool = False

    @property
    def num_ranks(self) -> int:
        return self.num_nodes * self.ranks_per_node

    def node_of(self, rank: int) -> int:
        return rank // self.ranks_per_node

    def wire(self, source: int, target: int) -> Wire:
        """What joins two ranks."""
        return self.inside if self.node_of(source) == self.node_of(target) else self.between

    def all_reduce(self, ranks: Sequence[int], num_bytes: float) -> Collective:
        """What reducing so many bytes over some ranks takes, the shorter way."""
        return self.all_reduce_over(self.shape_of(ranks), num_bytes)

    def shape_of(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """How many of some ranks each node has, of nodes that have any: the time of a collective depends on no more."""
        return tuple(Counter(map(self.node_of, ranks)).values())

    def all_reduce_over(self, counts: Sequence[int], num_bytes: float) -> Collective:
        """The same, given how many ranks each node has (`shape_of`)."""
        num_ranks, num_nodes = sum(counts), len(counts)
        if num_ranks < 2:
            return Collective(0.0, 0.0, 0.0)
        flat = self._flat(num_ranks, num_nodes, num_bytes)
        if num_nodes == 1 or min(counts) != max(counts):
            return flat
        ways = [flat] if counts[0] == 1 else [flat, self._two_level(counts[0], num_nodes, num_bytes)]
        if self.trees and num_nodes > 2:
            ways.append(self._tree(counts[0], num_nodes, num_bytes))
        return min(ways, key=lambda found: found.time_us)

    def _flat(self, num_ranks: int, num_nodes: int, num_bytes: float) -> Collective:
        num_rounds = 2 * (num_ranks - 1)
        piece = num_bytes / num_ranks
        inside_us = self.inside.time_us(piece) if num_ranks > num_nodes else 0.0
        between_us = self.between.time_us(piece) if num_nodes > 1 else 0.0
        return Collective(
            num_rounds * max(inside_us, between_us),
            num_rounds * piece if num_ranks > num_nodes else 0.0,
            num_rounds * piece if num_nodes > 1 else 0.0,
        )

    def _two_level(self, num_each: int, num_nodes: int, num_bytes: float) -> Collective:
        inside_rounds, between_rounds = 2 * (num_each - 1), 2 * (num_nodes - 1)
        piece, part = num_bytes / num_each, num_bytes / (num_each * num_nodes)
        time_us = inside_rounds * self.inside.time_us(piece) + between_rounds * self.between.time_us(part)
        return Collective(time_us, inside_rounds * piece, between_rounds * part)

    def _tree(self, num_each: int, num_nodes: int, num_bytes: float) -> Collective:
        inside_rounds, piece = 2 * (num_each - 1), num_bytes / num_each
        climb_us = 2 * (num_nodes - 1).bit_length() * self.between.latency_us + 2 * piece / self.between.bytes_per_us
        return Collective(inside_rounds * self.inside.time_us(piece) + climb_us, inside_rounds * piece, 2 * piece)

    def to_json(self) -> str:
        """The cluster as text that `from_json` reads."""
        return readable(
            {
                "format": FORMAT,
                "version": VERSION,
                "nodes": self.num_nodes,
                "ranks_per_node": self.ranks_per_node,
                "device": vars(self.device),
                "inside": vars(self.inside),
                "between": vars(self.between),
                "trees": self.trees,
            }
        )

    @staticmethod
    def from_json(data: bytes, costs: CostModel | None = None, what: str = "the cluster") -> Cluster:
        """Read a description; names of devices and links are those of `costs`. Raises `SimulationError`."""
        known = CostModel.builtin() if costs is None else costs
        return parsed(data, what, FORMAT, VERSION, lambda body: _cluster(body, known, what))

    @staticmethod
    def load(path: Path, costs: CostModel | None = None) -> Cluster:
        """Read a file; raises `SimulationError` if it describes no cluster."""
        return Cluster.from_json(read_bytes(path), costs, str(path))


def _cluster(body: dict[str, Any], costs: CostModel, what: str) -> Cluster:
    found = strict_json.fields(body, what, ("nodes", "ranks_per_node", "device"), ("inside", "between", "trees"))
    allowed = range(1, MAX_RANKS + 1)
    num_nodes = strict_json.integer(found["nodes"], f"nodes of {what}", allowed)
    ranks_per_node = strict_json.integer(found["ranks_per_node"], f"ranks_per_node of {what}", allowed)
    if num_nodes * ranks_per_node > MAX_RANKS:
        raise SimulationError(f"{what} has {num_nodes * ranks_per_node} ranks; at most {MAX_RANKS} are simulated")
    for name, is_needed in (("inside", ranks_per_node > 1), ("between", num_nodes > 1)):
        if is_needed and name not in found:
            raise SimulationError(f"{what} has no '{name}': say what joins ranks {name} nodes, as in '25gbit,10us'")
    spare = {"latency_us": 0.0, "bytes_per_us": 1.0}
    return Cluster(
        num_nodes,
        ranks_per_node,
        costs.device(found["device"], f"the device of {what}"),
        costs.wire(found.get("inside", spare), f"the link inside nodes of {what}"),
        costs.wire(found.get("between", spare), f"the link between nodes of {what}"),
        _truth(found.get("trees", False), f"trees of {what}"),
    )


def _truth(value: Any, what: str) -> bool:
    if not isinstance(value, bool):
        raise SimulationError(f"{what} is true or false, not {strict_json.shown(value)}")
    return value
