"""The cost model: devices and links (`wholestep.cost.hardware`) by name, in a file that people can read and edit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from wholestep import _strict_json as strict_json
from wholestep._output import write_output
from wholestep.cost import DEVICES, LINKS, DeviceModel, Wire
from wholestep.errors import SimulationError, WholestepError
from wholestep.sim.files import number, parsed, read_bytes, readable

FORMAT = "wholestep-cost-model"
VERSION = 1
_MAX_ENTRIES = 1000
_MAX_NAME = 100


@dataclass(frozen=True)
class CostModel:
    """Devices and links by name."""

    devices: Mapping[str, DeviceModel]
    links: Mapping[str, Wire]

    @staticmethod
    def builtin() -> CostModel:
        return CostModel(dict(DEVICES), dict(LINKS))

    def with_others(self, other: CostModel) -> CostModel:
        """Both, the other's where names meet."""
        return CostModel({**self.devices, **other.devices}, {**self.links, **other.links})

    def device(self, value: Any, what: str) -> DeviceModel:
        """A device by name, or described in place."""
        if not isinstance(value, str):
            return device_from_json(value, what)
        if value not in self.devices:
            raise SimulationError(f"there is no device '{strict_json.shown(value)}'; known are {_listed(self.devices)}")
        return self.devices[value]

    def wire(self, value: Any, what: str) -> Wire:
        """A link by name, as `25gbit,10us`, or described in place."""
        if not isinstance(value, str):
            return wire_from_json(value, what)
        if value in self.links:
            return self.links[value]
        try:
            return Wire.from_text(value)
        except WholestepError:
            raise SimulationError(
                f"{what} is '{strict_json.shown(value)}'; write one like '25gbit,10us', or one of {_listed(self.links)}"
            ) from None

    def to_json(self) -> str:
        """The model as text that `from_json` reads."""
        body = {
            "format": FORMAT,
            "version": VERSION,
            "devices": {name: asdict(device) for name, device in self.devices.items()},
            "links": {name: asdict(wire) for name, wire in self.links.items()},
        }
        return readable(body)

    @staticmethod
    def from_json(data: bytes, what: str = "the cost model") -> CostModel:
        """Read what `to_json` wrote; raises `SimulationError` for anything else."""
        return parsed(data, what, FORMAT, VERSION, lambda body: _cost_model(body, what))

    @staticmethod
    def load(path: Path) -> CostModel:
        """Read a file; raises `SimulationError` if it is none of ours."""
        return CostModel.from_json(read_bytes(path), str(path))

    def save(self, path: Path) -> None:
        """Write a file that `load` reads."""
        write_output(path, self.to_json())


def device_from_json(value: Any, what: str) -> DeviceModel:
    """A device as files describe it."""
    found = strict_json.fields(value, what, ("flops_per_us", "bytes_per_us", "overhead_us"), ("memory_bytes",))
    return DeviceModel(
        number(found["flops_per_us"], f"flops_per_us of {what}", above=True),
        number(found["bytes_per_us"], f"bytes_per_us of {what}", above=True),
        number(found["overhead_us"], f"overhead_us of {what}"),
        strict_json.integer(found.get("memory_bytes", 0), f"memory_bytes of {what}", range(2**50)),
    )


def wire_from_json(value: Any, what: str) -> Wire:
    """A link as files describe it."""
    found = strict_json.fields(value, what, ("latency_us", "bytes_per_us"), ("cpu_us_per_byte", "issue_us"))
    return Wire(
        number(found["latency_us"], f"latency_us of {what}", most=1e9),
        number(found["bytes_per_us"], f"bytes_per_us of {what}", least=1e-6, most=1e12),
        number(found.get("cpu_us_per_byte", 0.0), f"cpu_us_per_byte of {what}", most=1e6),
        number(found.get("issue_us", 0.0), f"issue_us of {what}", most=1e9),
    )


def _cost_model(body: dict[str, Any], what: str) -> CostModel:
    found = strict_json.fields(body, what, ("devices", "links"))
    devices = _entries(found["devices"], f"devices of {what}")
    links = _entries(found["links"], f"links of {what}")
    return CostModel(
        {name: device_from_json(value, f"device '{name}'") for name, value in devices.items()},
        {name: wire_from_json(value, f"link '{name}'") for name, value in links.items()},
    )


def _entries(value: Any, what: str) -> dict[str, Any]:
    found = strict_json.mapping(value, what)
    if len(found) > _MAX_ENTRIES:
        raise SimulationError(f"{what}: there are {len(found)}, and at most {_MAX_ENTRIES} are read")
    for name in found:
        if not 0 < len(strict_json.string(name, f"a name among the {what}")) <= _MAX_NAME:
            raise SimulationError(f"{what}: '{strict_json.shown(name)}' is no name of 1 to {_MAX_NAME} characters")
    return found


def _listed(known: Mapping[str, object]) -> str:
    return ", ".join(list(known)[:12])
