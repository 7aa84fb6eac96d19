"""What is known about a step before it runs, as data: its size, work, memory, communication, and the predicted time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from wholestep._version import __version__
from wholestep.comm.plan import DataParallelPlan
from wholestep.cost import DeviceModel, dominant_logits
from wholestep.graph import Phase, SlotKind, StepGraph
from wholestep.remat import RematPlan
from wholestep.report.summary import GraphSummary, summarise
from wholestep.report.timeline import call_us
from wholestep.runtime import StepRunner


@dataclass(frozen=True)
class DeviceFigures:
    """The device that times are estimated for, and what it can hold (0: not known)."""

    name: str
    flops_per_us: float
    bytes_per_us: float
    overhead_us: float
    memory_bytes: int

    @property
    def model(self) -> DeviceModel:
        return DeviceModel(self.flops_per_us, self.bytes_per_us, self.overhead_us)


@dataclass(frozen=True)
class StepSize:
    """How much there is before a step begins."""

    num_parameters: int
    num_trainable: int
    parameter_bytes: int
    buffer_bytes: int
    state_bytes: int
    batch_bytes: int


@dataclass(frozen=True)
class PhaseWork:
    """What a phase does, and how long that is going to take if nothing is waited for."""

    num_ops: int
    flops: int
    elementwise_flops: int
    moved_bytes: int
    time_us: float


@dataclass(frozen=True)
class Share:
    """Bytes that are alive at the peak, by what they belong to."""

    name: str
    num_bytes: int


@dataclass(frozen=True)
class LogitsShare:
    """Logits that are most of the peak, slots aside, and in how many chunks they would not be."""

    num_bytes: int
    of_bytes: int
    chunks: int
    head: str


@dataclass(frozen=True)
class MemoryFigures:
    """Peaks of the whole step, parameters and optimizer state included.

    `smallest_peak_bytes` is the smallest budget that can be kept, None if nobody has looked for it.
    """

    peak_bytes: int
    unlimited_peak_bytes: int
    smallest_peak_bytes: int | None
    peak_at: str
    at_peak: tuple[Share, ...]
    logits: LogitsShare | None


@dataclass(frozen=True)
class StepPlan:
    """Everything that was decided about a step and is predicted of it; `source` is `FILE.py:FUNCTION`.

    `step_us` is the time of a step with everything that is waited for. `passes` are the rewrites that put the plan into
    effect, in the text that `wholestep.compile(passes=...)` reads.
    """

    wholestep: str
    torch: str
    step: str
    source: str
    device: DeviceFigures
    size: StepSize
    phases: Mapping[str, PhaseWork]
    memory: MemoryFigures
    remat: RematPlan | None
    communication: DataParallelPlan | None
    step_us: float
    passes: tuple[str, ...]

    @property
    def flops(self) -> int:
        return sum(work.flops for work in self.phases.values())

    @property
    def compute_us(self) -> float:
        """All phases, with nothing waited for."""
        return sum(work.time_us for work in self.phases.values())


def plan_of(step: StepRunner, source: str, device: DeviceFigures, *, finds_smallest: bool = True) -> StepPlan:
    """The plan of a step that has been prepared or called; to find the smallest peak takes about as long as to plan."""
    graph, memory = step.graph, step.memory_plan
    summary = summarise(graph)
    times = estimated_phases(graph, device.model)
    phases = {
        str(phase): PhaseWork(cost.num_ops, cost.flops, cost.elementwise_flops, cost.bytes_moved, times[phase])
        for phase, cost in summary.phases.items()
    }
    travel = step.plan
    return StepPlan(
        wholestep=__version__,
        torch=torch.__version__,
        step=getattr(step, "__name__", "step"),
        source=source,
        device=device,
        size=_size(step, graph),
        phases=phases,
        memory=MemoryFigures(
            peak_bytes=summary.memory.peak_bytes if memory is None else memory.peak_bytes,
            unlimited_peak_bytes=summary.memory.peak_bytes if memory is None else memory.unlimited_peak_bytes,
            smallest_peak_bytes=step.smallest_peak_bytes if finds_smallest else None,
            peak_at=_peak_at(summary),
            at_peak=tuple(Share(name, num_bytes) for name, num_bytes in summary.at_peak),
            logits=_logits(summary),
        ),
        remat=memory,
        communication=travel,
        step_us=sum(times.values()) + (0.0 if travel is None else travel.exposed_us),
        passes=tuple(record.text for record in graph.history),
    )


def estimated_phases(graph: StepGraph, device: DeviceModel) -> dict[Phase, float]:
    """Microseconds of each phase on a device."""
    times: dict[Phase, float] = dict.fromkeys(Phase, 0.0)
    for node in graph.calls():
        times[node.meta["phase"]] += call_us(node, device)
    return times


def _size(step: StepRunner, graph: StepGraph) -> StepSize:
    placeholders = graph.placeholders()

    def tensors(kind: SlotKind) -> list[torch.Tensor]:
        values = [
            placeholders[slot.id].meta.get("val") for slot in graph.slots_of_kind(kind) if slot.id in placeholders
        ]
        return [value for value in values if isinstance(value, torch.Tensor)]

    def num_bytes(kind: SlotKind) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors(kind))

    parameters = [slot for slot in graph.slots_of_kind(SlotKind.PARAM) if slot.id in step.captured.bindings]
    real = [step.captured.bindings[slot.id].read([]) for slot in parameters]
    return StepSize(
        num_parameters=sum(parameter.numel() for parameter in real),
        num_trainable=sum(parameter.numel() for parameter in real if parameter.requires_grad),
        parameter_bytes=num_bytes(SlotKind.PARAM),
        buffer_bytes=num_bytes(SlotKind.BUFFER),
        state_bytes=num_bytes(SlotKind.STATE),
        batch_bytes=num_bytes(SlotKind.BATCH),
    )


def _peak_at(summary: GraphSummary) -> str:
    memory = summary.memory
    return f"{memory.peak_node} ({memory.phases[memory.peak_index]})" if memory.phases else ""


def _logits(summary: GraphSummary) -> LogitsShare | None:
    found = dominant_logits(summary.memory)
    if found is None:
        return None
    return LogitsShare(found.num_bytes, found.total_bytes, found.chunks, found.head.name)
