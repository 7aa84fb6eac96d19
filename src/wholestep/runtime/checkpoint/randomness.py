"""The random number generators of this process: torch's on the CPU and on CUDA devices, Python's, numpy's."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


def random_state() -> dict[str, Any]:
    """Where the generators are now. Looking draws nothing; devices that have not been used have no state."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        state["numpy"] = (kind, keys.tolist(), *rest)
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Put the generators where they were."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    for device, value in enumerate(state.get("cuda", [])):
        if torch.cuda.is_available() and device < torch.cuda.device_count():
            torch.cuda.set_rng_state(value, device)
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        numpy.random.set_state(state["numpy"])


def try_random_state(state: dict[str, Any]) -> None:
    """Raise what `set_random_state` would; the generators stay where they are."""
    before = random_state()
    try:
        set_random_state(state)
    finally:
        set_random_state(before)
