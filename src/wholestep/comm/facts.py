"""What the planner has to know about a step: when gradients are ready, when parameters are needed, what cannot move."""

from __future__ import annotations

import torch
from torch import fx

from wholestep.comm.allreduce import AllReduce, Reducible, reducible_gradients
from wholestep.comm.bucket import Bucket, format_groups
from wholestep.comm.overlap import own_nodes
from wholestep.comm.plan import Facts, Gradient
from wholestep.comm.split_optimizer import SplitOptimizer
from wholestep.cost import DeviceModel, Link, calibrate_device, estimated_times, measured_times
from wholestep.graph import Phase, StepGraph, ops
from wholestep.iteration import update_blocks
from wholestep.passes import Pipeline, run_passes


def gather_facts(
    graph: StepGraph,
    *,
    world: int,
    average: bool,
    link: Link | None,
    is_measured: bool,
    device: DeviceModel | None = None,
) -> Facts:
    """The facts of a functional step graph without collectives; times only where there is a link to plan for.

    Times that are not measured are estimated for `device`, or for the one that is here.
    """
    gradients = reducible_gradients(graph)
    stays = _why_not(graph, gradients)
    times = _times(graph, device, is_measured) if link is not None else dict.fromkeys(graph.calls(), 0.0)
    ready_at, total_us = _moments(graph, times)
    update_us = sum(times[node] for node in graph.calls(Phase.OPTIMIZER))
    num_bytes = sum(_num_bytes(gradient) for gradient in gradients) or 1
    found = [
        Gradient(
            key=gradient.key,
            num_bytes=_num_bytes(gradient),
            kind=_kind(gradient),
            ready_us=round(ready_at[gradient.node] + times[gradient.node], 1),
            needed_us=round(_first_read(graph, gradient, ready_at, total_us), 1),
            update_us=round(update_us * _num_bytes(gradient) / num_bytes, 2),
            own_us=round(sum(times[node] for node in own_nodes([gradient.node])), 1),
            stays=stays[gradient.key],
        )
        for gradient in gradients
    ]
    return Facts(world, average, tuple(found), round(total_us, 1), link)


def _times(graph: StepGraph, device: DeviceModel | None, is_measured: bool) -> dict[fx.Node, float]:
    if is_measured:
        return measured_times(graph)
    here = next(node.meta["val"].device for node in graph.gradients.values())
    return estimated_times(graph, device or calibrate_device(here))


def _moments(graph: StepGraph, times: dict[fx.Node, float]) -> tuple[dict[fx.Node, float], float]:
    """When each call starts if nothing is waited for, and how long forward and backward take together."""
    clock = 0.0
    starts: dict[fx.Node, float] = {}
    for node in graph.calls():
        starts[node] = clock
        if node.meta["phase"] is not Phase.OPTIMIZER:
            clock += times[node]
    return starts, clock


def _num_bytes(gradient: Reducible) -> int:
    value: torch.Tensor = gradient.node.meta["val"]
    return value.numel() * value.element_size()


def _kind(gradient: Reducible) -> str:
    """What gradients of one bucket have in common; the wave comes last."""
    value: torch.Tensor = gradient.node.meta["val"]
    return f"{value.dtype}/{value.device}/{gradient.wave}".replace("torch.", "")


def _first_read(graph: StepGraph, gradient: Reducible, starts: dict[fx.Node, float], total_us: float) -> float:
    """When a step first computes with one of the gradient's parameters (looking through views)."""
    slots = graph.placeholders()
    pending = [slots[f"param.{name}"] for name in gradient.names if f"param.{name}" in slots]
    moments: list[float] = []
    while pending:
        for user in pending.pop().users:
            if user.op != "call_function" or user.meta["phase"] is Phase.OPTIMIZER:
                continue
            if ops.is_view(user.target):
                pending.append(user)
            else:
                moments.append(starts[user])
    return min(moments, default=total_us)


def _why_not(graph: StepGraph, gradients: list[Reducible]) -> dict[str, str]:
    """For each gradient why its update cannot move to the next iteration, empty if it can.

    Judged on a copy in which every gradient travels alone: an update that needs several of them stays.
    """
    keys = [gradient.key for gradient in gradients]
    apart = Pipeline(
        (AllReduce(group="0", world=2), Bucket(groups=format_groups([[key] for key in keys])), SplitOptimizer())
    )
    blocks = {bucket: block for block in update_blocks(run_passes(graph.copy(), apart)) for bucket in block.buckets}
    reasons: dict[str, str] = {}
    for index, gradient in enumerate(gradients):
        block = blocks[index]
        if len(block.buckets) > 1:
            reason = f"its update needs {len(block.buckets)} gradients at once (a global norm, or an op not split)"
        else:
            reason = block.problem
        reasons[gradient.key] = reason
    return reasons
