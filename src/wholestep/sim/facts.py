"""A captured step in figures: what simulations and searches need to know of it, for one device.

A pipeline works on micro-batches. With P ranks and m micro-batches, and as many rows for each rank as the captured step
has, a micro-batch has s = P / m times its rows. Of an op that takes t, of which o is overhead, a micro-batch takes

    (t - o) s + o

activations and what crosses a border shrink by s, parameters and gradients do not. Memory of a stage is then

    parameters (1 + 1 + state per parameter) + s kept (micro-batches in flight) + s (peak - slots - kept) of the step

the last term being what the step needs beyond what it keeps, wherever that is: an upper bound for most stages.
`pipeline_peaks` follows a cut graph exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import pairwise

from torch import fx

from wholestep.comm import reducible_gradients
from wholestep.comm.facts import gather_facts
from wholestep.comm.overlap import own_nodes
from wholestep.comm.plan import DataParallelPlan, Facts
from wholestep.compiler import Draft, Hardware, StepOptions, begin, build, settle
from wholestep.cost import DeviceModel, Link, estimated_times, profile_memory
from wholestep.errors import SimulationError
from wholestep.graph import Phase, SlotKind, StepGraph
from wholestep.pipe import StageCosts, build_schedule
from wholestep.pipe import simulate as simulate_schedule
from wholestep.pipe.balance import Profile, balance, profile
from wholestep.pipe.placement import find_anchors, forward_calls
from wholestep.pipe.schedule import Schedule
from wholestep.remat import StepBudget
from wholestep.sim.cluster import Cluster
from wholestep.sim.jobs import Crossing, DataParallelJob, PipelineJob, StageLoad

_SAMPLE_BYTES = 2**26
_ANY_LINK = Link(1.0, 1.0)
PeakOf = Callable[[DataParallelPlan], int]


@dataclass(frozen=True)
class Places:
    """By place in the forward: how many calls are anchored there, and the part of the backward for weights alone."""

    num_forward: tuple[int, ...]
    num_backward: tuple[int, ...]
    weight_us: tuple[float, ...]


@dataclass(frozen=True)
class StepFacts:
    """What is known of a captured step; all times are those of one device.

    `data_parallel` has the gradients, `chain` the forward with all that is anchored in it. `peak_bytes` is the peak on
    one rank, of which `slot_bytes` are there all the time; `state_share` bytes of optimizer state belong to each byte
    of a parameter. `peak_of` says what the peak becomes with a plan for communication; `budget` is the memory budget
    that the step was rewritten for, if it was.
    """

    name: str
    data_parallel: Facts
    forward_us: float
    update_us: float
    overhead_us: float
    chain: Profile
    places: Places
    peak_bytes: int = 0
    slot_bytes: int = 0
    state_share: float = 0.0
    peak_of: PeakOf | None = None
    budget: str = ""

    @property
    def kept_bytes(self) -> int:
        return sum(tally.num_bytes for tally in self.chain.kept)

    def for_cluster(self, cluster: Cluster) -> Facts:
        """What the planner of communication is told."""
        return replace(self.data_parallel, world=cluster.num_ranks, link=all_reduce_link(cluster))

    def data_parallel_job(
        self, plan: DataParallelPlan, name: str = "data parallel", peak_bytes: int = 0
    ) -> DataParallelJob:
        """The step with a plan for its gradients."""
        return DataParallelJob.of(
            name, self.data_parallel, plan, forward_us=self.forward_us, peak_bytes=peak_bytes or self.peak_bytes
        )

    def pipeline_job(self, schedule: Schedule, *, overlaps: bool = True, bucket_mb: float = 25.0) -> PipelineJob:
        """The step in the stages of a schedule, balanced; every rank brings as many rows as the captured step has."""
        num_stages, scale = schedule.num_stages, schedule.num_ranks / schedule.num_micro_batches
        borders = (0, *_borders(self.chain, num_stages), self.chain.num_calls)
        spans = list(pairwise(borders))
        parameters = [self._parameter_bytes(*span) for span in spans]
        total_bytes = sum(parameters) or 1
        limit = max(1, int(bucket_mb * 2**20))
        stages = [
            StageLoad(self._costs(*span, scale), _buckets(size, limit), self.update_us * size / total_bytes)
            for span, size in zip(spans, parameters, strict=True)
        ]
        crossing = [round(self.chain.crossing_bytes[begin] * scale / 2) for begin, _ in spans]
        crossings = {(stage - 1, stage): Crossing(crossing[stage], crossing[stage]) for stage in range(1, num_stages)}
        name = f"{schedule.name}, {schedule.num_ranks} ranks, {schedule.num_micro_batches} micro-batches"
        peaks = self._pipeline_peaks(schedule, spans, parameters, scale)
        return PipelineJob(name, schedule, tuple(stages), crossings, overlaps, peak_bytes=peaks)

    def _costs(self, begin: int, end: int, scale: float) -> StageCosts:
        def scaled(time_us: float, num_calls: int) -> float:
            overhead_us = min(time_us, num_calls * self.overhead_us)
            return (time_us - overhead_us) * scale + overhead_us

        places = self.places
        forward_us = scaled(sum(self.chain.forward_us[begin:end]), sum(places.num_forward[begin:end]))
        whole_us = scaled(sum(self.chain.backward_us[begin:end]), sum(places.num_backward[begin:end]))
        weight_us = min(whole_us, sum(places.weight_us[begin:end]) * scale)
        return StageCosts(forward_us, whole_us - weight_us, weight_us, whole_us)

    def _parameter_bytes(self, begin: int, end: int) -> int:
        return sum(tally.num_bytes for tally in self.chain.parameters if tally.is_in(begin, end))

    def _pipeline_peaks(
        self, schedule: Schedule, spans: list[tuple[int, int]], parameters: list[int], scale: float
    ) -> tuple[int, ...]:
        kept = [scale * sum(tally.num_bytes for tally in self.chain.kept if tally.is_in(*span)) for span in spans]
        extra = scale * max(0, self.peak_bytes - self.slot_bytes - self.kept_bytes)
        held = simulate_schedule(schedule, StageCosts(), activations=kept).peaks
        return tuple(
            round(
                held[rank]
                + extra
                + (2 + self.state_share) * sum(parameters[stage] for stage in schedule.stages_of(rank))
            )
            for rank in range(schedule.num_ranks)
        )


@lru_cache(maxsize=256)
def _borders(chain: Profile, num_stages: int) -> tuple[int, ...]:
    return balance(chain, num_stages, ranks={})


@lru_cache(maxsize=1024)
def schedule_of(name: str, num_ranks: int, num_micro_batches: int) -> Schedule:
    """A schedule by name; built once."""
    return build_schedule(name, num_ranks, num_micro_batches)


def _buckets(num_bytes: int, limit: int) -> tuple[int, ...]:
    whole, rest = divmod(num_bytes, limit)
    return (limit,) * whole + ((rest,) if rest else ())


def all_reduce_link(cluster: Cluster) -> Link:
    """What all-reduces over the whole cluster take, as a latency and a throughput."""
    if cluster.num_ranks < 2:
        raise SimulationError("a cluster of one rank has nothing to communicate; give it more")
    counts = cluster.shape_of(range(cluster.num_ranks))
    latency_us = cluster.all_reduce_over(counts, 0).time_us
    slope_us = cluster.all_reduce_over(counts, _SAMPLE_BYTES).time_us - latency_us
    return Link(max(latency_us, 1e-3), _SAMPLE_BYTES / max(slope_us, 1e-6))


def gather_step(
    graph: StepGraph, device: DeviceModel, *, name: str = "step", budget: StepBudget | None = None
) -> StepFacts:
    """The facts of a step as it was captured, by the roofline of a device; the graph stays as it is.

    With a budget, of what is to run so that the step keeps it; raises `BudgetError` if it cannot be kept.
    """
    draft = begin(graph.copy(), StepOptions(memory_budget=budget), Hardware(device))
    graph = draft.graph
    facts = gather_facts(graph, world=2, average=True, link=_ANY_LINK, is_measured=False, device=device)
    times = estimated_times(graph, device)
    bare = _without_update(graph)
    bare_times = estimated_times(bare, device)
    finished = profile_memory(draft.run_in_place(graph.copy()))
    parameter_bytes = sum(gradient.num_bytes for gradient in facts.gradients)
    chain = profile(bare, bare_times)
    return StepFacts(
        name,
        facts,
        sum(times[node] for node in forward_calls(graph)),
        sum(times[node] for node in graph.calls(Phase.OPTIMIZER)),
        device.overhead_us,
        chain,
        _places(bare, bare_times, chain.num_calls),
        finished.peak_bytes,
        finished.slot_bytes,
        _slot_bytes(graph, SlotKind.STATE) / parameter_bytes if parameter_bytes else 0.0,
        partial(data_parallel_peak, draft),
        "" if budget is None else str(budget),
    )


def data_parallel_peak(draft: Draft, communication: DataParallelPlan) -> int:
    """The peak of the loop that a plan for its gradients makes of a step; the draft stays as it is."""
    own = draft.copy()
    plan = settle(own, communication)
    return profile_memory(build(own.graph, plan).main).peak_bytes


def _without_update(graph: StepGraph) -> StepGraph:
    """Forward and backward alone, as each micro-batch of a pipeline runs them."""
    bare = graph.copy()
    kept = {slot: node for slot, node in bare.updates.items() if node.meta["phase"] is not Phase.OPTIMIZER}
    gradients = {f"{SlotKind.GRAD}.{name}": node for name, node in bare.gradients.items()}
    bare.set_returned(updates=kept, results=gradients)
    bare.eliminate_dead_code()
    return bare


def _places(graph: StepGraph, times: Mapping[fx.Node, float], count: int) -> Places:
    anchors, _ = find_anchors(graph)
    early = set(forward_calls(graph))
    own = {node for gradient in reducible_gradients(graph) for node in own_nodes([gradient.node])}
    num_forward, num_backward, weight_us = [0] * count, [0] * count, [0.0] * count
    for node, anchor in anchors.items():
        if times.get(node, 0.0) > 0:
            (num_forward if node in early else num_backward)[anchor] += 1
    for node in own:
        if node in anchors:
            weight_us[anchors[node]] += times.get(node, 0.0)
    return Places(tuple(num_forward), tuple(num_backward), tuple(weight_us))


def _slot_bytes(graph: StepGraph, kind: SlotKind) -> int:
    slots = graph.placeholders()
    values = [slots[slot.id].meta["val"] for slot in graph.slots_of_kind(kind) if slot.id in slots]
    return sum(value.numel() * value.element_size() for value in values)
