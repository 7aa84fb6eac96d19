"""The user's own objects that a step writes to or draws from, for `verify`: looked at, kept, put back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from wholestep.capture.record import Recording
from wholestep.capture.record.outside import save_generator
from wholestep.capture.record.places import find, is_open, is_plain
from wholestep.capture.record.state import Kept, content_of
from wholestep.runtime.guards import Call

DEEPEST = 4


class OwnObjects:
    """What a captured step changes besides tensors: one of `world.Outside`."""

    def __init__(self, recording: Recording, call: Call) -> None:
        self._recording = recording
        self._call = call

    def look(self) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for change in self._recording.effects.changes:
            seen |= dict(values_in(change.name, find(change.path, self._call)))
        return seen

    def keep(self) -> Callable[[], None]:
        kept = [Kept.of(find(change.path, self._call)) for change in self._recording.effects.changes]
        generators = [save_generator(generator) for generator in self._recording.program.generators]

        def put_back() -> None:
            for item in kept:
                item.restore()
            for undo in generators:
                undo()

        return put_back


def values_in(name: str, value: Any, depth: int = DEEPEST) -> Iterator[tuple[str, Any]]:
    """What an owner holds, by name: tensors and plain values as they are, other objects by their type."""
    if isinstance(value, torch.Tensor) or is_plain(value):
        yield name, value
    elif depth == 0 or not is_open(value):
        yield name, type(value).__name__
    else:
        content = content_of(value)
        namespace = getattr(value, "__dict__", {})
        parts = content if isinstance(content, dict) else dict(enumerate(content))
        for key, part in {**parts, **namespace}.items():
            yield from values_in(f"{name}.{key}", part, depth - 1)
