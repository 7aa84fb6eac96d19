"""Replicas on a cluster: which of them are equal, and the lanes, ports and messages of those that are simulated.

A job has P ranks, a cluster N = R P. Replica r of the job is on ranks r P ... r P + P - 1, and rank p of every replica
has the same stages: these R ranks are *column* p, and average their gradients.

*Folding.* Let the kind of a replica be what its ranks see: for each of its ranks the node relative to the first one's,
and how slow the rank is. Two replicas of one kind do the same at every moment:

    1. inside a replica everything is determined by the job, the wires between its ranks and their slowness, that is by
       its kind, and by the moments at which its collectives end;
    2. a collective of column p begins when the last rank of the column is ready, and ends for all of them at once;
       it takes a time that depends on the column alone.

By induction over events: if replicas of a kind have agreed so far, they issue the next collective at one moment (1), so
the last of the column is the last over the kinds, and all get its result at one moment (2). So one replica of each kind
is run, and columns wait for one rank of each kind. A port of a rank carries the messages of its own replica and the
collectives of its column; replicas of a kind have equal ports, and the busiest port of a column is the busiest over the
kinds. Hence folded and unfolded runs have the same times, which tests check. With P = 1 and equal ranks there is one
kind, however many ranks there are; without stragglers never more than ranks per node.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass

from wholestep.cost import Wire
from wholestep.errors import SimulationError
from wholestep.sim.cluster import Cluster, Collective
from wholestep.sim.engine import Engine

Slowness = Mapping[int, float]


@dataclass(frozen=True)
class Kind:
    """Replicas that do the same; the first of them stands for all."""

    replicas: tuple[int, ...]

    @property
    def num_replicas(self) -> int:
        return len(self.replicas)


def kinds_of(cluster: Cluster, num_ranks: int, slowness: Slowness, *, is_folded: bool = True) -> list[Kind]:
    """The kinds of all replicas of a job of `num_ranks` ranks; every replica by itself if nothing is to be folded."""
    num_replicas, rest = divmod(cluster.num_ranks, num_ranks)
    if rest or not num_replicas:
        raise SimulationError(
            f"a job of {num_ranks} ranks does not fill a cluster of {cluster.num_ranks}: choose a number of "
            "stages that divides it"
        )
    if not is_folded:
        return [Kind((replica,)) for replica in range(num_replicas)]
    slow_replicas = {rank // num_ranks for rank, factor in slowness.items() if factor != 1.0}
    members: dict[Hashable, list[int]] = {}
    for replica in range(num_replicas):
        first = replica * num_ranks
        # Where a replica begins in its node decides which of its ranks share nodes; within one node all do.
        offset = first % cluster.ranks_per_node
        key: Hashable = 0 if offset + num_ranks <= cluster.ranks_per_node else offset
        if replica in slow_replicas:
            key = key, tuple(slowness.get(first + place, 1.0) for place in range(num_ranks))
        members.setdefault(key, []).append(replica)
    return [Kind(tuple(replicas)) for replicas in members.values()]


@dataclass(frozen=True, slots=True)
class Span:
    """Something that a rank of the simulation did: `lane` is `"compute"`, `"send"` or `"reduce"`."""

    lane: str
    name: str
    task: int


class World:
    """The ranks that are simulated, one of each kind and place: adds their tasks, and remembers what they are."""

    def __init__(
        self,
        cluster: Cluster,
        num_ranks: int,
        slowness: Slowness | None = None,
        *,
        is_folded: bool = True,
    ) -> None:
        self.cluster = cluster
        self.num_ranks = num_ranks
        self.slowness = slowness or {}
        self.kinds = kinds_of(cluster, num_ranks, self.slowness, is_folded=is_folded)
        self.engine = Engine()
        self.num_replicas = cluster.num_ranks // num_ranks
        self.spans: dict[tuple[int, int], list[Span]] = {}
        self._counts = [self._column(place) for place in range(num_ranks)]
        self._last: dict[tuple[int, int], int] = {}
        self._wires: dict[tuple[int, int, int], Wire] = {}

    def _column(self, place: int) -> tuple[int, ...]:
        return self.cluster.shape_of(range(place, self.cluster.num_ranks, self.num_ranks))

    def rank(self, kind: int, place: int) -> int:
        """The number in the cluster of the rank that stands for a kind and a place."""
        return self.kinds[kind].replicas[0] * self.num_ranks + place

    def kind_of(self, replica: int) -> int:
        """The kind of a replica."""
        return next(number for number, kind in enumerate(self.kinds) if replica in kind.replicas)

    def compute(self, kind: int, place: int, name: str, time_us: float, after: Iterable[int] = ()) -> int:
        """Work on a rank's computing lane, behind all that was added to it before."""
        key = kind, place
        before = [self._last[key]] if key in self._last else []
        work_us = time_us * self.slowness.get(self.rank(kind, place), 1.0)
        self._last[key] = task = self.engine.add(("compute", *key), work_us, [*before, *after])
        self._record(key, "compute", name, task)
        return task

    def last(self, kind: int, place: int) -> int:
        """What a rank computes last, of all that was added."""
        return self._last[kind, place]

    def wire(self, kind: int, source: int, target: int) -> Wire:
        """What joins two places of a replica."""
        key = kind, source, target
        if key not in self._wires:
            self._wires[key] = self.cluster.wire(self.rank(kind, source), self.rank(kind, target))
        return self._wires[key]

    def send(self, kind: int, source: int, target: int, name: str, num_bytes: int, after: Iterable[int]) -> int:
        """A message from one place of a replica to another, on a connection of their own."""
        wire = self.wire(kind, source, target)
        time_us = wire.time_us(num_bytes)
        nodes = {self.cluster.node_of(self.rank(kind, place)) for place in (source, target)}
        level = "inside" if len(nodes) == 1 else "between"
        share = wire.load(num_bytes, time_us)
        task = self.engine.add(
            ("connection", kind, source, target),
            time_us,
            after,
            ports=(("out", level, kind, source), ("in", level, kind, target)),
            steals=((("compute", kind, source), share), (("compute", kind, target), share)),
        )
        self._record((kind, source), "send", name, task)
        return task

    def all_reduce(self, place: int, name: str, num_bytes: int, after: Iterable[int]) -> int:
        """An all-reduce of a column, behind those that were added before; `after` has tasks of each kind."""
        found = self.collective(place, num_bytes)
        load = sum(
            wire.load(sent, found.time_us)
            for wire, sent in (
                (self.cluster.inside, found.inside_bytes),
                (self.cluster.between, found.between_bytes),
            )
        )
        levels = [level for level, sent in (("inside", found.inside_bytes), ("between", found.between_bytes)) if sent]
        members = range(len(self.kinds))
        task = self.engine.add(
            ("group", place),
            found.time_us,
            after,
            ports=[(way, level, kind, place) for kind in members for level in levels for way in ("out", "in")],
            steals=[(("compute", kind, place), load) for kind in members],
        )
        for kind in members:
            self._record((kind, place), "reduce", name, task)
        return task

    def collective(self, place: int, num_bytes: int) -> Collective:
        """What an all-reduce of a column takes."""
        return self.cluster.all_reduce_over(self._counts[place], num_bytes)

    def issue_us(self, place: int) -> float:
        """What starting a collective of a column takes of a computing lane, and again what its end takes."""
        return self.cluster.between.issue_us if len(self._counts[place]) > 1 else self.cluster.inside.issue_us

    def _record(self, key: tuple[int, int], lane: str, name: str, task: int) -> None:
        self.spans.setdefault(key, []).append(Span(lane, name, task))
