"""Decide how gradients travel: which share a bucket, in which order, and whose update crosses the iteration border.

Facts in, plan out: nothing here touches a graph or a process group; the same facts give the same plan on every rank.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from wholestep.comm.bucket import MEGABYTE, fill_buckets
from wholestep.comm.timeline import Message, Timeline, delayed, order_by_need, simulate
from wholestep.cost import Link
from wholestep.errors import PassError

# Buckets below this are all latency.
_SMALLEST_BYTES = MEGABYTE // 4
_FIRST_BYTES = MEGABYTE
_ALIGNMENT_BYTES = 64
# Figures are never exact, compute shares the machine with communication, and no two ranks are equally fast all the
# time: a plan is also judged with the link so much slower, and with another rank so much of a step behind.
_SLOWER = 1.3
_SKEW = 0.06
# A plan must shorten the step by this share to be worth more buckets or more moves.
_WORTHWHILE = 0.002


@dataclass(frozen=True)
class Gradient:
    """What the planner knows of one gradient.

    `kind` groups what may share a bucket. Times are microseconds of compute from the start of the step; `own_us` is the
    compute that serves this gradient alone. `stays` says why its update cannot move to the next iteration; empty if it
    can.
    """

    key: str
    num_bytes: int
    kind: str
    ready_us: float = 0.0
    needed_us: float = 0.0
    update_us: float = 0.0
    own_us: float = 0.0
    stays: str = ""


@dataclass(frozen=True)
class BucketPlan:
    """One bucket: its gradients, whether its update moves to the next iteration, and why.

    `late` says that the backward computes its gradients last, because others are more urgent.
    """

    keys: tuple[str, ...]
    num_bytes: int
    moved: bool
    reason: str
    late: bool = False


@dataclass(frozen=True)
class DataParallelPlan:
    """How the gradients of a step travel. Buckets are in the order in which every rank issues them.

    Where the step was simulated: `predicted_us` is its length, `exposed_us` what of it is waiting for communication,
    `unmoved_us` its length if no update moved; `compute_us` is its forward and backward, `travel_us` all communication.
    """

    world: int
    average: bool
    buckets: tuple[BucketPlan, ...]
    link: str = ""
    compute_us: float = 0.0
    travel_us: float = 0.0
    predicted_us: float = 0.0
    exposed_us: float = 0.0
    unmoved_us: float = 0.0

    @property
    def moved(self) -> tuple[int, ...]:
        """Numbers of the buckets whose update runs in the next iteration."""
        return tuple(index for index, bucket in enumerate(self.buckets) if bucket.moved)

    @property
    def late(self) -> tuple[int, ...]:
        """Numbers of the buckets whose gradients are computed last."""
        return tuple(index for index, bucket in enumerate(self.buckets) if bucket.late)

    def to_json(self) -> str:
        """The plan as text, the same for equal plans."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @property
    def fingerprint(self) -> str:
        """What ranks compare before the first collective."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Facts:
    """Everything a plan depends on, in the order in which the backward finishes the gradients."""

    world: int
    average: bool
    gradients: tuple[Gradient, ...]
    compute_us: float
    link: Link | None

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "link": None if self.link is None else str(self.link)}

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Facts:
        return Facts(
            world=values["world"],
            average=values["average"],
            gradients=tuple(Gradient(**gradient) for gradient in values["gradients"]),
            compute_us=values["compute_us"],
            link=None if values["link"] is None else Link.from_text(values["link"]),
        )


def decide(facts: Facts, *, bucket_mb: float, cross_iteration: str | Sequence[str]) -> DataParallelPlan:
    """The plan for a step.

    `"none"`, `"all"` and a list of names leave nothing to judge: buckets of `bucket_mb` in the order of the backward.
    `"auto"` simulates the step with smaller buckets, with overtaking and with moved updates, and takes the shortest.
    """
    limit_bytes = int(bucket_mb * MEGABYTE)
    if cross_iteration == "auto" and facts.link is not None:
        return _Search(facts, facts.link, limit_bytes).best()
    _check_names(facts, cross_iteration)
    wanted = _wanted(cross_iteration)
    sizes = [(g.key, g.num_bytes, (g.kind, wanted(g.key) is None and not g.stays)) for g in facts.gradients]
    by_key = {gradient.key: gradient for gradient in facts.gradients}
    buckets = [
        _bucket([by_key[key] for key in keys], wanted) for keys in fill_buckets(sizes, limit_bytes, _FIRST_BYTES)
    ]
    return DataParallelPlan(facts.world, facts.average, tuple(buckets))


def _check_names(facts: Facts, cross_iteration: str | Sequence[str]) -> None:
    names = () if isinstance(cross_iteration, str) else tuple(cross_iteration)
    keys = [gradient.key for gradient in facts.gradients]
    for name in names:
        if not any(key == name or key.startswith((f"{name}.", f"{name}#")) for key in keys):
            raise PassError(f"cross_iteration names '{name}', but no parameter or module of that name gets a gradient")


def _wanted(cross_iteration: str | Sequence[str]) -> Callable[[str], str | None]:
    """For a gradient: None if its update is to move, otherwise why not."""
    if cross_iteration == "all":
        return lambda _: None
    if isinstance(cross_iteration, str):
        return lambda _: "cross_iteration='none'" if cross_iteration == "none" else "a single rank has nothing to hide"
    names = tuple(cross_iteration)

    def check(key: str) -> str | None:
        name = key.split("#")[0]
        is_named = any(name == wanted or name.startswith(f"{wanted}.") for wanted in names)
        return None if is_named else "not named in cross_iteration"

    return check


def _bucket(gradients: list[Gradient], wanted: Callable[[str], str | None]) -> BucketPlan:
    stays = next((gradient.stays for gradient in gradients if gradient.stays), "") or wanted(gradients[0].key) or ""
    num_bytes = sum(gradient.num_bytes for gradient in gradients)
    reason = f"stays: {stays}" if stays else "moves: asked for by cross_iteration"
    return BucketPlan(_keys(gradients), num_bytes, not stays, reason)


def _keys(gradients: Sequence[Gradient]) -> tuple[str, ...]:
    """A bucket's gradients in the order in which they lie in it: odd sizes last, so that the others are aligned."""
    return tuple(
        gradient.key for gradient in sorted(gradients, key=lambda each: each.num_bytes % _ALIGNMENT_BYTES != 0)
    )


