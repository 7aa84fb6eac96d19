"""Nothing of a trace outlives it: whoever still holds one of its tensors is named.

What a step stores is replayed with real tensors (`record.effects`), and what it cannot store again is refused. This is
the check that nobody was overlooked: code in C that keeps what it was given, a cache that no recording could see. Each
tensor that a trace hands out is remembered weakly; when the trace is over, none of them may be alive.
"""

from __future__ import annotations

import contextlib
import gc
import types
import weakref
from collections.abc import Generator
from typing import Any

import torch

from wholestep.errors import CaptureError

_GENERATIONS = (0, 1, 2)
_MAX_LAYERS = 6


@contextlib.contextmanager
def garbage_collection_paused() -> Generator[None]:
    """Compiling makes very many long-lived objects; walking them over and over frees nothing and takes its time.

    What a trace leaves in cycles stays young meanwhile, and the young are collected in no time (`require_gone`).
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class HandedOut:
    """The tensors of one capture, remembered weakly."""

    def __init__(self) -> None:
        self._tensors: list[weakref.ref[torch.Tensor]] = []

    def add(self, tensor: torch.Tensor) -> None:
        self._tensors.append(weakref.ref(tensor))

    def require_gone(self) -> None:
        """Raise `CaptureError` if a tensor is alive. All that belongs to the trace itself has to be gone by now."""
        for generation in _GENERATIONS:
            if not any(tensor() is not None for tensor in self._tensors):
                return
            gc.collect(generation)  # traces leave cycles
        alive = self._alive()
        if alive:
            tensor, holder = _kept(alive)
            raise CaptureError(
                f"a tensor of shape {list(tensor.shape)} that stands for a real one while the step is captured was "
                f"kept by {holder}, which was not seen to write it",
                advice="Keep tensors in attributes, lists or dicts of Python, or store what the compiled step returns",
            )

    def _alive(self) -> list[torch.Tensor]:
        found = [reference() for reference in self._tensors]
        return [*{id(tensor): tensor for tensor in found if tensor is not None}.values()]


def _kept(alive: list[torch.Tensor]) -> tuple[torch.Tensor, str]:
    """A tensor that somebody holds in Python, and who; the graph of such a one leads to others."""
    holders = _referrers(alive, {id(alive), *map(id, alive)})
    if not holders:
        return alive[0], "code that is not Python"
    inside = {*map(id, gc.get_referents(holders[0]))}
    return next((tensor for tensor in alive if id(tensor) in inside), alive[0]), _name(holders[0])


def _name(holder: Any) -> str:
    """What to call a holder: the nearest module, function or object that leads to it."""
    layer, seen = [holder], {id(holder)}
    for _ in range(_MAX_LAYERS):
        for one in layer:
            kind = type(one)
            if kind is types.ModuleType:
                return f"module {one.__name__}"
            if kind is types.FunctionType:
                return f"function {one.__qualname__}"
            if not kind.__module__.startswith(("torch.", "builtins")):
                return f"a {kind.__module__}.{kind.__qualname__}"
        layer = _referrers(layer, seen | {id(layer)})
        seen.update(map(id, layer))
    return f"a {type(holder).__qualname__}"


def _referrers(values: list[Any], seen: set[int]) -> list[Any]:
    """Whoever refers to one of some values; takes a look at all objects there are."""
    found = gc.get_referrers(*values)
    return [one for one in found if id(one) not in seen and type(one) is not types.FrameType]
