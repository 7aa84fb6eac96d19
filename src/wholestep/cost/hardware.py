"""The one table of devices and links, and what their figures mean.

    device   an op takes max(flops / flops_per_us, bytes / bytes_per_us) + overhead_us
    wire     a message of b bytes takes latency_us + b / bytes_per_us from one rank to another, in one direction

Figures are what large kernels and large messages reach, not what is printed on the box. Whoever has to decide without
a device to measure takes the typical one of its kind from here, so that all commands say the same of one device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import fx

from wholestep.cost.link import Link
from wholestep.cost.memory import tensors_in


@dataclass(frozen=True)
class DeviceModel:
    """A device in three figures: what it multiplies and moves in a microsecond, and what any op costs at least.

    `memory_bytes` is how much it can hold (0: not known, nothing is checked).
    """

    flops_per_us: float
    bytes_per_us: float
    overhead_us: float
    memory_bytes: int = 0


@dataclass(frozen=True)
class Wire:
    """What carries bytes from one rank to another.

    Two figures matter where a processor does the sending, as with gloo on CPUs: `cpu_us_per_byte` is taken from the
    computation of either end while a byte travels, `issue_us` is what starting or finishing one message or collective
    takes of the computing thread. Both are 0 for NVLink and adapters that copy by themselves.
    """

    latency_us: float
    bytes_per_us: float
    cpu_us_per_byte: float = 0.0
    issue_us: float = 0.0

    def time_us(self, num_bytes: float) -> float:
        """How long one message takes."""
        return self.latency_us + num_bytes / self.bytes_per_us

    def load(self, num_bytes: float, time_us: float) -> float:
        """The share of a core that sending so many bytes in this time takes."""
        return self.cpu_us_per_byte * num_bytes / time_us if time_us > 0 else 0.0

    @staticmethod
    def from_text(text: str) -> Wire:
        """The wire that `25gbit,10us` stands for."""
        link = Link.from_text(text)
        return Wire(link.latency_us, link.bytes_per_us)


DEVICES: Mapping[str, DeviceModel] = {
    "h200": DeviceModel(6.0e8, 4.0e6, 3.0, 141 * 10**9),
    "a100": DeviceModel(2.3e8, 1.6e6, 4.0, 80 * 10**9),
    "cpu": DeviceModel(6.0e4, 8.0e3, 2.0),
}
"""Large GPUs in bfloat16, and a core of a server."""
LINKS: Mapping[str, Wire] = {
    "nvlink4": Wire(3.0, 3.7e5),
    "nvlink3": Wire(3.0, 2.3e5),
    "infiniband-400": Wire(6.0, 4.5e4),
    "infiniband-200": Wire(6.0, 2.2e4),
    "ethernet-100": Wire(15.0, 1.1e4),
    "ethernet-25": Wire(20.0, 2.8e3),
}
_TYPICAL = {"cuda": "h200"}


def typical_name(kind: str) -> str:
    """The device that stands for a kind (`"cuda"`, `"cpu"`) where none is named."""
    return _TYPICAL.get(kind, "cpu")


def typical_device(nodes: Iterable[fx.Node]) -> DeviceModel:
    """A typical GPU if there is anything on one, a typical core otherwise."""
    kinds = {tensor.device.type for node in nodes for tensor in tensors_in(node.meta.get("val"))}
    return DEVICES[typical_name("cuda" if "cuda" in kinds else "cpu")]
