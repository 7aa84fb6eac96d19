"""Automatic borders: the slowest stage as fast as it can be, then as few bytes as possible between stages.

A forward is a chain of calls, and every call of the step has an anchor in it (`placement`), so what a stage costs
depends on its two borders only. With candidates 0 = c0 < c1 < ... < cn = end of the forward:

    time(i, j)     forward and backward time of all calls anchored in [ci, cj)               a difference of prefix sums
    crossing(i)    bytes of values made on one side of ci and read on the other one, activations and gradients
    kept(i, j)     bytes of forward values that backward calls anchored in [ci, cj) read      (`kept_matrix`)

    fastest(s, j) = min over i < j of max(fastest(s - 1, i), time(i, j))                      (`fastest_us`)
    T = fastest(num_stages, n)
    best(s, j)    = min over i < j, time(i, j) <= T * (1 + slack), of
                    (bytes(s - 1, i) + crossing(i), max(slowest(s - 1, i), time(i, j)))       (`leanest`)

compared bytes first, then times. Both are exact on the candidates; a limit on kept(i, j) leaves some stages out.

*Candidates* lie between two calls that take time, each where the fewest bytes cross. Of these, the ones where no more
cross than at the next ones are enough, unless the slowest stage would be much slower for it (`_MOST_WASTE`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import fx

from wholestep import _torch
from wholestep.cost.memory import storage_bytes, tensors_in
from wholestep.errors import SplitError
from wholestep.graph import Phase, SlotKind, StepGraph
from wholestep.pipe.placement import find_anchors, forward_calls
from wholestep.pipe.shares import summed

_MOST_WASTE = 1.1
_MOST_CANDIDATES = 512
# Sums of the same times in another order differ by this much at most.
_ROUNDING = 1e-9

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Tally:
    """Bytes that a stage has if any of some places in the forward lies in it: a value that is kept, a parameter."""

    num_bytes: int
    anchors: tuple[int, ...]

    def is_in(self, begin: int, end: int) -> bool:
        return any(begin <= anchor < end for anchor in self.anchors)


@dataclass(frozen=True)
class Profile:
    """A step by places in its forward: times by anchor, crossing bytes by border (0 to the number of calls).

    `has_forward` says where a forward call is anchored at all. `kept` are forward values that the backward reads,
    `parameters` those that anything reads.
    """

    forward_us: tuple[float, ...]
    backward_us: tuple[float, ...]
    crossing_bytes: tuple[int, ...]
    has_forward: tuple[bool, ...]
    kept: tuple[Tally, ...]
    parameters: tuple[Tally, ...]

    @property
    def num_calls(self) -> int:
        return len(self.forward_us)


def profile(graph: StepGraph, times_us: Mapping[fx.Node, float]) -> Profile:
    """Look at a step graph of one micro-batch, given the time of each of its calls."""
    anchors, free = find_anchors(graph)
    early = set(forward_calls(graph))
    count = len(early)
    forward_us, backward_us = [0.0] * count, [0.0] * count
    for node, anchor in anchors.items():
        (forward_us if node in early else backward_us)[anchor] += times_us.get(node, 0.0)
    has_forward = [False] * count
    for node in early & anchors.keys():
        has_forward[anchors[node]] = True
    return Profile(
        tuple(forward_us),
        tuple(backward_us),
        _crossing(graph, anchors, count),
        tuple(has_forward),
        _kept(anchors),
        _parameters(graph, anchors, free),
    )


def _crossing(graph: StepGraph, anchors: Mapping[fx.Node, int], count: int) -> tuple[int, ...]:
    """Bytes over each border. Terms of a parameter's gradient stay where they are: they are added up across stages."""
    sums = {node for value in graph.results.values() for node in summed(value)}
    changes = [0] * (count + 2)
    for node, anchor in anchors.items():
        readers = [anchors[user] for user in node.users if user in anchors and user not in sums]
        num_bytes = sum(_num_bytes(tensor) for tensor in tensors_in(node.meta["val"]))
        changes[min([anchor, *readers]) + 1] += num_bytes
        changes[max([anchor, *readers]) + 1] -= num_bytes
    crossing: list[int] = []
    for change in changes[:-1]:
        crossing.append((crossing[-1] if crossing else 0) + change)
    return tuple(crossing)


