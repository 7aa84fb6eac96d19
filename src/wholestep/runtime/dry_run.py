"""Planning a step for a device and ranks that are not there: the same decisions, from figures not measured here."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from dataclasses import dataclass, replace
from unittest import mock

from wholestep.comm import reducible_gradients
from wholestep.comm.facts import gather_facts
from wholestep.comm.plan import DataParallelPlan, Facts, decide
from wholestep.comm.timeline import Message, simulate
from wholestep.cost import DeviceModel, Link
from wholestep.errors import RankError
from wholestep.lower import Region
from wholestep.passes import Pass
from wholestep.runtime.data_parallel import CaptureStep, DataParallel, Prepared, plan_passes

_GROUP = "imagined"


@dataclass(frozen=True)
class DryRun:
    """What a step is planned for: a device, and `world` ranks whose all-reduces take what `link` says."""

    device: DeviceModel
    world: int = 1
    link: Link | None = None


class ImaginedReplicas:
    """Stands in for `Replicas` where there is no process group: all ranks are taken to be like this one."""

    def __init__(
        self, run: DryRun, options: DataParallel, bucket_mb: float, cross_iteration: str | tuple[str, ...]
    ) -> None:
        self._run = run
        self._options = options
        self._bucket_mb = bucket_mb
        self._cross_iteration = cross_iteration

    def prepare(self, capture_step: CaptureStep, number: int) -> Prepared:
        """Capture, and find the plan for the gradients the capture has."""
        captured, graph = capture_step(frozenset())
        if not reducible_gradients(graph):
            raise RankError("data_parallel has nothing to do: no parameter of this step gets a gradient")
        facts = gather_facts(
            graph,
            world=self._run.world,
            average=self._options.reduce == "mean",
            link=self._run.link,
            is_measured=False,
            device=self._run.device,
        )
        plan = decide(facts, bucket_mb=self._bucket_mb, cross_iteration=self._cross_iteration)
        return Prepared(captured, graph, plan if plan.link else _timed(plan, facts))

    def passes(self, plan: DataParallelPlan) -> list[Pass]:
        """The rewrites that would carry out a plan."""
        return plan_passes(plan, _GROUP)


def _timed(plan: DataParallelPlan, facts: Facts) -> DataParallelPlan:
    """A plan for which nothing had to be simulated, with what a simulation says."""
    if facts.link is None:
        return plan
    messages = _messages(plan, facts, facts.link)
    timeline = simulate(messages, facts.compute_us)
    unmoved = simulate([replace(message, moved=False) for message in messages], facts.compute_us)
    return replace(
        plan,
        link=str(facts.link),
        compute_us=facts.compute_us,
        travel_us=sum(message.travel_us for message in messages),
        predicted_us=timeline.period_us,
        exposed_us=sum(timeline.exposed_us),
        unmoved_us=unmoved.period_us,
    )


def _messages(plan: DataParallelPlan, facts: Facts, link: Link) -> list[Message]:
    known = {gradient.key: gradient for gradient in facts.gradients}
    return [
        Message(
            ready_us=max(known[key].ready_us for key in bucket.keys),
            needed_us=min(known[key].needed_us for key in bucket.keys),
            update_us=sum(known[key].update_us for key in bucket.keys),
            travel_us=link.time_us(bucket.num_bytes),
            moved=bucket.moved,
        )
        for bucket in plan.buckets
    ]


@contextlib.contextmanager
def uncompiled_regions() -> Generator[None]:
    """Leave lowered regions as they are: compiling takes long, and what is not going to run does not need it."""

    def leave(region: Region, free_outputs: frozenset[int] = frozenset()) -> None:
        region.failure = "planned, not compiled"

    with mock.patch.object(Region, "prepare", leave):
        yield
