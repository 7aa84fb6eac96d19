"""Automatic borders: exact against every way to cut small chains, and right about what stages cost."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.cuts import MicroStep, micro_step, zoo_step
from torch import Tensor, nn

from wholestep.cost import DEVICES, estimated_times
from wholestep.errors import SplitError
from wholestep.pipe.balance import Chain, Limit, Profile, Tally, balance, kept_matrix, profile
from wholestep.pipe.cut import cut
from wholestep.pipe.placement import forward_calls, place
from wholestep.pipe.split import SplitPlan, plan_split

DEVICE = DEVICES["cpu"]
NAMES = ["gpt", "resnet", pytest.param("t5", marks=pytest.mark.slow)]


@st.composite
def profiles(draw: st.DrawFn, max_calls: int = 9) -> Profile:
    """Short forwards in which some calls take no time, and then none in the backward either."""
    times = draw(st.lists(st.integers(0, 6), min_size=2, max_size=max_calls))
    count = len(times)
    anchors = st.sets(st.integers(0, count - 1), min_size=1, max_size=3)
    tallies = [Tally(draw(st.integers(1, 9)), tuple(sorted(draw(anchors)))) for _ in range(draw(st.integers(0, 5)))]
    return Profile(
        tuple(map(float, times)),
        tuple(float(2 * time) for time in times),
        tuple(draw(st.lists(st.integers(0, 5), min_size=count + 1, max_size=count + 1))),
        (True,) * count,
        tuple(tallies),
        (),
    )


def stage_times(found: Profile, borders: Sequence[int]) -> list[float]:
    edges = [0, *borders, found.num_calls]
    total = [a + b for a, b in zip(found.forward_us, found.backward_us, strict=True)]
    return [sum(total[begin:end]) for begin, end in itertools.pairwise(edges)]


def keeps(found: Profile, borders: Sequence[int]) -> list[int]:
    edges = [0, *borders, found.num_calls]
    return [
        sum(tally.num_bytes for tally in found.kept if tally.is_in(begin, end))
        for begin, end in itertools.pairwise(edges)
    ]


def fits(found: Profile, borders: Sequence[int], limit: Limit | None) -> bool:
    if limit is None:
        return True
    used = zip(keeps(found, borders), limit.in_flight, strict=True)
    return all(num_bytes * number <= limit.num_bytes for num_bytes, number in used)


def brute_force(
    found: Profile, candidates: Sequence[int], num_stages: int, slack: float, limit: Limit | None
) -> tuple[float, float] | None:
    """The fewest bytes, and with them the least time, of all cuts that are within the slack of the fastest."""
    cuts = [cut for cut in itertools.combinations(candidates, num_stages - 1) if fits(found, cut, limit)]
    if not cuts:
        return None
    fastest = min(max(stage_times(found, cut)) for cut in cuts)
    near = [cut for cut in cuts if max(stage_times(found, cut)) <= fastest * (1 + slack) + 1e-6]
    return min((sum(found.crossing_bytes[b] for b in cut), max(stage_times(found, cut))) for cut in near)


@settings(derandomize=True, database=None, deadline=None, max_examples=300)
@given(profiles(), st.integers(1, 5), st.sampled_from([0.0, 0.1, 0.5]), st.data())
def test_a_chain_is_cut_as_well_as_can_be(found: Profile, num_stages: int, slack: float, data: st.DataObject) -> None:
    candidates = sorted(data.draw(st.sets(st.integers(1, found.num_calls - 1), min_size=1)))
    in_flight = tuple(data.draw(st.lists(st.integers(0, 3), min_size=num_stages, max_size=num_stages)))
    limit = data.draw(st.none() | st.builds(Limit, st.integers(0, 40), st.just(in_flight)))
    best = brute_force(found, candidates, num_stages, slack, limit)
    chain = Chain(found, candidates, num_stages, limit)
    if best is None:
        assert chain.fastest_us == float("inf")
        return
    borders = chain.leanest(slack)
    assert len(borders) == num_stages - 1
    assert set(borders) <= set(candidates)
    assert fits(found, borders, limit)
    cost = sum(found.crossing_bytes[border] for border in borders), max(stage_times(found, borders))
    assert cost == pytest.approx(best)


@settings(derandomize=True, database=None, deadline=None, max_examples=200)
@given(profiles(), st.integers(1, 5))
def test_the_least_memory_is_found(found: Profile, num_stages: int) -> None:
    candidates = range(1, found.num_calls)
    if num_stages > found.num_calls:
        return
    in_flight = tuple(range(num_stages, 0, -1))
    cuts = itertools.combinations(candidates, num_stages - 1)
    least = min(max(k * n for k, n in zip(keeps(found, cut), in_flight, strict=True)) for cut in cuts)
    assert Chain(found, candidates, num_stages, Limit(0, in_flight)).least_kept() == least


@settings(derandomize=True, database=None, deadline=None, max_examples=200)
@given(profiles(), st.data())
def test_kept_bytes_of_all_stages_at_once(found: Profile, data: st.DataObject) -> None:
    inner = sorted(data.draw(st.sets(st.integers(1, found.num_calls - 1))))
    places = [0, *inner, found.num_calls]
    matrix = kept_matrix(found.kept, places)
    for i, j in itertools.combinations(range(len(places)), 2):
        expected = sum(tally.num_bytes for tally in found.kept if tally.is_in(places[i], places[j]))
        assert matrix[i, j] == expected


@settings(derandomize=True, database=None, deadline=None, max_examples=300)
@given(profiles(), st.integers(1, 5))
def test_few_candidates_cost_little_and_every_stage_has_work(found: Profile, num_stages: int) -> None:
    num_timed = sum(time > 0 for time in found.forward_us)
    if num_timed < num_stages:
        with pytest.raises(SplitError, match=f"so {max(1, num_timed)} stages are the most"):
            balance(found, max(2, num_stages), ranks={})
        return
    borders = balance(found, num_stages, ranks={}, slack=0.0)
    slowest = max(stage_times(found, borders))
    cuts = itertools.combinations(range(1, found.num_calls), num_stages - 1)
    assert slowest <= 1.1 * min(max(stage_times(found, cut)) for cut in cuts) + 1e-6
    edges = [0, *borders, found.num_calls]
    assert all(sum(found.forward_us[begin:end]) > 0 for begin, end in itertools.pairwise(edges))


def test_of_equal_places_that_of_an_outer_module_is_taken() -> None:
    found = Profile((1.0, 0.0, 0.0, 1.0), (0.0,) * 4, (0, 5, 2, 2, 0), (True,) * 4, (), ())
    assert balance(found, 2, ranks={}) == (2,)
    assert balance(found, 2, ranks={2: 3, 3: 1}) == (3,)
    assert balance(found, 2, ranks={1: 0, 2: 3}) == (2,)


def test_places_with_few_bytes_are_taken_unless_they_cost_too_much() -> None:
    times = (1.0,) * 20
    crossing = [0, *[5] * 19, 0]
    crossing[9] = 1
    near = Profile(times, (0.0,) * 20, tuple(crossing), (True,) * 20, (), ())
    assert balance(near, 2, ranks={}, slack=0.0) == (9,)
    rising = (0, 9, 9, 9, 1, *range(2, 13), 13, 13, 13, 13, 0)
    far = Profile(times, (0.0,) * 20, rising, (True,) * 20, (), ())
    assert balance(far, 2, ranks={}, slack=0.0) == (10,)


def test_a_long_chain_is_thinned_evenly() -> None:
    count = 3000
    crossing = tuple(1 if number % 6 == 0 else 9 for number in range(count + 1))
    found = Profile((1.0,) * count, (1.0,) * count, crossing, (True,) * count, (), ())
    borders = balance(found, 5, ranks={})
    assert borders == (600, 1200, 1800, 2400)


# What a graph costs


@pytest.mark.parametrize("name", NAMES)
def test_bytes_over_a_border_are_those_that_a_cut_sends(name: str) -> None:
    step = zoo_step(name)
    found = profile(step.graph, estimated_times(step.graph, DEVICE))
    count = found.num_calls
    assert (found.crossing_bytes[0], found.crossing_bytes[count]) == (0, 0)
    for border in range(1, count, max(1, count // 12)):
        parts = cut(step.graph, [border])
        sent = [parts.stages[parts.source[value]].fakes[value] for value in parts.readers]
        assert found.crossing_bytes[border] == sum(tensor.numel() * tensor.element_size() for tensor in sent)


@pytest.mark.parametrize("name", NAMES)
def test_times_are_those_of_the_calls_that_are_placed_there(name: str) -> None:
    step = zoo_step(name)
    plan = plan_split(step.captured, step.graph, num_stages=3)
    placement = place(step.graph, plan.borders)
    times = estimated_times(step.graph, DEVICE)
    early = set(forward_calls(step.graph))
    for number, stage in enumerate(plan.stages):
        own = [node for node, home in placement.stage_of.items() if home == number]
        assert stage.forward_us == pytest.approx(sum(times[node] for node in own if node in early))
        assert stage.backward_us == pytest.approx(sum(times[node] for node in own if node not in early))
    slots = [
        sum(_parameter_bytes(step, slot) for slot in stage.slots) for stage in cut(step.graph, plan.borders).stages
    ]
    assert [stage.parameter_bytes for stage in plan.stages] == slots


def _parameter_bytes(step: MicroStep, slot: str) -> int:
    if not slot.startswith("param."):
        return 0
    value = step.graph.placeholder(slot).meta["val"]
    return value.numel() * value.element_size()


class Deep(nn.Module):
    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


def deep_step(*widths: int) -> MicroStep:
    return micro_step(Deep(widths), lambda model, x: model(x).square().mean(), [torch.randn(4, widths[0])])


def test_a_model_is_cut_about_as_well_as_can_be() -> None:
    step = deep_step(*[64] * 9)
    plan = plan_split(step.captured, step.graph, num_stages=4)
    assert all("of 'layers." in stage.where for stage in plan.stages[1:])
    found = profile(step.graph, estimated_times(step.graph, DEVICE))
    cuts = itertools.combinations(range(1, found.num_calls), 3)
    assert plan.slowest_us <= 1.02 * min(max(stage_times(found, borders)) for borders in cuts) + 1e-6


def test_measured_times_count_if_given() -> None:
    step = deep_step(*[16] * 7)
    firsts = [
        next(
            number for number, node in enumerate(forward_calls(step.graph)) if node.meta.get("fqn") == f"layers.{layer}"
        )
        for layer in range(6)
    ]
    for slow, expected in ((0, range(firsts[0], firsts[1] + 1)), (5, range(firsts[4], firsts[5] + 1))):
        times = dict.fromkeys(step.graph.calls(), 0.01)
        times |= {node: 1.0 for node in step.graph.calls() if node.meta.get("fqn") == f"layers.{slow}"}
        plan = plan_split(step.captured, step.graph, num_stages=2, times_us=times, slack=0.0)
        assert plan.borders[0] in expected


def test_more_stages_than_ops_are_refused_with_the_most_there_can_be() -> None:
    step = deep_step(4, 4, 4)
    with pytest.raises(
        SplitError, match=r"cannot be cut into 99 stages: it has (\d+) ops .* so \1 stages are the most"
    ) as error:
        plan_split(step.captured, step.graph, num_stages=99)
    most = int(str(error.value).split("it has ")[1].split()[0])
    assert len(plan_split(step.captured, step.graph, num_stages=most).stages) == most


def test_a_limit_on_memory_moves_borders_or_says_what_is_enough() -> None:
    step = deep_step(*[16] * 9)
    free = plan_split(step.captured, step.graph, num_stages=3)
    needed = max(stage.kept_bytes * number for stage, number in zip(free.stages, (3, 2, 1), strict=True))
    tight = plan_split(step.captured, step.graph, num_stages=3, memory_bytes=needed - 1)
    assert max(s.kept_bytes * n for s, n in zip(tight.stages, (3, 2, 1), strict=True)) < needed
    assert tight.slowest_us >= free.slowest_us
    with pytest.raises(SplitError, match=r"within 1 bytes of activations; (\d+) bytes are the least") as error:
        plan_split(step.captured, step.graph, num_stages=3, memory_bytes=1)
    least = int(str(error.value).split("activations; ")[1].split()[0])
    plan_split(step.captured, step.graph, num_stages=3, memory_bytes=least)
    with pytest.raises(SplitError, match="the least"):
        plan_split(step.captured, step.graph, num_stages=3, memory_bytes=least - 1)
    with pytest.raises(SplitError, match="in_flight has 2 entries for 3 stages"):
        plan_split(step.captured, step.graph, num_stages=3, memory_bytes=least, in_flight=[1, 1])


# Plans as data


def test_a_plan_is_text_and_a_table() -> None:
    step = zoo_step("gpt")
    plan = plan_split(step.captured, step.graph, num_stages=2)
    assert SplitPlan.from_json(plan.to_json()) == plan
    header, first, second = str(plan).splitlines()
    assert " ".join(header.split()) == "stage begins at why forward backward share crosses keeps parameters"
    assert first.startswith("0      the beginning of the forward")
    assert "the beginning of 'blocks.1'" in second
    assert "balanced" in second


def test_a_plan_knows_its_graph() -> None:
    step, other = zoo_step("gpt"), zoo_step("mlp")
    plan = plan_split(step.captured, step.graph, num_stages=2)
    plan.check(step.graph)
    with pytest.raises(SplitError, match=r"the plan is for a forward of \d+ calls, this one has \d+: plan again"):
        plan.check(other.graph)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"version": 1', '"version": 2'),
        ('"begin": 0', '"begin": 1'),
        ('"begin": 0', '"begin": "0"'),
        ('"begin": 0', '"begin": true'),
        ('"stages"', '"steps"'),
        ('"where"', '"were"'),
        ('"num_calls": ', '"num_calls": -'),
        ("{", "["),
    ],
)
def test_other_text_is_no_plan(old: str, new: str) -> None:
    step = zoo_step("gpt")
    text = plan_split(step.captured, step.graph, num_stages=2).to_json()
    assert old in text
    with pytest.raises(SplitError, match=r"^(this is no split plan|the split plan has version)"):
        SplitPlan.from_json(text.replace(old, new, 1))
    for other in ("", "null", "3", "[" * 100_000):
        with pytest.raises(SplitError, match="this is no split plan"):
            SplitPlan.from_json(other)
