"""What is known about a step before it runs, as data: its size, work, memory and the predicted time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from wholestep.cost import DeviceModel


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
class Predictions:
    """What a device is expected to need for a step; `step_us` is its time with everything that is waited for."""

    device: DeviceFigures
    size: StepSize
    phases: Mapping[str, PhaseWork]
    memory: MemoryFigures
    step_us: float

    @property
    def flops(self) -> int:
        return sum(work.flops for work in self.phases.values())

    @property
    def compute_us(self) -> float:
        """All phases, with nothing waited for."""
        return sum(work.time_us for work in self.phases.values())
