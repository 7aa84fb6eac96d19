"""The simulated timeline against one that ticks, and what every plan for a step's gradients must keep."""

from __future__ import annotations

import dataclasses
import json
from collections import deque
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from wholestep.comm import plan as plan_module
from wholestep.comm.bucket import MEGABYTE, fill_buckets
from wholestep.comm.plan import DataParallelPlan, Facts, Gradient, decide
from wholestep.comm.timeline import Message, Timeline, delayed, order_by_need, simulate
from wholestep.cost import Link
from wholestep.errors import PassError

DETERMINISTIC = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=200,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow],
)


class Clock:
    """A link that carries one message at a time, tick by tick; `skew` is how much later other ranks are ready."""

    def __init__(self, messages: Sequence[Message], skew: int) -> None:
        self.now = 0
        self.queue: deque[tuple[int, int]] = deque()
        self.skew = skew
        self._ready: dict[tuple[int, int], int] = {}
        self.departs: dict[tuple[int, int], int] = {}
        self.arrives: dict[tuple[int, int], int] = {}
        self._messages = messages
        self._current: tuple[int, int] | None = None

    def send(self, message: tuple[int, int]) -> None:
        self.queue.append(message)
        self._ready[message] = self.now + self.skew

    def tick(self) -> None:
        if self._current is None and self.queue and self._ready[self.queue[0]] <= self.now:
            self._current = self.queue.popleft()
            self.departs[self._current] = self.now
        self.now += 1
        if self._current is not None:
            travelled = self.now - self.departs[self._current]
            if travelled == self._messages[self._current[1]].travel_us:
                self.arrives[self._current] = self.now
                self._current = None


def ticked(messages: Sequence[Message], compute: int, skew: int = 0, num_iterations: int = 4) -> Timeline:
    """The last iteration of a loop, one unit of time after the other; all figures are whole numbers."""
    program: list[tuple[str, int]] = []
    for moment in range(compute + 1):
        needed = [index for index, message in enumerate(messages) if message.moved and message.needed_us == moment]
        program += [("apply", index) for index in needed]
        program += [("ready", index) for index, message in enumerate(messages) if message.ready_us == moment]
        program += [("compute", 0)] * (moment < compute)
    program += [("apply", index) for index, message in enumerate(messages) if not message.moved]
    clock = Clock(messages, skew)
    started, exposed = 0, [0] * len(messages)
    for number in range(num_iterations):
        started, exposed = clock.now, [0] * len(messages)
        ready: list[int] = []
        num_sent = 0
        for what, index in program:
            if what == "compute":
                clock.tick()
            elif what == "ready":
                ready.append(index)
                while num_sent in ready:
                    clock.send((number, num_sent))
                    num_sent += 1
            elif number or not messages[index].moved:
                awaited = (number - messages[index].moved, index)
                while awaited not in clock.arrives:
                    clock.tick()
                    exposed[index] += 1
                for _ in range(int(messages[index].update_us)):
                    clock.tick()
    period, last = clock.now - started, [(num_iterations - 1, index) for index in range(len(messages))]
    while not all(message in clock.arrives for message in last):
        clock.tick()
    departs, arrives = ([moments[message] - started for message in last] for moments in (clock.departs, clock.arrives))
    return Timeline(period, tuple(departs), tuple(arrives), tuple(exposed))


@st.composite
def loops(draw: st.DrawFn, *, is_step: bool = False) -> tuple[list[Message], int]:
    """Messages and compute; of a step all parameters are needed (by the forward) before any gradient is ready."""
    compute = draw(st.integers(1, 24))
    border = draw(st.integers(0, compute)) if is_step else None
    message = st.builds(
        Message,
        ready_us=st.integers(border or 0, compute),
        needed_us=st.integers(0, compute if border is None else border),
        update_us=st.integers(0, 5),
        travel_us=st.integers(1, 20),
        moved=st.booleans(),
    )
    return draw(st.lists(message, max_size=6)), compute


