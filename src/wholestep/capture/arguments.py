"""Where the leaves of the arguments of a call stand, as a recording spells it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from wholestep.capture import tree
from wholestep.capture.record.places import ARGUMENTS, Rooted, Step


def argument_paths(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[Any, ...]]:
    """The way to each leaf of the arguments, as the recording spells it."""

    def ways(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        parts = tree.opened(value)
        if parts is None:
            yield path
            return
        step = Step.ITEM if isinstance(value, (list, tuple, Mapping)) else Step.ATTRIBUTE
        for key, child in zip(*parts, strict=True):
            yield from ways(child, (*path, (step, key)))

    root = Rooted(ARGUMENTS)
    return [*ways(args, (root, (Step.ATTRIBUTE, "args"))), *ways(kwargs, (root, (Step.ATTRIBUTE, "kwargs")))]
