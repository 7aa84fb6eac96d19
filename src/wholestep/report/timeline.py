"""When a step computes, communicates and waits: predicted from the graph that runs, op by op.

    compute   the calls of the graph in order, each as long as a device takes for it; waits last until a bucket is there
    link      one bucket after the other, each as soon as it is issued and the link is free

The same two lines as in `wholestep.comm.timeline`, from which the plan was made. That simulation knows gradients before
there are buckets; this one has the finished graph, with copies into buckets, and ops in the order in which they run.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

from wholestep.cost import DeviceModel, Link, calibrate_device, node_bytes, node_flops, product_dtype
from wholestep.cost.memory import storage_bytes, tensors_in
from wholestep.cost.op_time import estimate_us, is_free
from wholestep.graph import Phase, StepGraph, ops
from wholestep.lower import Region
from wholestep.runtime import StepRunner
from wholestep.runtime.stopwatch import part_of

# After this many steps of a loop, one is like the other.
_NUM_STEPS = 4
_COLLECTIVES = (ops.ALL_REDUCE, torch.ops._c10d_functional.all_reduce_.default)


@dataclass(frozen=True)
class Span:
    """Something that the compute stream does without a break: a phase, or waiting."""

    part: str
    start_us: float
    end_us: float


@dataclass(frozen=True)
class Travel:
    """One bucket on the link. Moments count from the start of the step that issues it, and may lie in the next one.

    `waited_us` is how long the compute stream waits for it.
    """

    bucket: int
    num_bytes: int
    departs_us: float
    arrives_us: float
    waited_us: float


@dataclass(frozen=True)
class StepTimeline:
    """One step of the settled loop: what the compute stream does, and what travels."""

    step_us: float
    spans: tuple[Span, ...]
    travels: tuple[Travel, ...]

    @property
    def totals(self) -> dict[str, float]:
        """Microseconds by part."""
        found: dict[str, float] = {}
        for span in self.spans:
            found[span.part] = found.get(span.part, 0.0) + span.end_us - span.start_us
        return found


def predicted_timeline(step: StepRunner) -> StepTimeline:
    """The timeline of a step that has a graph.

    Op times are those of the device that is here, or of the one that was planned for; where the planner has measured
    forward and backward, they are scaled to take as long. Without a link nothing travels.
    """
    graph, plan, dry_run = step.graph, step.plan.communication, step.options.dry_run
    device = _device_here(graph) if dry_run is None or dry_run.device is None else dry_run.device
    times = {node: call_us(node, device) for node in graph.calls()}
    if plan is not None and plan.compute_us:
        estimated = sum(us for node, us in times.items() if node.meta["phase"] in (Phase.FORWARD, Phase.BACKWARD))
        times = {node: us * plan.compute_us / max(estimated, 1e-9) for node, us in times.items()}
    given = "" if step.options.data_parallel is None else step.options.data_parallel.link or ""
    text = (plan.link if plan is not None else "") or given
    return simulate_graph(graph, times, Link.from_text(text) if text else None)


def simulate_graph(graph: StepGraph, times: Mapping[fx.Node, float], link: Link | None) -> StepTimeline:
    """Run a graph in a loop until one step is like the other. In a graph of the loop's middle, a bucket that moved is
    waited for before it is issued: it is that of the step before."""
    clock = link_free = 0.0
    arrivals: dict[object, float] = {}
    timeline = StepTimeline(0.0, (), ())
    for _ in range(_NUM_STEPS):
        started = clock
        spans: list[Span] = []
        travels: dict[object, tuple[fx.Node, float]] = {}
        waited: dict[object, float] = {}
        for node in graph.calls():
            length_us = times[node]
            if node.target in _COLLECTIVES and link is not None:
                departs_us = max(clock, link_free)
                link_free = departs_us + link.time_us(_num_bytes(node))
                travels[_bucket(node)] = node, departs_us
                arrivals[_bucket(node)] = link_free
            elif node.target is ops.WAIT:
                length_us = waited[_bucket(node)] = max(0.0, arrivals.get(_bucket(node), clock) - clock)
            _extend(spans, part_of(node), clock - started, length_us)
            clock += length_us
        found = [
            Travel(
                node.meta.get("bucket", -1),
                _num_bytes(node),
                departs_us - started,
                arrivals[key] - started,
                waited.get(key, 0.0),
            )
            for key, (node, departs_us) in travels.items()
        ]
        timeline = StepTimeline(clock - started, tuple(spans), tuple(found))
    return timeline


def call_us(node: fx.Node, device: DeviceModel) -> float:
    """How long a call takes a device."""
    if not isinstance(node.target, Region):
        return 0.0 if is_free(node) else estimate_us(node, device)
    # Fused ops read and write what the region does; products in it are kernels of their own.
    traffic = node_bytes(node)
    products = [call for call in node.target.calls if node_flops(call)]
    moving_us = (traffic.read + traffic.written) / device.bytes_per_us + device.overhead_us
    return moving_us + sum(estimate_us(call, device) for call in products)


def _extend(spans: list[Span], part: str, start_us: float, length_us: float) -> None:
    """Add what the stream does next, to the last span if it is of the same part."""
    if length_us <= 0:
        return
    if spans and spans[-1].part == part:
        spans[-1] = Span(part, spans[-1].start_us, start_us + length_us)
    else:
        spans.append(Span(part, start_us, start_us + length_us))


def _bucket(node: fx.Node) -> object:
    """What a collective and its wait have in common; those that are in no bucket have each other."""
    if "bucket" in node.meta:
        return node.meta["bucket"]
    return node.args[0] if node.target is ops.WAIT else node


def _num_bytes(node: fx.Node) -> int:
    return sum(storage_bytes(tensor) for tensor in tensors_in(node.meta["val"]))


def _device_here(graph: StepGraph) -> DeviceModel:
    tensors = [tensor for node in graph.calls() for tensor in tensors_in(node.meta.get("val"))]
    device = next((tensor.device for tensor in tensors if tensor.is_cuda), torch.device("cpu"))
    calls = [
        call for node in graph.calls() for call in (node.target.calls if isinstance(node.target, Region) else [node])
    ]
    return _calibrated(device, product_dtype(calls), torch.get_num_threads())


@functools.cache
def _calibrated(device: torch.device, dtype: torch.dtype, _num_threads: int) -> DeviceModel:
    """A device as it is with so many threads, measured once: two reports about one step say the same."""
    return calibrate_device(device, dtype)
