"""What is simulated: a step that one rank computes, or one that is cut into stages; either may run in many replicas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from wholestep.comm.plan import DataParallelPlan, Facts
from wholestep.comm.timeline import Message, delayed
from wholestep.errors import SimulationError
from wholestep.pipe.schedule import Schedule
from wholestep.pipe.simulate import StageCosts
from wholestep.pipe.validate import Edge


@dataclass(frozen=True)
class GradientBucket:
    """Gradients that travel together, in microseconds of computation from the start of a step.

    They are ready at `ready_us`; the next forward reads the first of their parameters at `needed_us`; `moved` says that
    waiting and updating, which takes `update_us`, happens there and not at the end of the step.
    """

    num_bytes: int
    ready_us: float
    needed_us: float = 0.0
    update_us: float = 0.0
    moved: bool = False


@dataclass(frozen=True)
class DataParallelJob:
    """The whole step on every rank. `compute_us` is forward and backward, the first `forward_us` of it the forward."""

    name: str
    compute_us: float
    buckets: tuple[GradientBucket, ...]
    forward_us: float = 0.0
    peak_bytes: int = 0

    @property
    def num_ranks(self) -> int:
        """Of one replica."""
        return 1

    @property
    def work_us(self) -> float:
        """What a rank computes in a step."""
        return self.compute_us + sum(bucket.update_us for bucket in self.buckets)

    @staticmethod
    def of(
        name: str, facts: Facts, plan: DataParallelPlan, *, forward_us: float = 0.0, peak_bytes: int = 0
    ) -> DataParallelJob:
        """A planned step; raises `SimulationError` if the plan is for other gradients than the facts."""
        by_key = {gradient.key: gradient for gradient in facts.gradients}
        missing = next((key for bucket in plan.buckets for key in bucket.keys if key not in by_key), None)
        if missing is not None:
            raise SimulationError(f"the plan has a gradient of '{missing}', which the step has not; plan again")
        grouped = [[by_key[key] for key in bucket.keys] for bucket in plan.buckets]
        messages = [
            Message(
                max(gradient.ready_us for gradient in group),
                min(gradient.needed_us for gradient in group),
                sum(gradient.update_us for gradient in group),
                0.0,
                bucket.moved,
            )
            for group, bucket in zip(grouped, plan.buckets, strict=True)
        ]
        own_us = [sum(gradient.own_us for gradient in group) for group in grouped]
        buckets = [
            GradientBucket(bucket.num_bytes, found.ready_us, found.needed_us, found.update_us, found.moved)
            for found, bucket in zip(delayed(messages, own_us, plan.late, facts.compute_us), plan.buckets, strict=True)
        ]
        return DataParallelJob(name, facts.compute_us, tuple(buckets), forward_us, peak_bytes)


@dataclass(frozen=True)
class StageLoad:
    """A stage: what its actions take for one micro-batch, which gradients it has, and what updating them takes.

    `gradient_bytes` has an entry for each all-reduce.
    """

    costs: StageCosts
    gradient_bytes: tuple[int, ...] = ()
    update_us: float = 0.0


@dataclass(frozen=True)
class Crossing:
    """What travels between two stages for one micro-batch: values one way, their gradients the other."""

    forward_bytes: int
    backward_bytes: int


@dataclass(frozen=True)
class PipelineJob:
    """A step cut into stages. `peak_bytes` has an entry for each rank of the schedule, or none.

    Gradients are averaged over replicas when a rank has done all its work, one all-reduce after the other; with
    `overlaps` those of a stage leave as soon as its last backward is done. A receive is posted `look_ahead` actions
    before its first reader, and nothing travels before that; None is always.
    """

    name: str
    schedule: Schedule
    stages: tuple[StageLoad, ...]
    crossings: Mapping[Edge, Crossing] = field(default_factory=dict[Edge, Crossing])
    overlaps: bool = False
    look_ahead: int | None = None
    peak_bytes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if len(self.stages) != self.schedule.num_stages:
            raise SimulationError(
                f"{len(self.stages)} stages are described, the schedule has {self.schedule.num_stages}"
            )
        if self.peak_bytes and len(self.peak_bytes) != self.schedule.num_ranks:
            raise SimulationError(f"{len(self.peak_bytes)} peaks are given for {self.schedule.num_ranks} ranks")

    @property
    def num_ranks(self) -> int:
        """Of one replica."""
        return self.schedule.num_ranks

    @property
    def edges(self) -> Mapping[Edge, Crossing]:
        """Stages between which something travels; the chain of all stages if nothing is said about any."""
        chain = {(stage, stage + 1): Crossing(0, 0) for stage in range(self.schedule.num_stages - 1)}
        return self.crossings or chain


Job = DataParallelJob | PipelineJob