@DETERMINISTIC
@given(loops(), st.integers(0, 9))
def test_the_timeline_is_the_one_that_ticks(loop: tuple[list[Message], int], skew: int) -> None:
    messages, compute = loop
    assert simulate(messages, float(compute)) == ticked(messages, compute)
    assert simulate(messages, float(compute), skew_us=skew) == ticked(messages, compute, skew)


@DETERMINISTIC
@given(loops(is_step=True))
def test_the_timeline_has_settled(loop: tuple[list[Message], int]) -> None:
    messages, compute = loop
    assert simulate(messages, float(compute)).period_us == ticked(messages, compute, num_iterations=20).period_us


@DETERMINISTIC
@given(loops(is_step=True))
def test_no_period_is_shorter_than_its_work(loop: tuple[list[Message], int]) -> None:
    messages, compute = loop
    period_us = simulate(messages, float(compute)).period_us
    assert period_us >= compute + sum(message.update_us for message in messages)
    assert period_us >= sum(message.travel_us for message in messages)


@DETERMINISTIC
@given(loops())
def test_order_by_need_overtakes_and_never_idles(loop: tuple[list[Message], int]) -> None:
    messages, _ = loop
    order = order_by_need(messages)
    assert sorted(order) == list(range(len(messages)))
    by_ready = sorted(range(len(messages)), key=lambda index: messages[index].ready_us)
    assert _link_is_done(messages, order) == _link_is_done(messages, by_ready)
    at_once = [dataclasses.replace(message, ready_us=0) for message in messages]
    needs = [messages[index].needed_us for index in order_by_need(at_once)]
    assert needs == sorted(needs)


def _link_is_done(messages: Sequence[Message], order: Sequence[int]) -> float:
    """When the last message has arrived if nothing is waited for."""
    free = 0.0
    for index in order:
        free = max(free, messages[index].ready_us) + messages[index].travel_us
    return free


KINDS = ("float32/cpu/0", "float32/cpu/0", "float32/cpu/0", "bfloat16/cpu/0", "float32/cpu/1")


@st.composite
def facts_of_steps(draw: st.DrawFn) -> Facts:
    """Gradients in the order of a backward; what serves one alone comes behind the one before."""
    compute_us = float(draw(st.integers(1_000, 100_000)))
    gradient = st.builds(
        Gradient,
        key=st.just(""),
        num_bytes=st.integers(4, 4 * MEGABYTE),
        kind=st.sampled_from(KINDS),
        ready_us=st.integers(300, 1000).map(lambda part: compute_us * part / 1000),
        needed_us=st.integers(0, 300).map(lambda part: compute_us * part / 1000),
        update_us=st.integers(0, 300).map(lambda tenths: tenths / 10),
        stays=st.sampled_from(["", "", "", "the step returns it"]),
    )
    drawn = sorted(draw(st.lists(gradient, min_size=1, max_size=10)), key=lambda gradient: gradient.ready_us)
    starts = [compute_us * 0.3, *(each.ready_us for each in drawn)]
    own = [draw(st.sampled_from([0.0, 0.5, 1.0])) * (each.ready_us - start) for each, start in zip(drawn, starts)]
    gradients = [dataclasses.replace(each, key=f"w{index}", own_us=own[index]) for index, each in enumerate(drawn)]
    link = Link(float(draw(st.integers(1, 5000))), draw(st.integers(1, 20_000)) / 10)
    return Facts(2, draw(st.booleans()), tuple(gradients), compute_us, link)


BUCKET_MB = st.sampled_from([0.001, 0.5, 3.0, 25.0])
CROSS_ITERATION = st.sampled_from(["auto", "auto", "all", "none", ("w0",)])


