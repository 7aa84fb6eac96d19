"""Random ops that draw the same numbers twice: the generator's state is read before the first run, set for the second.

`rng_state` and `Replay` are ordinary calls of a graph. A replay leaves the generator as it found it, so that it may run
anywhere: what other random ops draw does not depend on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from wholestep import _torch


def rng_state(device: str) -> torch.Tensor:
    """The state of a device's global generator, as bytes in main memory."""
    if _torch.is_faking():
        return torch.empty(num_state_bytes(device), dtype=torch.uint8)
    return torch.cuda.get_rng_state(device) if device.startswith("cuda") else torch.get_rng_state()


def num_state_bytes(device: str) -> int:
    """The size of such a state."""
    with _torch.outside_modes():
        return 16 if device.startswith("cuda") else torch.get_rng_state().numel()


@dataclass(frozen=True)
class Replay:
    """A random operator that draws from a given state: `Replay(op, device)(state, *args)`."""

    target: Any
    device: str
    is_pure_call: ClassVar[bool] = True

    @property
    def __name__(self) -> str:
        return f"replay_{_torch.packet_name(self.target)}"

    def __str__(self) -> str:
        return f"wholestep.graph.replay.Replay(torch.ops.{self.target}, {self.device!r})"

    def __call__(self, state: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if _torch.is_faking():
            return self.target(*args, **kwargs)
        before = rng_state(self.device)
        self._set(state)
        try:
            return self.target(*args, **kwargs)
        finally:
            self._set(before)

    def _set(self, state: torch.Tensor) -> None:
        if self.device.startswith("cuda"):
            torch.cuda.set_rng_state(state, self.device)
        else:
            torch.set_rng_state(state)