def _late_sets(messages: Sequence[Message], order: Sequence[int]) -> list[list[int]]:
    """Messages whose gradients might be computed last: some that others overtake anyway, some that are needed last."""
    last_ready = max(order, key=lambda index: messages[index].ready_us)
    overtaken = [index for index in order[order.index(last_ready) + 1 :] if messages[index].moved]
    sets = [overtaken[at:] for at in range(len(overtaken))]
    by_need = sorted((i for i in order if messages[i].moved and i != last_ready), key=lambda i: messages[i].needed_us)
    for share in (0.05, 0.1, 0.15, 0.2, 0.3):
        length = max(1, round(share * len(by_need)))
        for start in (len(by_need) - length, len(by_need) // 2, len(by_need) // 4):
            sets.append(by_need[max(0, start) : max(0, start) + length])
    return [late for late in sets if late]


@dataclass(frozen=True)
class _Candidate:
    """One way to do it: buckets as gradients in issue order, which of them move or come late, and what that takes."""

    buckets: tuple[tuple[Gradient, ...], ...]
    moved: tuple[bool, ...]
    late: tuple[bool, ...]
    timeline: Timeline
    arrives_late_us: tuple[float, ...]
    cost_us: float


class _Search:
    """Tries bucket sizes, orders and moves on the simulator."""

    def __init__(self, facts: Facts, link: Link, limit_bytes: int) -> None:
        self.facts = facts
        self.link = link
        self.limit_bytes = limit_bytes
        self.by_key = {gradient.key: gradient for gradient in facts.gradients}

    def best(self) -> DataParallelPlan:
        """The shortest step; of steps that take as long, the one with fewer and unmoved buckets."""
        candidates = [candidate for buckets in self._bucketings() for candidate in self._candidates(buckets)]
        best = candidates[0]
        limit_us = best.timeline.period_us
        for candidate in candidates[1:]:
            is_shorter = candidate.cost_us < best.cost_us * (1 - _WORTHWHILE)
            if is_shorter and candidate.timeline.period_us <= limit_us:
                best = candidate
        settled = self._without_idle_moves(best)
        best = settled if settled.timeline.period_us <= limit_us else best
        buckets = tuple(self._plan(best, index) for index in range(len(best.buckets)))
        return DataParallelPlan(
            self.facts.world,
            self.facts.average,
            buckets,
            link=str(self.link),
            compute_us=round(self.facts.compute_us, 1),
            travel_us=round(sum(self.link.time_us(bucket.num_bytes) for bucket in buckets), 1),
            predicted_us=round(best.timeline.period_us, 1),
            exposed_us=round(sum(best.timeline.exposed_us), 1),
            unmoved_us=round(candidates[0].timeline.period_us, 1),
        )

    def _bucketings(self) -> list[list[tuple[Gradient, ...]]]:
        """Ways to fill buckets in the order of the backward, from the largest allowed down to small ones."""
        joined = [(g.key, g.num_bytes, g.kind) for g in self.facts.gradients]
        apart = [(g.key, g.num_bytes, (g.kind, bool(g.stays))) for g in self.facts.gradients]
        found = [self._filled(joined, self.limit_bytes)]
        limit = self.limit_bytes
        while limit >= _SMALLEST_BYTES or limit == self.limit_bytes:
            filled = self._filled(apart, limit)
            if filled != found[-1]:
                found.append(filled)
            limit //= 2
        return found

    def _filled(self, sizes: list[tuple[str, int, Any]], limit: int) -> list[tuple[Gradient, ...]]:
        buckets = fill_buckets(sizes, limit, min(limit, _FIRST_BYTES))
        return [tuple(self.by_key[key] for key in keys) for keys in buckets]

    def _candidates(self, buckets: list[tuple[Gradient, ...]]) -> list[_Candidate]:
        num_buckets = len(buckets)
        order = list(range(num_buckets))
        in_place = self._judge(buckets, order, [False] * num_buckets)
        movable = [not any(gradient.stays for gradient in bucket) for bucket in buckets]
        if not any(movable):
            return [in_place]
        candidates = [in_place, self._judge(buckets, order, movable)]
        waves = {gradient.kind.rpartition("/")[2] for bucket in buckets for gradient in bucket}
        if len(waves) == 1:
            messages = self._messages(buckets, movable)
            order = order_by_need(messages)
            candidates.append(self._judge(buckets, order, movable))
            candidates += [self._with_late(buckets, movable, late) for late in _late_sets(messages, order)]
        return candidates

    def _with_late(self, buckets: list[tuple[Gradient, ...]], movable: list[bool], late: list[int]) -> _Candidate:
        """Compute last what has to wait for the link anyway; the most urgent gradients come earlier that way."""
        own_us = [sum(gradient.own_us for gradient in bucket) for bucket in buckets]
        messages = delayed(self._messages(buckets, movable), own_us, late, self.facts.compute_us)
        order = order_by_need(messages)
        return self._judge(buckets, order, movable, [index for index in order if index in late])

    def _judge(
        self, buckets: list[tuple[Gradient, ...]], order: list[int], moved: list[bool], late: Sequence[int] = ()
    ) -> _Candidate:
        own_us = [sum(gradient.own_us for gradient in bucket) for bucket in buckets]
        messages = delayed(self._messages(buckets, moved), own_us, late, self.facts.compute_us)
        in_order = [messages[index] for index in order]
        timeline = simulate(in_order, self.facts.compute_us)
        slower = simulate([replace(m, travel_us=_SLOWER * m.travel_us) for m in in_order], self.facts.compute_us)
        skewed = simulate(in_order, self.facts.compute_us, skew_us=_SKEW * self.facts.compute_us)
        return _Candidate(
            tuple(buckets[index] for index in order),
            tuple(moved[index] for index in order),
            tuple(index in late for index in order),
            timeline,
            tuple(map(max, slower.arrives_us, skewed.arrives_us)),
            timeline.period_us + slower.period_us + skewed.period_us,
        )

    def _messages(self, buckets: Sequence[tuple[Gradient, ...]], moved: Sequence[bool]) -> list[Message]:
        return [
            Message(
                ready_us=max(gradient.ready_us for gradient in bucket),
                needed_us=min(gradient.needed_us for gradient in bucket),
                update_us=sum(gradient.update_us for gradient in bucket),
                travel_us=self.link.time_us(sum(gradient.num_bytes for gradient in bucket)),
                moved=is_moved,
            )
            for bucket, is_moved in zip(buckets, moved, strict=True)
        ]

    def _without_idle_moves(self, best: _Candidate) -> _Candidate:
        """Take back moves that gain nothing: what arrives before the backward ends, even late, is applied then."""
        pairs = zip(best.moved, best.arrives_late_us, strict=True)
        moved = [is_moved and arrives_us > self.facts.compute_us for is_moved, arrives_us in pairs]
        order = list(range(len(best.buckets)))
        return self._judge(list(best.buckets), order, moved, [index for index in order if best.late[index]])

    def _plan(self, best: _Candidate, index: int) -> BucketPlan:
        bucket, is_moved = best.buckets[index], best.moved[index]
        num_bytes = sum(gradient.num_bytes for gradient in bucket)
        stays = next((gradient.stays for gradient in bucket if gradient.stays), "")
        late_us = best.timeline.arrives_us[index] - self.facts.compute_us
        if stays:
            reason = f"stays: {stays}"
        elif is_moved and late_us > 0:
            reason = f"moves: arrives {late_us / 1e3:.1f} ms after the backward, hidden by the next forward"
        elif is_moved:
            reason = f"moves: arrives only {-late_us / 1e3:.1f} ms before the end of the backward"
        else:
            reason = (
                f"stays: arrives {abs(late_us) / 1e3:.1f} ms {'before' if late_us < 0 else 'after'} the end of the "
            )
            reason += "backward; moving it would not shorten the step"
        return BucketPlan(_keys(bucket), num_bytes, is_moved, reason, late=best.late[index])