@DETERMINISTIC
@given(facts_of_steps(), BUCKET_MB, CROSS_ITERATION)
def test_every_gradient_travels_once_with_its_kind(facts: Facts, bucket_mb: float, moved: str) -> None:
    plan = decide(facts, bucket_mb=bucket_mb, cross_iteration=moved)
    by_key = {gradient.key: gradient for gradient in facts.gradients}
    assert sorted(key for bucket in plan.buckets for key in bucket.keys) == sorted(by_key)
    for bucket in plan.buckets:
        members = [by_key[key] for key in bucket.keys]
        assert len({gradient.kind for gradient in members}) == 1
        assert bucket.num_bytes == sum(gradient.num_bytes for gradient in members)
        assert bucket.moved == bucket.reason.startswith("moves: ")
        assert not bucket.moved or not any(gradient.stays for gradient in members)
    assert plan.moved == tuple(index for index, bucket in enumerate(plan.buckets) if bucket.moved)


@DETERMINISTIC
@given(facts_of_steps(), BUCKET_MB, CROSS_ITERATION)
def test_the_same_facts_give_the_same_plan(facts: Facts, bucket_mb: float, moved: str) -> None:
    copied = Facts.from_dict(json.loads(json.dumps(facts.to_dict())))
    assert copied == facts
    plans = [decide(each, bucket_mb=bucket_mb, cross_iteration=moved) for each in (facts, facts, copied)]
    assert len({plan.to_json() for plan in plans}) == len({plan.fingerprint for plan in plans}) == 1
    assert json.loads(plans[0].to_json())["buckets"] == [
        dataclasses.asdict(b) | {"keys": list(b.keys)} for b in plans[0].buckets
    ]


def messages_of(facts: Facts, plan: DataParallelPlan) -> list[Message]:
    """A plan's buckets as the simulator sees them."""
    assert facts.link is not None
    by_key = {gradient.key: gradient for gradient in facts.gradients}
    members = [[by_key[key] for key in bucket.keys] for bucket in plan.buckets]
    messages = [
        Message(
            ready_us=max(gradient.ready_us for gradient in gradients),
            needed_us=min(gradient.needed_us for gradient in gradients),
            update_us=sum(gradient.update_us for gradient in gradients),
            travel_us=facts.link.time_us(bucket.num_bytes),
            moved=bucket.moved,
        )
        for bucket, gradients in zip(plan.buckets, members, strict=True)
    ]
    own_us = [sum(gradient.own_us for gradient in gradients) for gradients in members]
    return delayed(messages, own_us, plan.late, facts.compute_us)


@DETERMINISTIC
@given(facts_of_steps(), BUCKET_MB)
def test_auto_predicts_what_its_plan_takes(facts: Facts, bucket_mb: float) -> None:
    plan = decide(facts, bucket_mb=bucket_mb, cross_iteration="auto")
    timeline = simulate(messages_of(facts, plan), facts.compute_us)
    assert facts.link is not None
    travel_us = sum(facts.link.time_us(bucket.num_bytes) for bucket in plan.buckets)
    assert plan.predicted_us == pytest.approx(timeline.period_us, abs=0.1)
    assert plan.exposed_us == pytest.approx(sum(timeline.exposed_us), abs=0.1)
    assert plan.travel_us == pytest.approx(travel_us, abs=0.1)
    assert plan.predicted_us >= facts.compute_us + sum(gradient.update_us for gradient in facts.gradients) - 0.1
    assert plan.predicted_us >= travel_us - 0.1


@DETERMINISTIC
@given(loops(), st.data())
def test_what_is_computed_late_makes_room_for_the_rest(loop: tuple[list[Message], int], data: st.DataObject) -> None:
    messages, compute = sorted(loop[0], key=lambda message: message.ready_us), loop[1]
    late = data.draw(st.lists(st.sampled_from(range(len(messages))), unique=True) if messages else st.just([]))
    starts = [0.0, *(message.ready_us for message in messages)]
    own = [message.ready_us - start for message, start in zip(messages, starts)]
    after = delayed(messages, own, late, float(compute))
    for index, (old, new) in enumerate(zip(messages, after, strict=True)):
        assert new == dataclasses.replace(old, ready_us=new.ready_us)
        assert 0 <= new.ready_us <= compute
        assert index in late or new.ready_us <= old.ready_us
    assert [after[index].ready_us for index in late] == sorted(after[index].ready_us for index in late)
    assert delayed(messages, own, [], float(compute)) == messages


