"""The rotated loop is the loop: random steps, moves and buckets, compared with the unrotated one bit for bit.

Ranks are simulated (`tests.simulated`): gradients on their way are poison. So are, as soon as a call has returned, its
batch, its learning rates and what it returned: all of these are the user's, who may do with them what they like.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, event, example, given, note, settings
from hypothesis import strategies as st
from tests.parity import RandomStream, differences
from tests.random_graphs import Step, Weight, batch, build, initial_state, steps
from tests.random_steps import Plan, build_world, call, make_batch, make_step, plans
from tests.simulated import Aborted, PlainLoop, RotatedLoop, Wire, unequal
from tests.twins import named_values, observe
from torch import Tensor

import wholestep
from wholestep.comm import AllReduce, Bucket, Overlap, SplitOptimizer, reducible_gradients
from wholestep.comm.bucket import format_groups
from wholestep.errors import PassError
from wholestep.graph import StepGraph
from wholestep.iteration import Kind, Rotate, leaf_closure, move_to_next_iteration, moved_nodes, update_blocks
from wholestep.passes import run_passes

WORLD = 2
DETERMINISTIC = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=120,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)


@dataclasses.dataclass(frozen=True)
class Rewrite:
    """What is done to a step.

    `buckets` numbers the gradients' buckets, None where nothing travels, `late` are positions of those computed last;
    `moved` are positions of updates that move, None for all that can; `leaves` are positions of nodes that move with
    everything that depends on them.
    """

    buckets: tuple[int, ...] | None = None
    late: tuple[int, ...] = ()
    moved: tuple[int, ...] | None = None
    leaves: tuple[int, ...] = ()
    finish: str = "reinplace"


@dataclasses.dataclass(frozen=True)
class Iteration:
    """One call: at which of its ops it fails (it is called again then), whether it is the last or flushed behind."""

    fails_at: int | None = None
    is_last: bool = False
    is_flushed: bool = False


rewrites = st.builds(
    Rewrite,
    buckets=st.none() | st.lists(st.integers(0, 3), min_size=1, max_size=5).map(tuple),
    late=st.just(()) | st.lists(st.integers(0, 5), max_size=2).map(tuple),
    moved=st.none() | st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple),
    leaves=st.just(()) | st.lists(st.integers(0, 200), max_size=2).map(tuple),
    finish=st.sampled_from(["", "reinplace", "reinplace", "reinplace,fill_buckets"]),
)
iterations = st.lists(
    st.builds(
        Iteration,
        fails_at=st.sampled_from([None, *range(60)]),
        is_last=st.sampled_from([False, False, False, True]),
        is_flushed=st.sampled_from([False, False, True]),
    ),
    min_size=2,
    max_size=6,
)


def groups_of(graph: StepGraph, numbers: tuple[int, ...]) -> str:
    """Buckets as the rewrite numbers them; a bucket holds one dtype, and waves come one after the other."""
    buckets: dict[Any, list[str]] = {}
    for index, gradient in enumerate(reducible_gradients(graph)):
        dtype = str(gradient.node.meta["val"].dtype)
        buckets.setdefault((gradient.wave, numbers[index % len(numbers)], dtype), []).append(gradient.key)
    return format_groups([buckets[key] for key in sorted(buckets)])


def rewritten(graph: StepGraph, rewrite: Rewrite) -> StepGraph:
    graph = graph.copy()
    if rewrite.buckets is not None and reducible_gradients(graph):
        groups = groups_of(graph, rewrite.buckets)
        num_buckets = groups.count(";") + 1
        late = " ".join(dict.fromkeys(str(index % num_buckets) for index in rewrite.late))
        send = [AllReduce(group="0", world=WORLD), Bucket(groups=groups), SplitOptimizer(), Overlap(late=late)]
        graph = run_passes(graph, send)
    graph = run_passes(graph, [Rotate(buckets=chosen_buckets(graph, rewrite))])
    for position in rewrite.leaves:
        calls = list(graph.calls())
        before = moved_nodes(graph)
        try:
            move_to_next_iteration(graph, leaf_closure([calls[position % len(calls)]]) - set(before))
        except PassError:
            assert moved_nodes(graph) == before
    graph.verify()
    return graph


def chosen_buckets(graph: StepGraph, rewrite: Rewrite) -> str:
    if rewrite.moved is None:
        return "all"
    movable = [block for block in update_blocks(graph) if not block.problem]
    chosen = {number for index in rewrite.moved if movable for number in movable[index % len(movable)].buckets}
    return " ".join(map(str, sorted(chosen)))


def poison(values: Any, state: dict[str, Any]) -> None:
    """Overwrite what belongs to the user from here on."""
    kept = {value.untyped_storage().data_ptr() for value in state.values()}
    for value in values:
        if isinstance(value, Tensor) and value.untyped_storage().data_ptr() not in kept:
            value.fill_(float("nan"))


def expected_of(graph: StepGraph, state: dict[str, Any], number: int, *, is_averaged: bool) -> list[Any]:
    """(outputs, state) of each step of the plain loop."""
    average = (lambda value: (value * (1 / WORLD)) * Wire().factor) if is_averaged else None
    plain = PlainLoop(graph, state, average)
    seen: list[Any] = []
    for index in range(number):
        torch.manual_seed(index)
        outputs = plain.step(batch(graph, index))
        seen.append((outputs, dict(plain.state)))
    return seen


def check(graph: StepGraph, source: StepGraph, plan: list[Iteration], finish: str, *, can_fail: bool) -> int:
    """Run the loop of `source` against that of `graph`; returns how many calls failed half-way."""
    state = initial_state(graph, 0)
    is_averaged = any("reduces" in node.meta for node in source.calls())
    expected = expected_of(graph, state, len(plan), is_averaged=is_averaged)
    loop = RotatedLoop(source, state, Wire(), finish)
    num_failed = 0
    for number, iteration in enumerate(plan):
        if iteration.fails_at is not None and can_fail and loop.waiting:
            fail(loop, iteration.fails_at, number, expected[number - 1][1])
            num_failed += 1
        outputs, after = expected[number]
        given = batch(graph, number)
        torch.manual_seed(number)
        found = loop.step(given, is_last=iteration.is_last)
        assert unequal(dict(enumerate(outputs)), dict(enumerate(found))) == [], f"outputs of step {number}"
        poison([*given.values(), *found], loop.state)
        if iteration.is_flushed:
            loop.flush()
        if not loop.waiting:
            assert unequal(after, loop.state) == [], f"state after step {number}"
    loop.flush()
    assert unequal(expected[-1][1], loop.state) == [], "state at the end"
    assert not loop.wire.travelling, "nobody waits for it"
    return num_failed


def fail(loop: RotatedLoop, at: int, number: int, before: dict[str, Any]) -> None:
    """A call fails half-way: what was pending is applied all the same, once."""
    num_own = sum("applies" not in node.meta for node in loop.graph(Kind.MAIN).calls())
    torch.manual_seed(number)
    with pytest.raises(Aborted):
        loop.step(batch(loop.source, number), stop_at=at % num_own)
    loop.flush()
    loop.wire.travelling.clear()  # what the call had sent before it failed
    moved = set(moved_nodes(loop.source))
    stays = {key for key, value in loop.source.updates.items() if value not in moved} | set(loop.source.results)
    applied = {key: value for key, value in before.items() if key not in stays}
    assert unequal(applied, loop.state) == [], f"state after step {number} failed"
    loop.state |= {key: before[key].clone() for key in stays if key in before}


TWO = [Iteration(), Iteration()]
FAILING = [Iteration(), *(Iteration(fails_at=number) for number in range(4))]
SGD, NEXT, FUSED = Weight(), Weight(update="neighbour"), Weight(update="fused")


@DETERMINISTIC
@given(steps(), rewrites, iterations)
# The update looks at a view that the forward made of the weight.
@example(Step((Weight((3, 3), "transposed"),)), Rewrite(), TWO)
# Two weights of one block are read at different moments, and the call fails between.
@example(Step((SGD, SGD), ((0, 1),)), Rewrite(), FAILING)
@example(Step((SGD, SGD), ((0, 1),)), Rewrite(buckets=(0,)), FAILING)
# A step with two updates has two waves.
@example(Step((SGD,), ((0,), (0,))), Rewrite(buckets=(0,)), TWO)
# One update reads the old value of what another, which may be applied before it, writes.
@example(Step((NEXT, SGD), ((1, 0),)), Rewrite(buckets=(0, 1)), FAILING)
# A weight's new value is also that of another slot.
@example(Step((Weight(update="foreach", average="hard copy"),)), Rewrite(), TWO)
# The second of two updates moves and reads an item of a fused op that stays.
@example(Step((FUSED,), ((0,), (0,))), Rewrite(), TWO)
# An item of a list op is a leaf; the op is not.
@example(Step((Weight(update="foreach"), Weight(update="foreach")), ((0, 1),)), Rewrite(moved=(0,), leaves=(19,)), TWO)
def test_the_rotated_loop_is_the_loop(step: Step, rewrite: Rewrite, plan: list[Iteration]) -> None:
    graph = build(step)
    note(str(graph))
    source = rewritten(graph, rewrite)
    # A graph that is not in place has written nothing when it fails; leaves of their own making may need each other.
    can_fail = bool(rewrite.finish) and not rewrite.leaves
    num_failed = check(graph, source, plan, rewrite.finish, can_fail=can_fail)
    event(f"moves {'something' if moved_nodes(source) else 'nothing'}")
    event(f"{num_failed} calls fail half-way")


@settings(DETERMINISTIC, max_examples=6)
@given(plans(), st.lists(st.booleans(), min_size=4, max_size=4))
def test_random_steps_are_eagers_whenever_somebody_looks(plan: Plan, looks: list[bool]) -> None:
    """Real optimizers and sizes that change, captured: outputs at each step, all else at random moments and the end."""
    note(repr(plan))
    sides: list[Any] = []
    rotated = wholestep.compile(make_step(plan), cross_iteration="all", dynamic_batch=plan.dynamic_batch)
    for function in (make_step(plan), rotated):
        torch.manual_seed(plan.seed)
        sides.append((function, build_world(plan), RandomStream(1)))
    for number, is_seen in enumerate([*looks, True]):
        seen: list[dict[str, Tensor]] = []
        for function, world, stream in sides:
            with stream.active():
                values = named_values("output", call(world, function, *make_batch(plan, number % 3)))
                seen.append(values | {"rng": torch.get_rng_state()} | (observe(world) if is_seen else {}))
        assert differences(*seen) == [], f"step {number}"
