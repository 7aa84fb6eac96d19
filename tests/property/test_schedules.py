"""What every schedule must keep, whoever built it; and `validate` and `simulate` against slow and simple twins."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import networkx as nx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from wholestep.errors import ScheduleError
from wholestep.pipe import FAMILIES, Action, Kind, Schedule, StageCosts, build_schedule, simulate, validate
from wholestep.pipe.schedules import planned
from wholestep.pipe.simulate import fill_bound
from wholestep.pipe.validate import Edge

DETERMINISTIC = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=60,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow],
)
ONE = StageCosts()
MAX_STAGES = 8


@st.composite
def shapes(draw: st.DrawFn, names: Sequence[str] = tuple(FAMILIES)) -> tuple[str, int, int, int]:
    """A family, 1 to 8 ranks, stages per rank up to 8 stages in all (two per rank in families of two), 1 to 32."""
    name = draw(st.sampled_from(names))
    num_ranks = draw(st.integers(1, 8))
    fixed = FAMILIES[name].stages_per_rank
    stages_per_rank = fixed or draw(st.integers(1, MAX_STAGES // num_ranks))
    return name, num_ranks, draw(st.integers(1, 32)), stages_per_rank


def build(shape: tuple[str, int, int, int]) -> Schedule:
    name, num_ranks, num_micro_batches, stages_per_rank = shape
    return build_schedule(name, num_ranks, num_micro_batches, stages_per_rank=stages_per_rank)


def chain_of(num_stages: int) -> list[Edge]:
    return [(stage, stage + 1) for stage in range(num_stages - 1)]


def edges_of(draw: st.DrawFn, num_stages: int) -> list[Edge]:
    pairs = [(source, target) for target in range(num_stages) for source in range(target)]
    return draw(st.lists(st.sampled_from(pairs), unique=True, max_size=8)) if pairs else []


def reads(schedule: Schedule, edges: Sequence[Edge]) -> dict[Action, list[Action]]:
    """What each action reads, from the definition; of a backward that is whole or in parts."""
    present = {action for row in schedule.actions for action in row}
    found: dict[Action, list[Action]] = {}
    for action in present:
        stage, index = action.stage, action.micro_batch
        if action.kind is Kind.FORWARD:
            wanted = [Action(Kind.FORWARD, source, index) for source, target in edges if target == stage]
        elif action.kind is Kind.WEIGHT:
            wanted = [Action(Kind.INPUT, stage, index)]
        else:
            later = [target for source, target in edges if source == stage]
            wanted = [Action(kind, target, index) for target in later for kind in (Kind.INPUT, Kind.BACKWARD)]
            wanted = [Action(Kind.FORWARD, stage, index), *(each for each in wanted if each in present)]
        found[action] = wanted
    return found


def can_run(schedule: Schedule, edges: Sequence[Edge]) -> bool:
    """The slow twin of `validate`: count everything, then look for a cycle in the graph of all actions."""
    count = Counter((rank, action) for rank, row in enumerate(schedule.actions) for action in row)
    is_forward_only = all(action.kind is Kind.FORWARD for _, action in count)
    for stage, rank in enumerate(schedule.stage_ranks):
        for index in range(schedule.num_micro_batches):
            kinds = {kind: count.pop((rank, Action(kind, stage, index)), 0) for kind in Kind}
            halves = {kinds[Kind.INPUT], kinds[Kind.WEIGHT]}
            is_once = (kinds[Kind.BACKWARD], halves) in ((1, {0}), (0, {1}))
            if kinds[Kind.FORWARD] != 1 or not (is_once or is_forward_only):
                return False
    if count:
        return False
    graph = nx.DiGraph()
    for row in schedule.actions:
        nx.add_path(graph, row)
    graph.add_edges_from((read, action) for action, wanted in reads(schedule, edges).items() for read in wanted)
    return nx.is_directed_acyclic_graph(graph)


def run_with_random_messages(schedule: Schedule, edges: Sequence[Edge], seed: int) -> int:
    """Ranks with mailboxes; messages and ranks move in random order. Returns how many actions have run at the end."""
    draw = random.Random(seed)
    needed = reads(schedule, edges)
    readers: dict[Action, list[Action]] = defaultdict(list)
    for action, wanted in needed.items():
        for read in wanted:
            readers[read].append(action)
    mailboxes: list[set[tuple[Action, Action]]] = [set() for _ in schedule.actions]
    positions = [0] * schedule.num_ranks
    travelling: list[tuple[Action, Action]] = []

    def is_ready(rank: int) -> bool:
        row = schedule.actions[rank]
        if positions[rank] == len(row):
            return False
        action = row[positions[rank]]
        return all((read, action) in mailboxes[rank] for read in needed[action])

    while True:
        ready = [rank for rank in range(schedule.num_ranks) if is_ready(rank)]
        if not ready and not travelling:
            return sum(positions)
        if travelling and (not ready or draw.random() < 0.5):
            message = travelling.pop(draw.randrange(len(travelling)))
            mailboxes[schedule.stage_ranks[message[1].stage]].add(message)
            continue
        rank = draw.choice(ready)
        action = schedule.actions[rank][positions[rank]]
        positions[rank] += 1
        travelling += [(action, reader) for reader in readers[action]]


@settings(DETERMINISTIC, max_examples=200)
@given(shapes())
def test_every_schedule_does_everything_once_and_never_waits_forever(shape: tuple[str, int, int, int]) -> None:
    schedule = build(shape)
    validate(schedule)
    name, num_ranks, num_micro_batches, stages_per_rank = shape
    assert (schedule.num_ranks, schedule.num_stages) == (num_ranks, num_ranks * stages_per_rank)
    assert schedule.num_micro_batches == num_micro_batches
    assert schedule.is_forward_only == (name == "forward")
    assert can_run(schedule, chain_of(schedule.num_stages))
    assert Schedule.from_csv(schedule.to_csv(), name=schedule.name) == schedule


@settings(DETERMINISTIC, max_examples=150)
@given(shapes(), st.integers(0, 10**6))
def test_messages_may_arrive_in_any_order(shape: tuple[str, int, int, int], seed: int) -> None:
    name, num_ranks, num_micro_batches, stages_per_rank = shape
    schedule = build((name, num_ranks, min(num_micro_batches, 6), stages_per_rank))
    assert run_with_random_messages(schedule, chain_of(schedule.num_stages), seed) == sum(map(len, schedule.actions))


@DETERMINISTIC
@given(shapes(), st.data())
def test_what_is_right_for_the_chain_is_right_for_any_edges(
    shape: tuple[str, int, int, int], data: st.DataObject
) -> None:
    schedule = build(shape)
    validate(schedule, data.draw(st.composite(edges_of)(schedule.num_stages)))


# Idle slots of each rank beyond its work for stages of one slot per F, I and W, and the most it holds in stages;
# from how many micro-batches on. v is the number of stages per rank.
def formula(name: str, p: int, m: int, v: int) -> tuple[float, float, int]:
    return {
        "gpipe": (3 * (p - 1), m, 1),
        "1f1b": (3 * (p - 1), min(p, m), 1),
        "interleaved-1f1b": (3 * (p - 1), min(v * m, v * p + p - 1 if m % p == 0 else 2 * v * p + p - 1), p),
        "looped-bfs": (3 * (p - 1), v * m, p),
        "zb-h1": (p - 1, min(p, m), p),
        "zb-h2": (p - 1, min(2 * p - 1, m), p),
        "interleaved-zb": (p - 1, min(v * p + p - 1, v * m), p),
        "zbv": (p - 1, min(2 * p, 2 * m), p),
        "v-half": (3.6 * (p - 1), 2 * ((p + 2) // 2), p),
        "v-min": (4 * (p - 1) + 1, 2 * ((p + 4) // 3), p),
        "dualpipe-v": (p - 1, 2 * p + 1, 2 * p),
        "planned": (p - 1, v * m, p),
        "forward": (p - 1, 0, p),
    }[name]


@settings(DETERMINISTIC, max_examples=500)
@given(shapes())
def test_bubbles_and_peaks_are_those_of_the_literature(shape: tuple[str, int, int, int]) -> None:
    name, p, m, v = shape
    idle, peak, least = formula(name, p, m, v)
    timeline = simulate(build(shape), ONE)
    assert max(timeline.peaks) <= peak
    if name in ("gpipe", "1f1b", "looped-bfs"):
        assert timeline.peaks[0] == peak
    work = (1 if name == "forward" else 3) * v * m
    assert [timeline.busy(rank) for rank in range(p)] == [work] * p
    if m >= least and name not in ("v-half", "v-min"):
        assert timeline.makespan - work == idle
    elif m >= least:
        assert timeline.makespan - work <= idle
    assert timeline.bubble == pytest.approx(1 - work / timeline.makespan)


@DETERMINISTIC
@given(shapes(["gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zbv", "dualpipe-v", "v-half"]), st.integers(1, 32))
def test_fewer_micro_batches_are_never_slower(shape: tuple[str, int, int, int], num_kept: int) -> None:
    """Leaving micro-batches out of a schedule leaves a schedule: what DualPipeV does for few micro-batches."""
    schedule = build(shape)
    num_kept = min(num_kept, schedule.num_micro_batches)
    rows = tuple(tuple(action for action in row if action.micro_batch < num_kept) for row in schedule.actions)
    fewer = replace(schedule, actions=rows, num_micro_batches=num_kept)
    assert simulate(fewer, ONE).makespan <= simulate(schedule, ONE).makespan


@st.composite
def damaged(draw: st.DrawFn) -> tuple[Schedule, list[Edge]]:
    """A small schedule in which a few actions have changed places, are gone, there twice, or something else."""
    name = draw(st.sampled_from(["1f1b", "zb-h1", "zbv", "forward", "interleaved-1f1b"]))
    schedule = build_schedule(name, draw(st.integers(1, 3)), draw(st.integers(1, 3)))
    rows = [list(row) for row in schedule.actions]
    for _ in range(draw(st.integers(0, 4))):
        rank = draw(st.integers(0, len(rows) - 1))
        row = rows[rank]
        if not row:
            continue
        one, other = (draw(st.integers(0, len(row) - 1)) for _ in range(2))
        change = draw(st.sampled_from(["swap", "swap", "swap", "next", "drop", "double", "kind", "move"]))
        if change == "swap":
            row[one], row[other] = row[other], row[one]
        elif change == "next" and one + 1 < len(row):
            row[one], row[one + 1] = row[one + 1], row[one]
        elif change == "drop":
            del row[one]
        elif change == "double":
            row.insert(other, row[one])
        elif change == "kind":
            row[one] = replace(row[one], kind=draw(st.sampled_from(list(Kind))))
        elif change == "move":
            rows[draw(st.integers(0, len(rows) - 1))].append(row.pop(one))
    edges = chain_of(schedule.num_stages) if draw(st.booleans()) else edges_of(draw, schedule.num_stages)
    return replace(schedule, actions=tuple(map(tuple, rows))), edges


@settings(DETERMINISTIC, max_examples=400)
@given(damaged(), st.integers(0, 10**6))
def test_validate_refuses_exactly_what_cannot_run(case: tuple[Schedule, list[Edge]], seed: int) -> None:
    schedule, edges = case
    if can_run(schedule, edges):
        validate(schedule, edges)
        assert run_with_random_messages(schedule, edges, seed) == sum(map(len, schedule.actions))
        return
    with pytest.raises(ScheduleError) as caught:
        validate(schedule, edges)
    assert "rank" in str(caught.value)
    if "deadlocks" in str(caught.value):
        assert run_with_random_messages(schedule, edges, seed) < sum(map(len, schedule.actions))


COSTS = st.builds(StageCosts, *[st.integers(0, 5)] * 3, whole=st.none() | st.integers(0, 8))


@DETERMINISTIC
@given(shapes(), st.data())
def test_simulation_is_the_longest_way_to_each_action(shape: tuple[str, int, int, int], data: st.DataObject) -> None:
    name, num_ranks, num_micro_batches, stages_per_rank = shape
    schedule = build((name, num_ranks, min(num_micro_batches, 8), stages_per_rank))
    num_stages = schedule.num_stages
    costs = data.draw(st.lists(COSTS, min_size=num_stages, max_size=num_stages))
    edges = data.draw(st.composite(edges_of)(num_stages))
    transfers = {edge: float(data.draw(st.integers(0, 4))) for edge in edges}
    timeline = simulate(schedule, costs, transfers=transfers)
    starts = {span.action: span.start for row in timeline.spans for span in row}
    assert starts == slow_starts(schedule, costs, transfers)
    assert all(
        span.end == span.start + costs[span.action.stage].of(span.action.kind) for row in timeline.spans for span in row
    )
    if name != "forward":
        assert (
            timeline.makespan >= fill_bound(schedule.stage_ranks, schedule.num_micro_batches, costs, transfers) - 1e-9
        )


def slow_starts(schedule: Schedule, costs: Sequence[StageCosts], transfers: dict[Edge, float]) -> dict[Action, float]:
    """Start everything at 0 and push what is too early until nothing is."""
    starts = {action: 0.0 for row in schedule.actions for action in row}
    waits: list[tuple[Action, Action, float]] = []
    for row in schedule.actions:
        waits += [(one, other, 0.0) for one, other in pairwise(row)]
    for action, wanted in reads(schedule, list(transfers)).items():
        for read in wanted:
            pair = min(read.stage, action.stage), max(read.stage, action.stage)
            is_near = schedule.stage_ranks[pair[0]] == schedule.stage_ranks[pair[1]]
            waits.append((read, action, 0.0 if is_near else transfers[pair]))
    has_changed = True
    while has_changed:
        has_changed = False
        for one, other, travel in waits:
            earliest = starts[one] + costs[one.stage].of(one.kind) + travel
            if starts[other] < earliest:
                starts[other], has_changed = earliest, True
    return starts


def slow_peak(row: Sequence[Action], held: Sequence[float], input_share: float) -> float:
    """What is held after each action, counted anew each time."""
    peak = 0.0
    for end in range(1, len(row) + 1):
        done = set(row[:end])
        now = 0.0
        for action in done:
            if action.kind is not Kind.FORWARD or replace(action, kind=Kind.BACKWARD) in done:
                continue
            is_input_done = replace(action, kind=Kind.INPUT) in done
            is_weight_done = replace(action, kind=Kind.WEIGHT) in done
            share = (0.0 if is_weight_done else 1 - input_share) + (0.0 if is_input_done else input_share)
            now += held[action.stage] * share
        peak = max(peak, now)
    return peak


@DETERMINISTIC
@given(shapes([name for name in FAMILIES if name != "forward"]), st.sampled_from([0.0, 0.25, 1.0]), st.data())
def test_peaks_are_what_is_held(shape: tuple[str, int, int, int], input_share: float, data: st.DataObject) -> None:
    name, num_ranks, num_micro_batches, stages_per_rank = shape
    schedule = build((name, min(num_ranks, 4), min(num_micro_batches, 6), stages_per_rank))
    sizes = [float(data.draw(st.integers(0, 9))) for _ in range(schedule.num_stages)]
    peaks = simulate(schedule, ONE, activations=sizes, input_share=input_share).peaks
    assert peaks == pytest.approx([slow_peak(row, sizes, input_share) for row in schedule.actions])


@st.composite
def problems(draw: st.DrawFn) -> tuple[int, int, tuple[int, ...], list[StageCosts], list[float], float]:
    num_ranks, stages_per_rank = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    num_stages = num_ranks * stages_per_rank
    placement = draw(st.permutations([stage % num_ranks for stage in range(num_stages)]))
    costs = draw(st.lists(COSTS, min_size=num_stages, max_size=num_stages))
    sizes = [float(size) for size in draw(st.lists(st.integers(0, 9), min_size=num_stages, max_size=num_stages))]
    return num_ranks, draw(st.integers(1, 8)), tuple(placement), costs, sizes, draw(st.sampled_from([0.0, 0.3, 1.0]))


@settings(DETERMINISTIC, max_examples=40)
@given(problems(), st.integers(0, 20), st.integers(0, 3))
def test_a_plan_keeps_its_cap_wherever_stages_are(
    problem: tuple[int, int, tuple[int, ...], list[StageCosts], list[float], float], slack: int, travel: int
) -> None:
    """From the smallest cap on, which is exactly what one micro-batch holds on each rank; below there is no plan."""
    num_ranks, num_micro_batches, placement, costs, sizes, input_share = problem
    needs = [sum(size for size, owner in zip(sizes, placement) if owner == rank) for rank in range(num_ranks)]
    caps = [need + slack for need in needs]
    transfers = {edge: float(travel) for edge in chain_of(len(placement))}

    def plan(caps: list[float]) -> Schedule:
        return planned(
            num_ranks,
            num_micro_batches,
            costs=costs,
            stage_ranks=placement,
            transfers=transfers,
            memory_cap=caps,
            activations=sizes,
            input_share=input_share,
        )

    schedule = plan(caps)
    assert can_run(schedule, list(transfers))
    timeline = simulate(schedule, costs, transfers=transfers, activations=sizes, input_share=input_share)
    assert all(peak <= cap + 1e-6 for peak, cap in zip(timeline.peaks, caps))
    with pytest.raises(ScheduleError, match="cannot keep rank"):
        plan([needs[0] - 0.5, *caps[1:]])


CELLS = st.sampled_from(
    ["0F0", "0B0", "0F1", "0B1", "1F0", "1I0", "1W0", "1B0", "", " ", "9F0", "0F9", "0X0", "F", "\r"]
)
FILES = st.lists(st.lists(CELLS, max_size=6).map(",".join), max_size=4).map("\n".join)


@settings(DETERMINISTIC, max_examples=300)
@given(FILES | st.text(max_size=60) | st.text("0123456789FBIW,\n ", max_size=60))
def test_a_file_is_a_schedule_or_refused_by_message(text: str) -> None:
    try:
        schedule = Schedule.from_csv(text)
    except ScheduleError:
        return
    assert Schedule.from_csv(schedule.to_csv()) == schedule
    if len(schedule.stage_ranks) * schedule.num_micro_batches > 1000:
        with pytest.raises(ScheduleError, match=r"never runs|has no"):
            validate(schedule)
        return
    if can_run(schedule, chain_of(schedule.num_stages)):
        simulate(schedule, ONE)
        return
    with pytest.raises(ScheduleError):
        validate(schedule)