def _num_bytes(tensor: torch.Tensor) -> int:
    return _torch.optimization_hint(tensor.numel()) * tensor.element_size()


def _kept(anchors: Mapping[fx.Node, int]) -> tuple[Tally, ...]:
    """Memory that forward calls fill and backward calls read; views of one storage are one."""
    found: dict[int, tuple[int, set[int]]] = {}
    for node in anchors:
        value = node.meta["val"]
        late = {anchors[user] for user in node.users if user in anchors and user.meta["phase"] is not Phase.FORWARD}
        if node.meta["phase"] is Phase.FORWARD and late and isinstance(value, torch.Tensor):
            found.setdefault(_torch.storage_key(value), (storage_bytes(value), set()))[1].update(late)
    return tuple(Tally(num_bytes, tuple(sorted(places))) for num_bytes, places in found.values())


def _parameters(graph: StepGraph, anchors: Mapping[fx.Node, int], free: frozenset[fx.Node]) -> tuple[Tally, ...]:
    found: list[Tally] = []
    for slot_id, node in graph.placeholders().items():
        if not slot_id.startswith(f"{SlotKind.PARAM}."):
            continue
        pending, readers = [node], set[int]()
        while pending:
            for user in pending.pop().users:
                if user in free:
                    pending.append(user)
                elif user in anchors:
                    readers.add(anchors[user])
        found.append(Tally(_num_bytes(node.meta["val"]), tuple(sorted(readers))))
    return tuple(found)


@dataclass(frozen=True)
class Limit:
    """The most that a stage may keep for its backward; `in_flight` micro-batches of each stage are kept at a time."""

    num_bytes: int
    in_flight: tuple[int, ...]


def balance(
    profile: Profile, num_stages: int, *, ranks: Mapping[int, int], slack: float = 0.02, limit: Limit | None = None
) -> tuple[int, ...]:
    """Borders for a number of stages.

    Where several places are as good, that with the lowest rank is taken (`ranks`: how deep inside modules a place is,
    for those that are at the border of one). With `slack`, the slowest stage may be slower by that share of it if fewer
    bytes cross. Raises `SplitError` for more stages than there are ops and for a limit that cannot be kept.
    """
    everywhere = _everywhere(profile, ranks)
    if num_stages > len(everywhere) + 1:
        raise SplitError(
            f"the forward cannot be cut into {num_stages} stages: it has {len(everywhere) + 1} ops that take time, "
            f"so {len(everywhere) + 1} stages are the most"
        )
    most = max(_MOST_CANDIDATES, 2 * num_stages)
    everywhere = _thinned(everywhere, profile, most)
    all_places = Chain(profile, everywhere, num_stages, limit)
    few_places = Chain(profile, _thinned(_minima(everywhere, profile), profile, most), num_stages, limit)
    if not np.isfinite(all_places.fastest_us):
        assert limit is not None, "every number of stages up to that of ops is possible"
        raise SplitError(_too_little(limit, num_stages, all_places.least_kept()))
    chain = few_places if few_places.fastest_us <= _MOST_WASTE * all_places.fastest_us else all_places
    return chain.leanest(slack)


def _too_little(limit: Limit, num_stages: int, least_bytes: float) -> str:
    return (
        f"no cut into {num_stages} stages keeps each within {limit.num_bytes} bytes of activations; "
        f"{least_bytes:.0f} bytes are the least that is enough"
    )


def _everywhere(profile: Profile, ranks: Mapping[int, int]) -> list[int]:
    """The best border between each two forward calls that take time."""
    timed = [number for number, time_us in enumerate(profile.forward_us) if time_us > 0]
    deepest = len(profile.forward_us)
    return [
        min(
            range(before + 1, behind + 1),
            key=lambda border: (profile.crossing_bytes[border], ranks.get(border, deepest), border),
        )
        for before, behind in pairwise(timed)
    ]


def _minima(borders: Sequence[int], profile: Profile) -> list[int]:
    """Those borders that no more bytes cross than their neighbours."""
    crossing = [profile.crossing_bytes[border] for border in borders]
    return [
        border
        for index, border in enumerate(borders)
        if crossing[index] <= min(crossing[max(0, index - 1) : index + 2], default=0)
    ]


