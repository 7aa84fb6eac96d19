"""How long each op of a step graph runs, in microseconds: estimated from its flops and bytes, or measured.

    estimated    max(flops / flops per us, bytes / bytes per us) + overhead, with the figures of a `DeviceModel`
    measured     each distinct op runs on made-up data of the right types; repeated layers cost nothing extra

In both, views, `getitem` and arithmetic on sizes take no time, nor do collectives: what those cost is a question to the
link (`wholestep.cost.link`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from wholestep._recording_torch import REQUIRE
from wholestep.cost.flops import node_flops
from wholestep.cost.hardware import DeviceModel
from wholestep.cost.memory import node_bytes, tensors_in
from wholestep.cost.trial import clock_us, device_of, plain, sizes_and_strides, try_us, undisturbed
from wholestep.graph import StepGraph, map_nodes, ops

aten = torch.ops.aten

_COPIED_BYTES = 64 * 2**20
# A GPU needs more work than a core to show what it can do.
_MATMUL_SIZE, _MATMUL_SIZE_CUDA = 512, 4096


def calibrate_device(device: torch.device, dtype: torch.dtype = torch.float32) -> DeviceModel:
    """Measure a device: a matrix product in `dtype`, a copy larger than its caches, an addition of two numbers.

    Takes a tenth of a second and 200 MiB. Figures are those of the current number of threads. On a GPU `dtype` counts
    for much: give the one of the step's own products (`product_dtype`).
    """
    with undisturbed(device):
        size = _MATMUL_SIZE_CUDA if device.type == "cuda" else _MATMUL_SIZE
        factor = torch.rand(size, size, dtype=dtype, device=device)
        matmul_us = clock_us(lambda: aten.mm.default(factor, factor), device)
        source = torch.zeros(_COPIED_BYTES, dtype=torch.uint8, device=device)
        copied = torch.empty_like(source)
        copy_us = clock_us(lambda: aten.copy_.default(copied, source), device)
        number = torch.ones((), device=device)
        overhead_us = clock_us(lambda: aten.add.Tensor(number, number), device)
    return DeviceModel(2 * size**3 / matmul_us, 2 * _COPIED_BYTES / copy_us, overhead_us)


def product_dtype(calls: Iterable[fx.Node]) -> torch.dtype:
    """The dtype of the largest matrix product, convolution or attention among calls; float32 if there is none."""
    largest = max(calls, key=node_flops, default=None)
    if largest is None or node_flops(largest) == 0:
        return torch.float32
    return next(tensors_in(largest.meta["val"])).dtype


def estimated_times(graph: StepGraph, device: DeviceModel) -> dict[fx.Node, float]:
    """The time of every call by the roofline of a device, without running anything."""
    return _estimated(graph.calls(), device)


def _estimated(calls: Iterable[fx.Node], device: DeviceModel) -> dict[fx.Node, float]:
    return {node: 0.0 if is_free(node) else estimate_us(node, device) for node in calls}


def estimate_us(node: fx.Node, device: DeviceModel) -> float:
    """The time of one call by the roofline of a device."""
    traffic = node_bytes(node)
    moving_us = (traffic.read + traffic.written) / device.bytes_per_us
    return max(node_flops(node) / device.flops_per_us, moving_us) + device.overhead_us


def measured_times(graph: StepGraph, *, budget_s: float = 2.0) -> dict[fx.Node, float]:
    """`measure_us` of all calls of a graph."""
    return measure_us(list(graph.calls()), budget_s=budget_s)


def measure_us(calls: Sequence[fx.Node], *, budget_s: float = 2.0) -> dict[fx.Node, float]:
    """The time of every call on the graph's own device, each distinct op measured once.

    Ops run on made-up data: the graph's slots and the state of random number generators stay as they are, and memory is
    needed for the arguments and results of one op at a time. After `budget_s` seconds, spent where the estimate
    expects most of the step's time, the rest is estimated; so are ops that refuse made-up data and ops that only act on
    the outside (assertions). Estimates are scaled by the ratio of measured to estimated time seen so far.

    Two calls differ, and so do two ranks: whoever decides alike on all ranks has to share one rank's figures.
    """
    started = time.perf_counter()
    device = device_of(calls)
    estimated = _estimated(calls, calibrate_device(device, product_dtype(calls)))
    kinds: dict[Any, list[fx.Node]] = {}
    for node in calls:
        if not is_free(node):
            kinds.setdefault(_signature(node), []).append(node)
    measured: dict[fx.Node, float] = {}
    with undisturbed(device):
        for nodes in sorted(kinds.values(), key=lambda nodes: -estimated[nodes[0]] * len(nodes)):
            if time.perf_counter() - started > budget_s:
                break
            time_us = try_us(nodes[0])
            measured |= {} if time_us is None else dict.fromkeys(nodes, time_us)
    ratio = sum(measured.values()) / sum(estimated[node] for node in measured) if measured else 1.0
    return {node: measured.get(node, estimate_us * ratio) for node, estimate_us in estimated.items()}


def is_free(node: fx.Node) -> bool:
    """Whether a call takes no time of the device: views, Python arithmetic and `getitem`, collectives."""
    target: Any = node.target
    if not ops.is_op(node):
        return ops.is_pure(target)
    return ops.is_view(target) or ops.is_collective(target) or target is REQUIRE


def _signature(node: fx.Node) -> Any:
    """What the time of a call depends on: the op, types of its tensors, which of them are one, plain arguments."""
    numbers: dict[fx.Node, int] = {}

    def typed(source: fx.Node) -> tuple[Any, ...]:
        return numbers.setdefault(source, len(numbers)), _type_of(source.meta.get("val"))

    return node.target, _frozen(map_nodes((node.args, node.kwargs), typed))


def _type_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, *sizes_and_strides(value), value.device
    if isinstance(value, (list, tuple)):
        return tuple([_type_of(item) for item in value])
    return plain(value)


def _frozen(value: Any) -> Any:
    """Nested arguments as something hashable; 1, 1.0 and True are three different values."""
    if isinstance(value, dict):
        return tuple([(key, _frozen(item)) for key, item in value.items()])
    if isinstance(value, (list, tuple)):
        return tuple([_frozen(item) for item in value])
    return type(value), value
