"""Random clusters and jobs, small enough to run every rank."""

from __future__ import annotations

from hypothesis import strategies as st

from wholestep.cost import DeviceModel, Wire
from wholestep.pipe import StageCosts, build_schedule
from wholestep.sim import Cluster, Crossing, DataParallelJob, GradientBucket, PipelineJob, StageLoad

DEVICE = DeviceModel(1e5, 1e4, 1.0)
SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "zb-h1", "zbv", "v-half", "dualpipe-v")

times = st.floats(0.0, 1000.0).map(lambda value: round(value, 3))


@st.composite
def wires(draw: st.DrawFn, *, with_cpu: bool = False) -> Wire:
    load = draw(st.floats(0.0, 0.9)) if with_cpu else 0.0
    bytes_per_us = draw(st.floats(0.5, 100.0))
    return Wire(draw(st.floats(0.0, 50.0)), bytes_per_us, load / bytes_per_us, draw(st.sampled_from([0.0, 0.0, 3.0])))


@st.composite
def clusters(draw: st.DrawFn, *, max_ranks: int = 12, with_cpu: bool = True) -> Cluster:
    each = draw(st.integers(1, max_ranks))
    return Cluster(
        draw(st.integers(1, max_ranks // each)),
        each,
        DEVICE,
        draw(wires(with_cpu=with_cpu)),
        draw(wires(with_cpu=with_cpu)),
    )


@st.composite
def data_parallel_jobs(draw: st.DrawFn) -> DataParallelJob:
    compute_us = draw(st.floats(1.0, 2000.0))
    moments = st.floats(0.0, 1.0).map(lambda share: share * compute_us)
    buckets = draw(
        st.lists(
            st.builds(GradientBucket, st.integers(0, 20_000), moments, moments, st.floats(0.0, 100.0), st.booleans()),
            max_size=5,
        )
    )
    return DataParallelJob("job", compute_us, tuple(buckets), forward_us=draw(moments))


@st.composite
def pipeline_jobs(draw: st.DrawFn, num_ranks: int) -> PipelineJob:
    schedule = build_schedule(draw(st.sampled_from(SCHEDULES)), num_ranks, draw(st.integers(1, 4)))
    stages = [
        StageLoad(
            StageCosts(draw(times), draw(times), draw(times)),
            tuple(draw(st.lists(st.integers(1, 20_000), max_size=2))),
            draw(times),
        )
        for _ in range(schedule.num_stages)
    ]
    sizes = st.integers(0, 10_000)
    crossings = {(stage, stage + 1): Crossing(draw(sizes), draw(sizes)) for stage in range(schedule.num_stages - 1)}
    look_ahead = draw(st.sampled_from([None, 1, 3]))
    return PipelineJob("job", schedule, tuple(stages), crossings, draw(st.booleans()), look_ahead)


def divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]