def _thinned(borders: Sequence[int], profile: Profile, most: int) -> list[int]:
    """At most so many borders, evenly: of some in a row, that which the fewest bytes cross."""
    if len(borders) <= most:
        return list(borders)
    edges = [len(borders) * part // most for part in range(most + 1)]
    return [
        min(borders[begin:end], key=lambda border: (profile.crossing_bytes[border], border))
        for begin, end in pairwise(edges)
    ]


class Chain:
    """The dynamic programs on a list of candidates; see above."""

    def __init__(self, profile: Profile, borders: Sequence[int], num_stages: int, limit: Limit | None) -> None:
        self.num_stages = num_stages
        self.places = [0, *borders, profile.num_calls]
        total_us = np.array(profile.forward_us) + np.array(profile.backward_us)
        prefix = np.concatenate([[0.0], np.cumsum(total_us)])[self.places]
        self.times: Floats = prefix[None, :] - prefix[:, None]
        self.crossing: Floats = np.array([profile.crossing_bytes[place] for place in self.places], dtype=np.float64)
        self.crossing[0] = 0.0  # no stage comes before the first one
        self.limit = limit
        self.kept = None if limit is None else kept_matrix(profile.kept, self.places)
        self.is_ahead = np.triu(np.ones(self.times.shape, dtype=bool), 1)

    def _allowed(self, stage: int) -> NDArray[np.bool_]:
        """Whether a stage may reach from i to j."""
        if self.limit is None or self.kept is None:
            return self.is_ahead
        return self.is_ahead & (self.kept * self.limit.in_flight[stage] <= self.limit.num_bytes)

    @cached_property
    def fastest_us(self) -> float:
        """The time of the slowest stage at best; infinite if nothing is allowed."""
        return self._least_worst(np.where(self._allowed(stage), self.times, np.inf) for stage in range(self.num_stages))

    def least_kept(self) -> float:
        """The least limit on kept bytes that can be kept."""
        limit, kept = self.limit, self.kept
        assert limit is not None
        assert kept is not None
        return self._least_worst(np.where(self.is_ahead, kept * number, np.inf) for number in limit.in_flight)

    def _least_worst(self, costs: Iterable[Floats]) -> float:
        """The least of the largest cost of a stage, `costs` of the first stage first."""
        best = np.full(len(self.places), np.inf)
        best[0] = 0.0
        for cost in costs:
            best = np.maximum(best[:, None], cost).min(axis=0)
        return float(best[-1])

    def leanest(self, slack: float) -> tuple[int, ...]:
        """Borders that the fewest bytes cross, of those with a slowest stage that is fast enough."""
        limit_us = self.fastest_us * (1 + slack + _ROUNDING)
        num_bytes = np.full(len(self.places), np.inf)
        slowest = np.zeros(len(self.places))
        num_bytes[0] = 0.0
        chosen: list[NDArray[np.intp]] = []
        for stage in range(self.num_stages):
            is_open = self._allowed(stage) & (self.times <= limit_us)
            total = np.where(is_open, (num_bytes + self.crossing)[:, None], np.inf)
            num_bytes = total.min(axis=0)
            slow = np.where(total == num_bytes, np.maximum(slowest[:, None], self.times), np.inf)
            chosen.append(slow.argmin(axis=0))
            slowest = slow.min(axis=0)
        borders: list[int] = []
        place: Any = len(self.places) - 1
        for stage in reversed(range(1, self.num_stages)):
            place = chosen[stage][place]
            borders.append(self.places[place])
        return tuple(reversed(borders))


def kept_matrix(tallies: Sequence[Tally], places: Sequence[int]) -> Floats:
    """Bytes of tallies in each stage from places i to j: each counts once, at the first of its anchors from i on."""
    changes = np.zeros((len(places) + 1, len(places) + 1))
    for tally in tallies:
        segments = np.unique(np.searchsorted(places, tally.anchors, side="right") - 1)
        before = -1
        for segment in segments.tolist():
            changes[before + 1, segment + 1] += tally.num_bytes
            changes[segment + 1, segment + 1] -= tally.num_bytes
            before = segment
    return changes.cumsum(axis=0).cumsum(axis=1)[: len(places), : len(places)]
