"""A data-parallel step as tasks: one computing lane per rank, one channel for the all-reduces of all.

    compute   forward ... backward ... updates       stops where it needs a bucket that has not arrived
    channel   one bucket after the other, in the order of the plan, each when all ranks have its gradients

The computation of a step is cut where something happens: a bucket is ready, or an update that moved here from the step
before is needed. The channel does not care about the border of an iteration.
"""

from __future__ import annotations

from collections.abc import Sequence

from wholestep.sim.jobs import DataParallelJob, GradientBucket
from wholestep.sim.world import World

_PLACE = 0


def add_iterations(world: World, job: DataParallelJob, num_iterations: int) -> list[list[list[int]]]:
    """Add so many steps; for each iteration, kind and place the task that ends it."""
    ends: list[list[list[int]]] = []
    pending: list[int] = []
    for iteration in range(num_iterations):
        pending = _add_step(world, job, pending, iteration)
        ends.append([[world.last(kind, _PLACE)] for kind in range(len(world.kinds))])
    return ends


def _add_step(world: World, job: DataParallelJob, before: list[int], iteration: int) -> list[int]:
    """One step; `before` are the all-reduces of the step before. Returns those of this one."""
    ready: list[list[int]] = [[] for _ in job.buckets]
    for kind in range(len(world.kinds)):
        _add_computation(world, job, kind, before, ready)
    reductions: list[int] = []
    for index, bucket in enumerate(job.buckets):
        earlier = reductions[-1:] or before[-1:]
        name = f"bucket {index}, step {iteration}"
        reductions.append(world.all_reduce(_PLACE, name, bucket.num_bytes, [*ready[index], *earlier]))
    for kind in range(len(world.kinds)):
        for index, bucket in enumerate(job.buckets):
            if not bucket.moved:
                _add_update(world, kind, index, bucket, reductions[index])
    return reductions


def _add_computation(
    world: World, job: DataParallelJob, kind: int, before: Sequence[int], ready: list[list[int]]
) -> None:
    """Forward and backward on one rank, with the updates that have moved into it."""
    done_us = 0.0
    issue_us = world.issue_us(_PLACE) if world.num_replicas > 1 else 0.0
    for moment_us, is_ready, index in _moments(job):
        for begin_us, end_us, name in _parts(job, done_us, moment_us):
            world.compute(kind, _PLACE, name, end_us - begin_us)
        done_us = max(done_us, moment_us)
        if is_ready:
            ready[index].append(world.compute(kind, _PLACE, f"issue bucket {index}", issue_us))
        elif before:
            _add_update(world, kind, index, job.buckets[index], before[index])
    for begin_us, end_us, name in _parts(job, done_us, job.compute_us):
        world.compute(kind, _PLACE, name, end_us - begin_us)


def _add_update(world: World, kind: int, index: int, bucket: GradientBucket, reduction: int) -> None:
    world.compute(kind, _PLACE, f"update {index}", bucket.update_us, [reduction])


def _moments(job: DataParallelJob) -> list[tuple[float, bool, int]]:
    """Where a step is cut: (time, whether a bucket is ready or a moved update is needed, bucket), in order."""
    ready = [(bucket.ready_us, True, index) for index, bucket in enumerate(job.buckets)]
    needed = [(bucket.needed_us, False, index) for index, bucket in enumerate(job.buckets) if bucket.moved]
    return sorted([*ready, *needed])


def _parts(job: DataParallelJob, begin_us: float, end_us: float) -> list[tuple[float, float, str]]:
    """A stretch of computation, cut in two where the forward ends."""
    border_us = min(max(job.forward_us, begin_us), end_us)
    parts = [(begin_us, border_us, "forward"), (border_us, end_us, "backward" if job.forward_us else "compute")]
    return [part for part in parts if part[1] > part[0]]
