"""Measure what is here: the device, and with several ranks what joins them, as a cost model.

The wire is that of a ring: n ranks that reduce b bytes send 2 (n - 1) pieces of b / n each, one after the other, so

    latency of a message   = latency of an all-reduce / 2 (n - 1)
    bytes of a message     = bytes of an all-reduce * 2 (n - 1) / n

What a byte costs the processor is found by computing while an all-reduce is on its way: if the computation takes t
alone and t' then, a share 1 - t / t' of the core went into as many bytes as travel in t'.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from wholestep.cost import DeviceModel, Wire, calibrate_device, calibrate_link
from wholestep.sim.costs import CostModel

_NAME = "here"
_MATRIX = 256
_NUM_REPEATS = 3
_SMALL_ELEMENTS = 256
# The computation is to be over before the bytes are: they take so many times as long.
_AHEAD = 3.0
_COMPUTING_S = 0.05
_MOST_BYTES = 256 * 2**20


def calibrate(
    device: torch.device | None = None, *, name: str = _NAME, dtype: torch.dtype = torch.float32
) -> CostModel:
    """A cost model of this machine, its device and link called `name`.

    There is a link only if there is a process group of several ranks; then all of them call this. Takes a second, on
    slow links some more.
    """
    here = torch.device("cuda" if torch.cuda.is_available() else "cpu") if device is None else device
    found = calibrate_device(here, dtype)
    figures = [float(f"{value:.4g}") for value in (found.flops_per_us, found.bytes_per_us, found.overhead_us)]
    links = {name: calibrate_wire(here)} if dist.is_initialized() and dist.get_world_size() > 1 else {}
    return CostModel({name: DeviceModel(*figures, memory_bytes=_memory_bytes(here))}, links)


def calibrate_wire(device: torch.device) -> Wire:
    """What joins the ranks of the default group; all of them call this, and all get rank 0's figures."""
    link = calibrate_link(None, device)
    num_ranks = dist.get_world_size()
    num_messages = 2 * (num_ranks - 1)
    bytes_per_us = link.bytes_per_us * num_messages / num_ranks
    is_cpu = device.type == "cpu"
    load = _load(link.bytes_per_us) if is_cpu else 0.0
    figures = torch.tensor([load / bytes_per_us, _issue_us(device)], dtype=torch.float64, device=device)
    dist.broadcast(figures, 0)
    cpu_us_per_byte, issue_us = (float(f"{value:.3g}") for value in figures.tolist())
    return Wire(link.latency_us / num_messages, bytes_per_us, cpu_us_per_byte, issue_us)


def _load(bytes_per_us: float) -> float:
    """The share of a core that an all-reduce takes while it is on its way."""
    matrix = torch.rand(_MATRIX, _MATRIX)
    alone_s = _seconds(lambda: torch.mm(matrix, matrix))
    num_products = max(1, round(_COMPUTING_S / alone_s))
    num_bytes = min(_MOST_BYTES, int(_AHEAD * _COMPUTING_S * 1e6 * bytes_per_us))
    payload = torch.zeros(max(1, num_bytes // 4))

    def compute() -> None:
        for _ in range(num_products):
            torch.mm(matrix, matrix)

    loads: list[float] = []
    for _ in range(_NUM_REPEATS):
        dist.barrier()
        alone_s = _seconds(compute)
        dist.barrier()
        work = dist.all_reduce(payload, async_op=True)
        busy_s = _seconds(compute)
        assert work is not None
        work.wait()
        loads.append(max(0.0, 1 - alone_s / busy_s))
    return statistics.median(loads)


def _issue_us(device: torch.device) -> float:
    """What it takes the caller to start a collective."""
    payload = torch.zeros(_SMALL_ELEMENTS, device=device)
    times_us: list[float] = []
    for _ in range(10 * _NUM_REPEATS):
        started = time.perf_counter()
        work = dist.all_reduce(payload, async_op=True)
        times_us.append((time.perf_counter() - started) * 1e6)
        assert work is not None
        work.wait()
    return statistics.median(times_us)


def _seconds(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
