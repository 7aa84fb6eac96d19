"""Searches against trying everything, on steps that are made up of figures."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.sim.strategies import DEVICE, wires

from wholestep.comm.plan import Facts, Gradient
from wholestep.cost import Wire
from wholestep.errors import SimulationError
from wholestep.pipe.balance import Profile, Tally
from wholestep.sim import Cluster, PipelineJob, simulate
from wholestep.sim.facts import Places, StepFacts, schedule_of
from wholestep.sim.search import Limits, options_of, search

NUM_PLACES = 8


def made_up(forward_us: list[float], sizes: list[int], kept: list[int], overhead_us: float = 0.0) -> StepFacts:
    """A chain of layers, each with a gradient: twice as long backwards, and in the order of the layers from behind."""
    total_us = sum(forward_us)
    gradients: list[Gradient] = []
    moment_us = total_us
    for place in reversed(range(len(forward_us))):
        moment_us += 2 * forward_us[place]
        needed_us = sum(forward_us[:place])
        gradients.append(Gradient(f"layer{place}", sizes[place], "float32/cpu/0", moment_us, needed_us, 1.0, 0.0))
    count = len(forward_us)
    chain = Profile(
        tuple(forward_us),
        tuple(2 * time_us for time_us in forward_us),
        (0, *([4000] * (count - 1)), 0),
        (True,) * count,
        tuple(Tally(size, (place,)) for place, size in enumerate(kept)),
        tuple(Tally(size, (place,)) for place, size in enumerate(sizes)),
    )
    places = Places((1,) * count, (2,) * count, tuple(forward_us))
    slots = 4 * sum(sizes)
    facts = Facts(2, True, tuple(gradients), 3 * total_us, None)
    return StepFacts(
        "made up", facts, total_us, float(count), overhead_us, chain, places, slots + sum(kept), slots, 2.0
    )


@st.composite
def steps(draw: st.DrawFn) -> StepFacts:
    numbers = st.lists(st.integers(1, 200), min_size=NUM_PLACES, max_size=NUM_PLACES)
    forward_us = [float(number) for number in draw(numbers)]
    sizes = [1000 * number for number in draw(numbers)]
    return made_up(forward_us, sizes, [100 * number for number in draw(numbers)], draw(st.sampled_from([0.0, 0.5])))


GRID = Limits(
    bucket_mb=(0.1, 1.0),
    cross_iteration=("none", "auto"),
    pipeline_ranks=(2, 4),
    micro_batches_per_rank=(1, 2),
    schedules=("1f1b", "zbv"),
)


@settings(max_examples=20, deadline=None)
@given(
    step=steps(),
    wire=wires(),
    share=st.sampled_from([0.0, 0.4, 0.8]),
    num_best=st.integers(1, 4),
)
def test_a_search_finds_what_trying_everything_finds(step: StepFacts, wire: Wire, share: float, num_best: int) -> None:
    cluster = Cluster(2, 4, DEVICE, wire, replace(wire, bytes_per_us=wire.bytes_per_us / 4))
    limits = replace(GRID, memory_bytes=int(share * step.peak_bytes))
    options = list(options_of(step, cluster, limits))
    tried = [(simulate(option.job, cluster).step_us, option.peak_bytes, option.job.name) for option in options]
    fitting = sorted((t, name) for t, peak_bytes, name in tried if not share or peak_bytes <= share * step.peak_bytes)
    if not fitting:
        with pytest.raises(SimulationError, match="plans fits into"):
            search(step, cluster, limits, num_best=num_best)
        return
    found = search(step, cluster, limits, num_best=num_best)
    assert [one.prediction.step_us for one in found.best] == [time_us for time_us, _ in fitting[:num_best]]
    assert found.num_options == len(options)
    assert found.num_simulated <= len(options)


def test_the_grid_has_both_kinds_and_only_what_fills_the_cluster() -> None:
    step = made_up([10.0] * NUM_PLACES, [1000] * NUM_PLACES, [10] * NUM_PLACES)
    six = Cluster(1, 6, DEVICE, Wire(1.0, 10.0), Wire(1.0, 1.0))
    found = [option.options for option in options_of(step, six, replace(GRID, pipeline_ranks=(2, 4, 16)))]
    assert {options["kind"] for options in found} == {"data parallel", "pipeline"}
    assert {options["ranks"] for options in found if "ranks" in options} == {2}


def test_slow_links_make_pipelines_worth_while() -> None:
    """Gradients of a megabyte against activations of kilobytes."""
    step = made_up([100.0] * NUM_PLACES, [10**6] * NUM_PLACES, [10] * NUM_PLACES)
    cluster = Cluster(1, 8, DEVICE, Wire(1.0, 1000.0), Wire(1.0, 1.0))
    slow = replace(cluster, inside=Wire(1.0, 50.0))
    wide = replace(GRID, pipeline_ranks=(2, 4, 8))
    best, other = (search(step, each, wide).best[0] for each in (replace(cluster, inside=Wire(1.0, 1e9)), slow))
    assert best.options["kind"] == "data parallel"
    assert other.options["kind"] == "pipeline"
    assert "bubble" in other.reason


def test_what_does_not_fit_is_named() -> None:
    step = made_up([10.0] * NUM_PLACES, [1000] * NUM_PLACES, [10**6] * NUM_PLACES)
    cluster = Cluster(1, 4, replace(DEVICE, memory_bytes=6 * 10**6), Wire(1.0, 10.0), Wire(1.0, 1.0))
    found = search([step, replace(step, budget="0.5", peak_bytes=10**6)], cluster, replace(GRID, pipeline_ranks=()))
    assert found.best[0].options["memory_budget"] == "0.5"
    assert "data parallel, 0.1 MB, none needs 7.7 MiB of 5.7 MiB on a rank" in found.refused


def test_a_grid_has_to_make_sense() -> None:
    with pytest.raises(SimulationError, match="schedule 'forward' cannot be searched"):
        Limits(schedules=("forward",))
    with pytest.raises(SimulationError, match="cross_iteration is one of none, all, auto, not 'some'"):
        Limits(cross_iteration=("some",))
    with pytest.raises(SimulationError, match="are numbers above 0"):
        Limits(pipeline_ranks=(0,))


def test_micro_batches_scale_what_depends_on_rows() -> None:
    step = made_up([10.0] * NUM_PLACES, [1000] * NUM_PLACES, [100] * NUM_PLACES, overhead_us=1.0)
    job = step.pipeline_job(schedule_of("1f1b", 2, 8))
    assert isinstance(job, PipelineJob)
    # A quarter of the rows: four layers of 9 us of work and 1 us of overhead each.
    assert job.stages[0].costs.forward == pytest.approx(4 * (9 / 4 + 1))
    assert job.stages[0].gradient_bytes == (4000,)
    assert job.crossings[0, 1].forward_bytes == 4000 / 4 / 2
    # Parameters, gradients and state; two micro-batches in flight on the first rank, one on the last.
    assert job.peak_bytes == (4 * 4000 + 2 * 400 // 4, 4 * 4000 + 400 // 4)
