"""The simulator against oracles: comm's timeline, pipe's, unfolded worlds, and steps that can be worked out by hand."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.sim.strategies import DEVICE, clusters, data_parallel_jobs, divisors, pipeline_jobs

from wholestep.comm.timeline import Message
from wholestep.comm.timeline import simulate as simulate_timeline
from wholestep.cost import Wire
from wholestep.errors import SimulationError
from wholestep.pipe import StageCosts, build_schedule
from wholestep.pipe import simulate as simulate_schedule
from wholestep.sim import (
    Cluster,
    Crossing,
    DataParallelJob,
    GradientBucket,
    PipelineJob,
    Prediction,
    StageLoad,
    simulate,
    trace,
)

NOTHING = Wire(0.0, 1e12)


def two_ranks(latency_us: float, bytes_per_us: float, **options: float) -> Cluster:
    return Cluster(2, 1, DEVICE, NOTHING, Wire(latency_us, bytes_per_us, **options))


def figures(prediction: Prediction) -> tuple[float, ...]:
    return prediction.step_us, prediction.first_us, prediction.exposed_us, prediction.bubble


@settings(max_examples=100, deadline=None)
@given(job=data_parallel_jobs(), cluster=clusters(with_cpu=False))
def test_a_data_parallel_step_is_what_the_planner_foretold(job: DataParallelJob, cluster: Cluster) -> None:
    cluster = replace(
        cluster, inside=replace(cluster.inside, issue_us=0.0), between=replace(cluster.between, issue_us=0.0)
    )
    ranks = range(cluster.num_ranks)
    messages = [
        Message(b.ready_us, b.needed_us, b.update_us, cluster.all_reduce(ranks, b.num_bytes).time_us, b.moved)
        for b in job.buckets
    ]
    expected = simulate_timeline(messages, job.compute_us)
    found = simulate(job, cluster)
    assert found.step_us == pytest.approx(expected.period_us, rel=1e-6, abs=1e-6)
    assert found.exposed_us == pytest.approx(sum(expected.exposed_us), rel=1e-6, abs=1e-3)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_pipeline_without_traffic_is_what_its_schedule_says(data: st.DataObject) -> None:
    num_ranks = data.draw(st.integers(1, 4))
    job = data.draw(pipeline_jobs(num_ranks))
    job = replace(job, crossings={edge: Crossing(0, 0) for edge in job.edges}, look_ahead=None)
    job = replace(job, stages=tuple(replace(stage, gradient_bytes=(), update_us=0.0) for stage in job.stages))
    expected = simulate_schedule(job.schedule, [stage.costs for stage in job.stages])
    found = simulate(job, Cluster(1, num_ranks, DEVICE, NOTHING, NOTHING))
    assert found.first_us == pytest.approx(expected.makespan, rel=1e-6, abs=1e-3)
    assert found.exposed_us == 0
    assert [rank.compute_us for rank in found.ranks] == pytest.approx([expected.busy(r) for r in range(num_ranks)])


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_messages_without_contention_are_transfers(data: st.DataObject) -> None:
    """One micro-batch: no two messages are ever on their way at once."""
    num_ranks = data.draw(st.integers(2, 4))
    stages = tuple(StageLoad(StageCosts(*data.draw(st.tuples(*[st.floats(0, 99)] * 3)))) for _ in range(num_ranks))
    sizes = data.draw(st.lists(st.integers(0, 5000), min_size=num_ranks - 1, max_size=num_ranks - 1))
    crossings = {(stage, stage + 1): Crossing(size, size) for stage, size in enumerate(sizes)}
    wire = Wire(data.draw(st.floats(0, 50)), data.draw(st.floats(0.5, 100)))
    job = PipelineJob("job", build_schedule("1f1b", num_ranks, 1), stages, crossings)
    transfers = {edge: wire.time_us(crossing.forward_bytes) for edge, crossing in crossings.items()}
    expected = simulate_schedule(job.schedule, [stage.costs for stage in stages], transfers=transfers)
    assert simulate(job, Cluster(1, num_ranks, DEVICE, wire, NOTHING)).first_us == pytest.approx(expected.makespan)


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_folded_and_unfolded_worlds_agree(data: st.DataObject) -> None:
    cluster = data.draw(clusters(max_ranks=12))
    num_ranks = data.draw(st.sampled_from([each for each in divisors(cluster.num_ranks) if each <= 4]))
    job = data.draw(data_parallel_jobs() if num_ranks == 1 else pipeline_jobs(num_ranks))
    slow_ranks = st.dictionaries(st.integers(0, cluster.num_ranks - 1), st.sampled_from([1.0, 1.5, 3.0]), max_size=2)
    slowness = data.draw(slow_ranks)
    folded = simulate(job, cluster, slowness=slowness)
    plain = simulate(job, cluster, slowness=slowness, is_folded=False)
    assert figures(folded) == pytest.approx(figures(plain), rel=1e-6, abs=1e-3)
    assert sum(rank.num_equal for rank in folded.ranks) == len(plain.ranks) == cluster.num_ranks


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_a_step_takes_at_least_its_work_and_communication_never_helps(data: st.DataObject) -> None:
    cluster = data.draw(clusters(max_ranks=8))
    num_ranks = data.draw(st.sampled_from([each for each in divisors(cluster.num_ranks) if each <= 4]))
    job = data.draw(data_parallel_jobs() if num_ranks == 1 else pipeline_jobs(num_ranks))
    found = simulate(job, cluster)
    assert found.step_us >= found.compute_us - 1e-3
    assert -1e-9 <= found.bubble <= 1
    assert found.exposed_us <= found.step_us


def test_a_step_by_hand() -> None:
    """Forward 40, backward 60; one bucket of 100 us is ready at 70, another at 100; updates take 5 each."""
    buckets = (GradientBucket(1000, 70.0, 0.0, 5.0), GradientBucket(1000, 100.0, 99.0, 5.0))
    job = DataParallelJob("job", 100.0, buckets, forward_us=40.0)
    cluster = two_ranks(0.0, 10.0)
    # 70 + 100 + 100 on the link, then the last update.
    found = simulate(job, cluster)
    assert found.step_us == pytest.approx(275)
    assert found.exposed_us == pytest.approx(275 - 110)
    assert found.bubble == pytest.approx(1 - 110 / 275)
    moved = replace(job, buckets=tuple(replace(bucket, moved=True) for bucket in buckets))
    # The link is busy all the time.
    assert simulate(moved, cluster).step_us == pytest.approx(200)


def test_a_processor_that_sends_computes_less() -> None:
    job = DataParallelJob("job", 1000.0, (GradientBucket(1000, 0.0),))
    free = simulate(job, two_ranks(0.0, 10.0))
    # 100 us on the way, of which half is taken from the computation.
    loaded = simulate(job, two_ranks(0.0, 10.0, cpu_us_per_byte=0.05))
    assert (free.step_us, loaded.step_us) == (pytest.approx(1000), pytest.approx(1050))
    issued = simulate(job, two_ranks(0.0, 10.0, issue_us=7.0))
    assert issued.step_us == pytest.approx(1007)


def test_messages_share_a_port() -> None:
    """Two stages read the same value: both copies leave at once and take twice as long."""
    schedule = build_schedule("forward", 3, 1, stages_per_rank=1)
    crossings = {(0, 1): Crossing(1000, 0), (0, 2): Crossing(1000, 0)}
    job = PipelineJob("job", schedule, (StageLoad(StageCosts(10.0)),) * 3, crossings)
    found = simulate(job, Cluster(1, 3, DEVICE, Wire(0.0, 10.0), NOTHING))
    assert found.first_us == pytest.approx(10 + 200 + 10)


def test_gradients_may_leave_before_the_drain_is_over() -> None:
    schedule = build_schedule("1f1b", 2, 2)
    stages = (StageLoad(StageCosts(10.0, 10.0, 10.0), (1000,)),) * 2
    job = PipelineJob("job", schedule, stages, {(0, 1): Crossing(100, 100)})
    cluster = Cluster(2, 2, DEVICE, Wire(0.0, 1.0), Wire(0.0, 10.0))
    late, early = simulate(job, cluster), simulate(replace(job, overlaps=True), cluster)
    # The last stage is done first; its rank has still to hand its last gradient down.
    assert early.first_us <= late.first_us
    free = replace(cluster, inside=NOTHING)
    assert simulate(job, free).first_us == pytest.approx(10 * 2 * 3 + 10 * 3 + 100)


def test_sixteen_thousand_ranks_take_seconds() -> None:
    cluster = Cluster(2048, 8, DEVICE, Wire(3.0, 3.7e5), Wire(6.0, 4.5e4))
    started = time.process_time()
    buckets = tuple(GradientBucket(25_000_000, 1000.0 * index, moved=index % 2 == 0) for index in range(40))
    found = simulate(DataParallelJob("job", 50_000.0, buckets), cluster)
    assert (found.num_ranks, len(found.ranks)) == (16_384, 1)
    schedule = build_schedule("1f1b", 16, 32)
    job = PipelineJob("job", schedule, (StageLoad(StageCosts(300.0, 300.0, 300.0), (10**8,)),) * 16)
    found = simulate(job, cluster)
    assert (found.num_ranks, sum(rank.num_equal for rank in found.ranks)) == (16_384, 16_384)
    assert time.process_time() - started < 60


def test_a_job_must_fill_the_cluster() -> None:
    job = PipelineJob("job", build_schedule("1f1b", 2, 2), (StageLoad(StageCosts()),) * 2)
    with pytest.raises(SimulationError, match="a job of 2 ranks does not fill a cluster of 3"):
        simulate(job, Cluster(1, 3, DEVICE, NOTHING, NOTHING))
    with pytest.raises(SimulationError, match=r"rank 9 of 2 cannot be 2\.0 times as slow"):
        simulate(job, Cluster(1, 2, DEVICE, NOTHING, NOTHING), slowness={9: 2.0})
    with pytest.raises(SimulationError, match="1 stages are described, the schedule has 2"):
        replace(job, stages=job.stages[:1])


def test_what_ranks_do_can_be_looked_at() -> None:
    job = DataParallelJob("job", 100.0, (GradientBucket(1000, 70.0, update_us=5.0),), forward_us=40.0)
    spans = trace(job, two_ranks(0.0, 10.0), (1,))[1]
    found = {(span.lane, span.name, span.start_us, span.end_us) for span in spans}
    expected = {
        ("compute", "forward", 0, 40),
        ("compute", "backward", 40, 70),
        ("compute", "backward", 70, 100),
        ("reduce", "bucket 0, step 0", 70, 170),
        ("compute", "update 0", 170, 175),
        ("compute", "forward", 175, 215),
    }
    assert expected <= found
    with pytest.raises(SimulationError, match="there is no rank 2"):
        trace(job, two_ranks(0.0, 10.0), (2,))
