"""What is predicted of a step that has a graph."""

from __future__ import annotations

from dataclasses import replace

import torch

from wholestep.compiler import Plan
from wholestep.compiler.predictions import (
    DeviceFigures,
    LogitsShare,
    MemoryFigures,
    PhaseWork,
    Predictions,
    Share,
    StepSize,
)
from wholestep.cost import DeviceModel, dominant_logits
from wholestep.graph import Phase, SlotKind, StepGraph
from wholestep.report.summary import GraphSummary, summarise
from wholestep.report.timeline import call_us
from wholestep.runtime import StepRunner


def predicted_plan(step: StepRunner, source: str, device: DeviceFigures, *, finds_smallest: bool = True) -> Plan:
    """The plan of a step that has been prepared or called, with what is predicted of it on a device.

    `source` is `FILE.py:FUNCTION`. To find the smallest peak takes about as long as to plan.
    """
    graph, plan = step.graph, step.plan
    memory, travel = plan.memory, plan.communication
    summary = summarise(graph)
    times = estimated_phases(graph, device.model)
    phases = {
        str(phase): PhaseWork(cost.num_ops, cost.flops, cost.elementwise_flops, cost.bytes_moved, times[phase])
        for phase, cost in summary.phases.items()
    }
    predictions = Predictions(
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
        step_us=sum(times.values()) + (0.0 if travel is None else travel.exposed_us),
    )
    return replace(plan, made_for=replace(plan.made_for, source=source), predictions=predictions)


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
