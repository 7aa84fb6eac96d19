"""Run a job on a cluster that need not be there, and say what comes of it.

step       how much later the last rank is done with the last of several steps than with the one before
exposed    the step, less the step of the same job on a cluster whose links take no time: what communication costs
bubble     the share of the step in which ranks do not compute, on average over all of them
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from wholestep.cost import Wire
from wholestep.errors import SimulationError
from wholestep.sim import data_parallel, pipeline
from wholestep.sim.cluster import Cluster
from wholestep.sim.jobs import DataParallelJob, Job, PipelineJob
from wholestep.sim.world import World

# By then a loop of data-parallel steps repeats itself; pipelines do after the first.
_NUM_ITERATIONS = 4
_NUM_PIPELINE_ITERATIONS = 2
_FREE = Wire(0.0, 1e12)


@dataclass(frozen=True, slots=True)
class TraceSpan:
    """Something that a rank did, in microseconds from the start of the first step."""

    lane: str
    name: str
    start_us: float
    end_us: float


@dataclass(frozen=True)
class RankPrediction:
    """What `num_equal` ranks do, of which `rank` is the first: their work in a step, and the most that they hold."""

    rank: int
    num_equal: int
    compute_us: float
    peak_bytes: int


@dataclass(frozen=True)
class Prediction:
    """What a step will take; `first_us` is the first one, from a common start to the end of the last rank.

    `exposed_us` is what communication adds to the step; `compute_us` is the computation of the busiest rank.
    """

    name: str
    num_ranks: int
    step_us: float
    first_us: float
    exposed_us: float
    bubble: float
    ranks: tuple[RankPrediction, ...]

    @property
    def compute_us(self) -> float:
        return max(rank.compute_us for rank in self.ranks)

    @property
    def peak_bytes(self) -> int:
        return max(rank.peak_bytes for rank in self.ranks)

    def busy(self, index: int) -> float:
        """The share of a step in which a rank of `ranks` computes."""
        return self.ranks[index].compute_us / self.step_us if self.step_us else 0.0


def simulate(
    job: Job, cluster: Cluster, *, slowness: Mapping[int, float] | None = None, is_folded: bool = True
) -> Prediction:
    """Run a job in as many replicas as fill the cluster.

    `slowness` says how many times as long some ranks take for everything they compute. Equal replicas are run once (see
    `sim.world`), unless `is_folded` is false. Raises `SimulationError` if the job does not fill the cluster, and what
    `validate` raises for a schedule that cannot run.
    """
    run = _Run(job, cluster, slowness or {}, is_folded=is_folded)
    free = _Run(job, replace(cluster, inside=_FREE, between=_FREE), slowness or {}, is_folded=is_folded)
    compute = [_compute_us(job, place) for place in range(job.num_ranks)]
    ranks = [
        RankPrediction(
            run.world.rank(kind, place),
            run.world.kinds[kind].num_replicas,
            compute[place] * run.world.slowness.get(run.world.rank(kind, place), 1.0),
            _peak_bytes(job, place),
        )
        for kind in range(len(run.world.kinds))
        for place in range(job.num_ranks)
    ]
    mean_us = sum(rank.compute_us * rank.num_equal for rank in ranks) / cluster.num_ranks
    return Prediction(
        job.name,
        cluster.num_ranks,
        run.step_us,
        run.first_us,
        max(0.0, run.step_us - free.step_us),
        1 - mean_us / run.step_us if run.step_us else 0.0,
        tuple(ranks),
    )


def step_us(job: Job, cluster: Cluster) -> float:
    """How long a step takes: what `simulate` says, without the rest."""
    return _Run(job, cluster, {}, is_folded=True).step_us


def trace(
    job: Job, cluster: Cluster, ranks: tuple[int, ...], *, slowness: Mapping[int, float] | None = None
) -> dict[int, list[TraceSpan]]:
    """What some ranks of the cluster do in the simulated steps, moment by moment."""
    run = _Run(job, cluster, slowness or {}, is_folded=True)
    return {rank: run.spans_of(rank) for rank in ranks}


class _Run:
    """A job that has been run."""

    def __init__(self, job: Job, cluster: Cluster, slowness: Mapping[int, float], *, is_folded: bool) -> None:
        _check_slowness(slowness, cluster)
        self.job = job
        self.world = world = World(cluster, job.num_ranks, slowness, is_folded=is_folded)
        if isinstance(job, PipelineJob):
            ends = pipeline.add_iterations(world, job, _NUM_PIPELINE_ITERATIONS)
        else:
            ends = data_parallel.add_iterations(world, job, _NUM_ITERATIONS)
        self.starts, self.ends = world.engine.run()
        over = [max(self.ends[task] for row in rows for task in row) for rows in ends]
        self.first_us, self.step_us = over[0], over[-1] - over[-2]

    def spans_of(self, rank: int) -> list[TraceSpan]:
        """What a rank of the cluster does, or the one that stands for it."""
        if not 0 <= rank < self.world.cluster.num_ranks:
            raise SimulationError(f"there is no rank {rank} in a cluster of {self.world.cluster.num_ranks}")
        replica, place = divmod(rank, self.job.num_ranks)
        kind = self.world.kind_of(replica)
        found = [
            TraceSpan(span.lane, span.name, self.starts[span.task], self.ends[span.task])
            for span in self.world.spans.get((kind, place), ())
        ]
        return sorted((span for span in found if span.end_us > span.start_us), key=lambda span: span.start_us)


def _check_slowness(slowness: Mapping[int, float], cluster: Cluster) -> None:
    for rank, factor in slowness.items():
        if not 0 <= rank < cluster.num_ranks or not 0 < factor < 1e6:
            raise SimulationError(f"rank {rank} of {cluster.num_ranks} cannot be {factor} times as slow")


def _compute_us(job: Job, place: int) -> float:
    """What a rank computes in a step."""
    if isinstance(job, DataParallelJob):
        return job.work_us
    actions = job.schedule.actions[place]
    update_us = (
        0.0 if job.schedule.is_forward_only else sum(job.stages[s].update_us for s in job.schedule.stages_of(place))
    )
    return sum(job.stages[action.stage].costs.of(action.kind) for action in actions) + update_us


def _peak_bytes(job: Job, place: int) -> int:
    if isinstance(job, DataParallelJob):
        return job.peak_bytes
    return job.peak_bytes[place] if job.peak_bytes else 0
