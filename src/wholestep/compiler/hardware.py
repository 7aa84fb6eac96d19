"""What a step is planned for."""

from __future__ import annotations

from dataclasses import dataclass

from wholestep.cost import DeviceModel, Link


@dataclass(frozen=True)
class Hardware:
    """A device, and `world` ranks whose all-reduces take what `link` says; none of it need be there.

    Without a device, costs are those of a typical one of the kind that the step's tensors are on.
    """

    device: DeviceModel | None = None
    world: int = 1
    link: Link | None = None