def cost_us(facts: Facts, plan: DataParallelPlan) -> float:
    """What plans are judged by: the step as predicted, with a slower link, and with another rank behind."""
    messages = messages_of(facts, plan)
    slower = [dataclasses.replace(message, travel_us=message.travel_us * plan_module._SLOWER) for message in messages]
    skew_us = plan_module._SKEW * facts.compute_us
    timelines = [
        simulate(messages, facts.compute_us),
        simulate(slower, facts.compute_us),
        simulate(messages, facts.compute_us, skew_us=skew_us),
    ]
    return sum(timeline.period_us for timeline in timelines)


def assert_auto_is_no_slower(facts: Facts, bucket_mb: float) -> None:
    auto, none = (decide(facts, bucket_mb=bucket_mb, cross_iteration=moved) for moved in ("auto", "none"))
    assert cost_us(facts, auto) <= cost_us(facts, none) * (1 + plan_module._WORTHWHILE) + 0.1


@DETERMINISTIC
@given(facts_of_steps(), BUCKET_MB)
def test_auto_is_never_slower_than_nothing_moved(facts: Facts, bucket_mb: float) -> None:
    movable = [dataclasses.replace(gradient, stays="") for gradient in facts.gradients]
    assert_auto_is_no_slower(dataclasses.replace(facts, gradients=tuple(movable)), bucket_mb)


@DETERMINISTIC
@given(facts_of_steps(), BUCKET_MB)
def test_auto_is_never_slower_than_nothing_moved_where_some_must_stay(facts: Facts, bucket_mb: float) -> None:
    assert_auto_is_no_slower(facts, bucket_mb)


@DETERMINISTIC
@given(facts_of_steps(), BUCKET_MB)
def test_what_moves_on_request(facts: Facts, bucket_mb: float) -> None:
    """All that can, nothing, or what is named; "all" is not held up by a neighbour that must stay."""
    stays = {gradient.key for gradient in facts.gradients if gradient.stays}
    keys = {gradient.key for gradient in facts.gradients}

    def moved(cross_iteration: str | tuple[str, ...]) -> set[str]:
        plan = decide(facts, bucket_mb=bucket_mb, cross_iteration=cross_iteration)
        return {key for bucket in plan.buckets if bucket.moved for key in bucket.keys}

    assert moved("none") == set()
    assert moved("all") == keys - stays
    assert moved(("w0",)) == {"w0"} - stays
    with pytest.raises(PassError, match="cross_iteration names 'w', but no parameter or module of that name"):
        moved(("w0", "w"))


@DETERMINISTIC
@given(
    st.lists(st.tuples(st.integers(1, 100), st.sampled_from("ab")), max_size=20),
    st.integers(1, 150),
    st.integers(1, 60),
)
def test_buckets_are_full_and_in_order(sizes: list[tuple[int, str]], limit: int, first: int) -> None:
    gradients = [(str(index), num_bytes, kind) for index, (num_bytes, kind) in enumerate(sizes)]
    buckets = [[int(key) for key in keys] for keys in fill_buckets(gradients, limit, first)]
    assert sorted(index for bucket in buckets for index in bucket) == list(range(len(sizes)))
    assert [bucket[-1] for bucket in buckets] == sorted(bucket[-1] for bucket in buckets)
    for bucket in buckets:
        assert len({sizes[index][1] for index in bucket}) == 1
        assert bucket == sorted(bucket)
        # Before its last gradient a bucket had room, or was less than half full.
        before = sum(sizes[index][0] for index in bucket[:-1])
        total = before + sizes[bucket[-1]][0]
        assert total <= limit or 2 * before < limit
