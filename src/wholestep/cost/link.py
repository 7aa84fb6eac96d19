"""What an all-reduce costs: a latency, and a throughput of payload bytes.

    time(num_bytes) = latency_us + num_bytes / bytes_per_us

The throughput is the algorithm's, not the wire's: bytes of the reduced tensor per time, whatever the ranks send for it.
"""

from __future__ import annotations

import math
import re
import statistics
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from wholestep.errors import WholestepError

# Units as (times, divided by): exact in floating point for us and mbit, so that every link can be written down.
_LATENCY_UNITS = {"ms": (1e3, 1.0), "us": (1.0, 1.0)}
_BANDWIDTH_UNITS = {"gbit": (125.0, 1.0), "mbit": (1.0, 8.0), "kbit": (1.0, 8e3)}
_NUMBER = r"(\d+(?:\.\d*)?(?:e[+-]?\d+)?)"
_TEXT = re.compile(rf"{_NUMBER} *(gbit|mbit|kbit) *, *{_NUMBER} *(ms|us)")

_SMALL_BYTES, _MEDIUM_BYTES, _LARGE_BYTES = 2**10, 2**20, 8 * 2**20
# All-reduces of each size, in this order. The first of each size is not counted: it sets up buffers, and on a link
# that is shaped it spends what a token bucket has saved up. At 0.1 Gbit/s the large ones take 0.7 to 1.3 s each.
_PLAN = ((_SMALL_BYTES, 6), (_MEDIUM_BYTES, 4), (_LARGE_BYTES, 4))


@dataclass(frozen=True)
class Link:
    """The cost of an all-reduce between certain ranks; both figures are positive and finite, else `WholestepError`."""

    latency_us: float
    bytes_per_us: float

    def __post_init__(self) -> None:
        for name, value in (("latency", self.latency_us), ("bandwidth", self.bytes_per_us)):
            if not (math.isfinite(value) and value > 0):
                raise WholestepError(f"a link's {name} is {value}; give a positive, finite number")

    def time_us(self, num_bytes: float) -> float:
        """How long an all-reduce of a tensor of `num_bytes` takes."""
        return self.latency_us + num_bytes / self.bytes_per_us

    @staticmethod
    def from_text(text: str) -> Link:
        """Parse `1gbit,50us`: kbit, mbit or gbit per second, then us or ms. Raises `WholestepError` for other text."""
        match = _TEXT.fullmatch(text.strip().lower())
        if match is None:
            raise WholestepError(
                f"'{text}' is not a link; write bandwidth and latency like '1gbit,50us' (kbit, mbit, gbit; us, ms)"
            )
        bandwidth, bandwidth_unit, latency, latency_unit = match.groups()
        return Link(
            _from_unit(float(latency), _LATENCY_UNITS[latency_unit]),
            _from_unit(float(bandwidth), _BANDWIDTH_UNITS[bandwidth_unit]),
        )

    def __str__(self) -> str:
        """The link as `from_text` reads it, to the last bit."""
        bandwidth = _in_best_unit(self.bytes_per_us, _BANDWIDTH_UNITS, exact="mbit")
        return f"{bandwidth},{_in_best_unit(self.latency_us, _LATENCY_UNITS, exact='us')}"


def _from_unit(number: float, unit: tuple[float, float]) -> float:
    return number * unit[0] / unit[1]


def _in_best_unit(value: float, units: dict[str, tuple[float, float]], *, exact: str) -> str:
    """Text in the largest unit that leaves at least 1 and loses nothing, in the exact one if there is none."""
    numbers = {name: value * divided / times for name, (times, divided) in units.items()}
    fitting = (name for name, number in numbers.items() if number >= 1 and _from_unit(number, units[name]) == value)
    name = next(fitting, exact)
    return _text(numbers[name]) + name


def _text(number: float) -> str:
    return repr(number).removesuffix(".0")


def calibrate_link(group: dist.ProcessGroup | None, device: torch.device) -> Link:
    """Measure the all-reduce of a process group (None: the default one); every rank gets the same link, rank 0's.

    All ranks of the group call this together: it runs a fixed sequence of all-reduces on tensors of `device` (which the
    group's backend must serve) and a broadcast. Takes milliseconds on a fast link, 3 to 6 s at 0.1 Gbit/s.
    """
    if not dist.is_initialized():
        raise WholestepError("there is no process group; call torch.distributed.init_process_group first")
    times_us = [_all_reduce_us(num_bytes, repeats, group, device) for num_bytes, repeats in _PLAN]
    link = fit_link(*times_us)
    figures = torch.tensor([link.latency_us, link.bytes_per_us], dtype=torch.float64, device=device)
    dist.broadcast(figures, group=group, group_src=0)
    return Link(*figures.tolist())


def fit_link(small_us: float, medium_us: float, large_us: float) -> Link:
    """The link that explains the times of all-reduces of 1 KiB, 1 MiB and 8 MiB.

    The slope between the two larger sizes is free of latency and of what a link lets through at once. Where noise has
    eaten most of it, the average of the largest must do: a link is rather too slow than too good to be true. Small
    payloads may pass at once, so no more than half of their time is put down to them. Three digits are kept.
    """
    average_us = large_us / _LARGE_BYTES
    slope_us = (large_us - medium_us) / (_LARGE_BYTES - _MEDIUM_BYTES)
    us_per_byte = slope_us if slope_us > average_us / 4 else average_us
    latency_us = max(small_us - _SMALL_BYTES * us_per_byte, small_us / 2)
    return Link(float(f"{latency_us:.3g}"), float(f"{1 / us_per_byte:.3g}"))


def _all_reduce_us(num_bytes: int, repeats: int, group: dist.ProcessGroup | None, device: torch.device) -> float:
    """The time of all-reduces of one size; the first does not count.

    Of small ones the shortest: what came on top is somebody else's work. Of larger ones the median, because a shaped
    link may let a single one through too fast.
    """
    payload = torch.zeros(num_bytes // 4, dtype=torch.float32, device=device)  # whatever the default is here
    times_us: list[float] = []
    for _ in range(repeats):
        _synchronize(device)
        started_ns = time.perf_counter_ns()
        dist.all_reduce(payload, group=group)
        _synchronize(device)
        times_us.append((time.perf_counter_ns() - started_ns) / 1e3)
    return min(times_us[1:]) if num_bytes == _SMALL_BYTES else statistics.median(times_us[1:])


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
