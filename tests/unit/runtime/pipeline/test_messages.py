"""What ranks send each other, compared with what follows from the definitions, on random cuts and all schedules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, cast

import networkx as nx
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wholestep.pipe import FAMILIES, Kind, Schedule, build_schedule
from wholestep.pipe.cut import CutGraph, Program, Stage
from wholestep.runtime.pipeline.messages import LOOK_AHEAD, SMALL_BYTES, Traffic, messages, share_messages

BACKWARDS = (Kind.INPUT, Kind.WEIGHT)


def program(values: list[str], outputs: list[str], slots: tuple[str, ...] = ()) -> Program:
    graph = cast(Any, None)
    return Program(graph, slots, tuple(dict.fromkeys(values)), tuple(outputs))


@st.composite
def cuts(draw: st.DrawFn, num_stages: int) -> CutGraph:
    """Stages between which values go any distance: F to F, F to a later backward, a backward to an earlier one."""
    reads: dict[tuple[int, Kind], list[str]] = {
        (stage, kind): [] for stage in range(num_stages) for kind in (Kind.FORWARD, *BACKWARDS)
    }
    makes: dict[tuple[int, Kind], list[str]] = {key: [] for key in reads}
    fakes: dict[str, torch.Tensor] = {}

    def add(source: tuple[int, Kind], readers: list[tuple[int, Kind]]) -> None:
        name = f"v{len(fakes)}"
        size = draw(st.sampled_from([0, 1, SMALL_BYTES, SMALL_BYTES + 1]))
        fakes[name] = torch.empty(size, dtype=torch.uint8, device="meta")
        makes[source].append(name)
        for reader in readers:
            reads[reader].append(name)

    for stage in range(num_stages):
        later = [(other, kind) for other in range(stage + 1, num_stages) for kind in (Kind.FORWARD, *BACKWARDS)]
        own = [(stage, kind) for kind in BACKWARDS]
        earlier = [(other, kind) for other in range(stage) for kind in BACKWARDS]
        for _ in range(draw(st.integers(0, 3))):
            add((stage, Kind.FORWARD), draw(st.lists(st.sampled_from(later + own), unique=True, max_size=4)))
        for _ in range(draw(st.integers(0, 2)) if earlier else 0):
            add((stage, Kind.INPUT), draw(st.lists(st.sampled_from([*earlier, own[1]]), unique=True, max_size=3)))
    return CutGraph(tuple(_stage(index, reads, makes, fakes) for index in range(num_stages)), 0)


def _stage(index: int, reads: Any, makes: Any, fakes: dict[str, torch.Tensor]) -> Stage:
    forward, early, late = (
        program(reads[index, kind], makes[index, kind]) for kind in (Kind.FORWARD, Kind.INPUT, Kind.WEIGHT)
    )
    inside = set(early.outputs)
    whole = program([name for name in (*early.values, *late.values) if name not in inside], list(early.outputs))
    return Stage(index, forward, early, late, whole, {}, {}, {}, fakes)


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[CutGraph, Schedule]:
    name = draw(st.sampled_from([name for name in FAMILIES if name != "planned"]))
    schedule = build_schedule(name, draw(st.integers(1, 4)), draw(st.integers(1, 5)))
    return draw(cuts(schedule.num_stages)), schedule


def reads_of(cut: CutGraph, schedule: Schedule, rank: int) -> Iterator[tuple[int, int, str]]:
    """Position, micro-batch and name of everything that a rank reads and does not make."""
    own = {name for stage in schedule.stages_of(rank) for name in cut.stages[stage].made}
    for position, action in enumerate(schedule.actions[rank]):
        for name in cut.stages[action.stage].program(action.kind).values:
            if name not in own:
                yield position, action.micro_batch, name


def channel(traffic: Traffic, source: int, target: int) -> list[int]:
    """Numbers of the messages from one rank to another, in the order in which they are sent."""
    sent = [number for numbers in traffic.ranks[source].sends for number in numbers]
    return [number for number in sent if traffic.messages[number].target == target]


def place_of(groups: tuple[tuple[int, ...], ...]) -> dict[int, int]:
    """By number: the position that it stands at; each stands at one only."""
    counts = Counter(number for numbers in groups for number in numbers)
    assert set(counts.values()) <= {1}
    return {number: position for position, numbers in enumerate(groups) for number in numbers}


@given(pipelines())
@settings(max_examples=150, deadline=None)
def test_every_value_arrives_once_before_its_first_reader(pipeline: tuple[CutGraph, Schedule]) -> None:
    cut, schedule = pipeline
    traffic = messages(cut, schedule)
    for rank in range(schedule.num_ranks):
        arrived = Counter(
            (message.micro_batch, name)
            for message in traffic.messages
            if message.target == rank
            for name in message.names
        )
        wanted = {(micro_batch, name) for _, micro_batch, name in reads_of(cut, schedule, rank)}
        assert arrived == Counter(wanted)
        needed = place_of(traffic.ranks[rank].needs)
        for number, position in needed.items():
            message = traffic.messages[number]
            first = min(
                place
                for place, micro_batch, name in reads_of(cut, schedule, rank)
                if micro_batch == message.micro_batch and name in message.names
            )
            assert (message.target, position) == (rank, first)


@given(pipelines())
@settings(max_examples=100, deadline=None)
def test_an_action_sends_what_it_makes_and_large_values_travel_alone(pipeline: tuple[CutGraph, Schedule]) -> None:
    cut, schedule = pipeline
    traffic = messages(cut, schedule)
    for rank, row in enumerate(schedule.actions):
        for action, numbers in zip(row, traffic.ranks[rank].sends, strict=True):
            stage = cut.stages[action.stage]
            sent = [traffic.messages[number] for number in numbers]
            assert all(message.source == rank and message.stage == action.stage for message in sent)
            assert all(set(message.names) <= set(stage.program(action.kind).outputs) for message in sent)
            small = Counter(
                message.target for message in sent if all(stage.fakes[n].nbytes <= SMALL_BYTES for n in message.names)
            )
            assert set(small.values()) <= {1}
            assert all(
                len(message.names) == 1
                for message in sent
                if any(stage.fakes[name].nbytes > SMALL_BYTES for name in message.names)
            )


@given(pipelines(), st.integers(0, 4))
@settings(max_examples=100, deadline=None)
def test_receives_are_posted_in_the_order_of_the_sender_and_no_sooner_than_needed(
    pipeline: tuple[CutGraph, Schedule], look_ahead: int
) -> None:
    cut, schedule = pipeline
    traffic = messages(cut, schedule, look_ahead)
    for target in range(schedule.num_ranks):
        plan = traffic.ranks[target]
        posted, needed = place_of(plan.posts), place_of(plan.needs)
        order = [number for numbers in plan.posts for number in numbers]
        assert posted.keys() == needed.keys()
        for source in range(schedule.num_ranks):
            numbers = channel(traffic, source, target)
            assert [number for number in order if traffic.messages[number].source == source] == numbers
            for index, number in enumerate(numbers):
                soonest = min(needed[other] for other in numbers[index:])
                assert posted[number] == max(0, soonest - look_ahead) <= needed[number]


@given(pipelines())
@settings(max_examples=75, deadline=None)
def test_a_send_is_settled_as_soon_as_its_reader_is_known_to_be_over(pipeline: tuple[CutGraph, Schedule]) -> None:
    cut, schedule = pipeline
    traffic = messages(cut, schedule)
    needed = [place_of(plan.needs) for plan in traffic.ranks]
    order: Any = nx.DiGraph()
    for rank, row in enumerate(schedule.actions):
        order.add_nodes_from((rank, position) for position in range(len(row)))
        order.add_edges_from(((rank, position), (rank, position + 1)) for position in range(len(row) - 1))
    for rank, plan in enumerate(traffic.ranks):
        for number, position in place_of(plan.sends).items():
            target = traffic.messages[number].target
            order.add_edge((rank, position), (target, needed[target][number]))
    for rank, plan in enumerate(traffic.ranks):
        settled = place_of(plan.settled)
        for number in place_of(plan.sends):
            target = traffic.messages[number].target
            after = nx.descendants(order, (target, needed[target][number]))
            known = [position for position in range(len(plan.sends)) if (rank, position) in after]
            assert settled.get(number) == min(known, default=None)


def chain(num_stages: int) -> CutGraph:
    """A plain pipeline: one activation to the next stage, one gradient back; a parameter of the ends is shared."""
    fakes = {f"{kind}{stage}": torch.empty(4, device="meta") for kind in "adsw" for stage in range(num_stages)}
    stages: list[Stage] = []
    for stage in range(num_stages):
        is_first, is_last = stage == 0, stage == num_stages - 1
        slots = ("param.tied", "param.own") if is_first or is_last else ("param.own",)
        forward = program([] if is_first else [f"a{stage - 1}"], [f"s{stage}"] + [f"a{stage}"] * (not is_last), slots)
        early = program([f"s{stage}"] + [f"d{stage + 1}"] * (not is_last), [f"d{stage}"] * (not is_first))
        late = program([f"s{stage}"], [f"w{stage}"])
        whole = program([*early.values], [*early.outputs, *late.outputs])
        gradients = {slot: f"w{stage}" for slot in slots if slot == "param.tied"}
        stages.append(Stage(stage, forward, early, late, whole, {}, gradients, {}, fakes))
    return CutGraph(tuple(stages), 0)


def test_1f1b_holds_few_buffers_at_a_time_however_many_micro_batches_there_are() -> None:
    for num_micro_batches in (8, 64):
        schedule = build_schedule("1f1b", 4, num_micro_batches)
        traffic = messages(chain(4), schedule)
        for plan in traffic.ranks:
            posted = sent = most = 0
            for position in range(len(plan.posts)):
                posted += len(plan.posts[position])
                sent -= len(plan.settled[position])
                most = max(most, posted + sent)
                posted -= len(plan.needs[position])
                sent += len(plan.sends[position])
            assert most <= 4 + 2 * LOOK_AHEAD


def test_evaluation_sends_no_values_for_a_backward() -> None:
    traffic = messages(chain(4), build_schedule("forward", 2, 3))
    assert {name for message in traffic.messages for name in message.names} == {"a0", "a1", "a2"}
    assert share_messages(chain(4), build_schedule("forward", 2, 3)) == ()


def test_shares_go_from_each_stage_to_every_other_rank_that_has_the_parameter() -> None:
    found = share_messages(chain(4), build_schedule("1f1b", 4, 2))
    assert [(one.source, one.target, one.stage, one.slots) for one in found] == [
        (0, 3, 0, ("param.tied",)),
        (3, 0, 3, ("param.tied",)),
    ]


def test_shares_of_stages_on_one_rank_do_not_travel() -> None:
    assert share_messages(chain(4), build_schedule("zbv", 2, 2)) == ()
