"""When actions ran: by the clock of the process, or by that of the GPU that they ran on."""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

_NUM_LOOKS = 9


class Clock(Protocol):
    """A clock that is cheap to look at and slow to read."""

    mark: Callable[[], Any]

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        """When marks were made, in seconds of `time.perf_counter`."""
        ...


class HostClock:
    """For devices on which an op is done when its call returns."""

    mark = staticmethod(time.perf_counter)

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        return list(marks)


class DeviceClock:
    """For a GPU, which is behind the process that tells it what to do."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        now = self.mark()
        now.synchronize()
        now_s = time.perf_counter()
        return [now_s - mark.elapsed_time(now) / 1e3 for mark in marks]


def clock_for(device: torch.device) -> Clock:
    return DeviceClock() if device.type == "cuda" else HostClock()


def lead_s() -> float:
    """How far the clock of this process is ahead of that of rank 0; to be called by all ranks of the job.

    Processes of one machine have one clock. Others are compared right after they have waited for each other, which
    tells as much as a message takes.
    """
    looks: list[float] = []
    for _ in range(_NUM_LOOKS):
        dist.barrier()
        looks.append(time.perf_counter())
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (socket.gethostname(), looks))
    machine, first = found[0]
    if socket.gethostname() == machine:
        return 0.0
    return statistics.median(own - other for own, other in zip(looks, first, strict=True))
