"""The best plans for a step on a cluster: every combination on a grid, simulated, the shortest steps that fit first.

Data parallel    bucket sizes x what crosses the iteration border, with the whole step on every rank
Pipeline         ranks x micro-batches x schedule, in as many replicas as fill the cluster

Each for every memory budget that facts are given for: a graph that keeps less and computes more is a step of its own.

Every rank brings as many rows as the captured step has, so that all plans train on the same global batch and steps can
be compared by their time. Some plans need not be simulated: a step is never shorter than the work of its busiest rank,
nor than all the all-reduces of one of its ranks, which come one after the other (`_least_us`).
Candidates are taken in the order of that bound, and once `num_best` plans that fit are known, one whose bound is above
the worst of them cannot be among the best, nor can any behind it. So the result is that of trying all of them, which
tests check.

Memory is asked for only where a plan would be among the best: for data parallel that means rewriting the graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from wholestep.comm.plan import DataParallelPlan, decide
from wholestep.errors import ScheduleError, SimulationError, SplitError
from wholestep.pipe.schedules import FAMILIES
from wholestep.remat import readable
from wholestep.sim.cluster import Cluster
from wholestep.sim.facts import PeakOf, StepFacts, schedule_of
from wholestep.sim.jobs import DataParallelJob, Job, PipelineJob
from wholestep.sim.simulate import Prediction, simulate, step_us
from wholestep.sim.world import World

CROSSINGS = ("none", "all", "auto")
SCHEDULES = ("1f1b", "interleaved-1f1b", "zb-h1", "zbv", "v-half", "dualpipe-v")
_MAX_ACTIONS = 200_000


@dataclass(frozen=True)
class Limits:
    """The grid, and what a rank may hold (None: what the cluster's device has, if that is known)."""

    bucket_mb: tuple[float, ...] = (5.0, 25.0, 100.0)
    cross_iteration: tuple[str, ...] = CROSSINGS
    pipeline_ranks: tuple[int, ...] = (2, 4, 8, 16)
    micro_batches_per_rank: tuple[int, ...] = (1, 2, 4)
    schedules: tuple[str, ...] = SCHEDULES
    memory_bytes: int | None = None

    def __post_init__(self) -> None:
        unknown = next(
            (name for name in self.schedules if name not in FAMILIES or name in ("forward", "planned")), None
        )
        if unknown is not None:
            raise SimulationError(f"schedule '{unknown}' cannot be searched; choose from {', '.join(SCHEDULES)}")
        crossing = next((name for name in self.cross_iteration if name not in CROSSINGS), None)
        if crossing is not None:
            raise SimulationError(f"cross_iteration is one of {', '.join(CROSSINGS)}, not '{crossing}'")
        numbers = (*self.bucket_mb, *self.pipeline_ranks, *self.micro_batches_per_rank)
        if any(not 0 < number < 1e6 for number in numbers):
            raise SimulationError("bucket sizes, ranks and micro-batches to search are numbers above 0")


@dataclass(frozen=True)
class Option:
    """One way to run a step: what to say to `wholestep`, its plan or schedule as a job, and the least it can take."""

    options: dict[str, str | float | int]
    job: Job
    bound_us: float
    plan: DataParallelPlan | None = None
    peak_of: PeakOf | None = None

    @property
    def peak_bytes(self) -> int:
        """The most that a rank holds; for data parallel that takes rewriting the graph."""
        if self.plan is not None and self.peak_of is not None:
            return self.peak_of(self.plan)
        return self.job.peak_bytes if isinstance(self.job, DataParallelJob) else max(self.job.peak_bytes, default=0)


@dataclass(frozen=True)
class Ranked:
    """An option that was simulated, and why it is where it is."""

    options: dict[str, str | float | int]
    job: Job
    prediction: Prediction
    peak_bytes: int
    reason: str


@dataclass(frozen=True)
class Found:
    """The best plans, the shortest step first; what did not fit; how many plans there were, how many were simulated."""

    best: tuple[Ranked, ...]
    refused: tuple[str, ...]
    num_options: int
    num_simulated: int


def search(
    steps: StepFacts | Sequence[StepFacts], cluster: Cluster, limits: Limits | None = None, *, num_best: int = 5
) -> Found:
    """The best plans on a grid, of one step or of the same step under several memory budgets.

    Raises `SimulationError` if nothing fits into memory.
    """
    given = [steps] if isinstance(steps, StepFacts) else list(steps)
    return _Search(given, cluster, limits or Limits(), num_best).run()


def options_of(step: StepFacts, cluster: Cluster, limits: Limits) -> Iterator[Option]:
    """Everything on the grid that can be run on the cluster."""
    yield from _data_parallel_options(step, cluster, limits)
    for num_ranks in sorted(set(limits.pipeline_ranks)):
        if num_ranks < 2 or cluster.num_ranks % num_ranks:
            continue
        for per_rank in sorted(set(limits.micro_batches_per_rank)):
            for name in limits.schedules:
                option = _pipeline_option(step, cluster, name, num_ranks, num_ranks * per_rank)
                if option is not None:
                    yield option


def _data_parallel_options(step: StepFacts, cluster: Cluster, limits: Limits) -> Iterator[Option]:
    facts = step.for_cluster(cluster)
    seen: set[tuple[object, ...]] = set()
    for cross_iteration in limits.cross_iteration:
        for bucket_mb in limits.bucket_mb:
            plan = decide(facts, bucket_mb=bucket_mb, cross_iteration=cross_iteration)
            key = tuple((bucket.keys, bucket.moved, bucket.late) for bucket in plan.buckets)
            if key in seen:
                continue
            seen.add(key)
            job = step.data_parallel_job(plan, f"data parallel, {bucket_mb:g} MB, {cross_iteration}")
            options: dict[str, str | float | int] = {"bucket_mb": bucket_mb, "cross_iteration": cross_iteration}
            yield Option(_labelled("data parallel", step, options), job, _least_us(job, cluster), plan, step.peak_of)


def _pipeline_option(
    step: StepFacts, cluster: Cluster, name: str, num_ranks: int, num_micro_batches: int
) -> Option | None:
    """None where there is no such schedule, or no such cut."""
    num_stages = num_ranks * (FAMILIES[name].stages_per_rank or 2)
    if 3 * num_stages * num_micro_batches > _MAX_ACTIONS:
        return None
    try:
        schedule = schedule_of(name, num_ranks, num_micro_batches)
        job = step.pipeline_job(schedule)
    except (ScheduleError, SplitError):
        return None
    options: dict[str, str | float | int] = {"schedule": name, "ranks": num_ranks, "micro_batches": num_micro_batches}
    return Option(_labelled("pipeline", step, options), job, _least_us(job, cluster))


def _labelled(kind: str, step: StepFacts, options: dict[str, str | float | int]) -> dict[str, str | float | int]:
    return {"kind": kind, **options} | ({"memory_budget": step.budget} if step.budget else {})


def _least_us(job: Job, cluster: Cluster) -> float:
    """What no step of a job can do without: the work of the busiest rank, or the all-reduces of one rank."""
    world = World(cluster, job.num_ranks)
    if isinstance(job, DataParallelJob):
        return max(job.work_us, sum(world.collective(0, bucket.num_bytes).time_us for bucket in job.buckets))
    work, travel = [0.0] * job.num_ranks, [0.0] * job.num_ranks
    for stage, place in enumerate(job.schedule.stage_ranks):
        load = job.stages[stage]
        work[place] += load.update_us
        travel[place] += sum(world.collective(place, num_bytes).time_us for num_bytes in load.gradient_bytes)
    for place, row in enumerate(job.schedule.actions):
        work[place] += sum(job.stages[action.stage].costs.of(action.kind) for action in row)
    return max(*work, *travel)


class _Search:
    def __init__(self, steps: Sequence[StepFacts], cluster: Cluster, limits: Limits, num_best: int) -> None:
        self.steps = steps
        self.cluster = cluster
        self.limits = limits
        self.num_best = num_best
        self.refused: list[str] = []

    @cached_property
    def memory_bytes(self) -> int:
        limit = self.limits.memory_bytes
        return self.cluster.device.memory_bytes if limit is None else limit

    def run(self) -> Found:
        found = (option for step in self.steps for option in options_of(step, self.cluster, self.limits))
        options = sorted(found, key=lambda option: option.bound_us)
        best: list[tuple[float, int, Option, int]] = []
        num_simulated = 0
        for number, option in enumerate(options):
            if len(best) == self.num_best and option.bound_us > best[-1][0]:
                break
            num_simulated += 1
            time_us = step_us(option.job, self.cluster)
            if len(best) == self.num_best and time_us >= best[-1][0]:
                continue
            peak_bytes = option.peak_bytes
            if self.memory_bytes and peak_bytes > self.memory_bytes:
                self.refused.append(
                    f"{option.job.name} needs {readable(peak_bytes)} of {readable(self.memory_bytes)} on a rank"
                )
                continue
            best.append((time_us, number, option, peak_bytes))
            best.sort(key=lambda entry: entry[:2])
            del best[self.num_best :]
        if not best:
            raise SimulationError(
                f"none of {len(options)} plans fits into {readable(self.memory_bytes)} on a rank; take a memory "
                f"budget, fewer rows or more pipeline ranks ({next(iter(self.refused), 'there was nothing to try')})"
            )
        ranked = [self._ranked(*entry[2:], best[0][0]) for entry in best]
        return Found(tuple(ranked), tuple(self.refused), len(options), num_simulated)

    def _ranked(self, option: Option, peak_bytes: int, best_us: float) -> Ranked:
        prediction = simulate(option.job, self.cluster)
        return Ranked(option.options, option.job, prediction, peak_bytes, _reason(option, prediction, best_us))


def _reason(option: Option, prediction: Prediction, best_us: float) -> str:
    """One sentence: where the time of a step goes."""
    exposed = prediction.exposed_us / prediction.step_us if prediction.step_us else 0.0
    idle = max(0.0, prediction.bubble - exposed)
    parts = [f"{100 * (1 - prediction.bubble):.0f}% of the step is computation"]
    if exposed >= 0.005:
        parts.append(f"{100 * exposed:.0f}% communication that nothing hides")
    if isinstance(option.job, PipelineJob) and idle >= 0.005:
        parts.append(f"{100 * idle:.0f}% bubble")
    if isinstance(option.job, DataParallelJob):
        num_moved = sum(bucket.moved for bucket in option.job.buckets)
        parts.append(f"{num_moved} of {len(option.job.buckets)} buckets arrive in the next step")
    slower = prediction.step_us / best_us - 1 if best_us else 0.0
    return ", ".join(parts) + (f"; {100 * slower:.0f}% slower than the best" if slower >= 0.005 else "")
