"""Owners that somebody is given whom we cannot follow: all that they hold counts as read, and maybe as written to."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import MethodType
from typing import TYPE_CHECKING, Any

import numpy as np

from wholestep.capture.record.places import CONTAINERS, Expectation, Step, is_open, is_plain, slot_names, take

if TYPE_CHECKING:
    from wholestep.capture.record.recorder import Recorder

_MOST_OWNERS = 20_000
_LOOKED_INTO = (Expectation.OPEN, Expectation.SAME)
"""An object that is expected to be the very same one may still hold something else."""
_OTHER_PARTS: dict[Any, tuple[str, ...]] = {
    MethodType: ("__func__", "__self__"),
    functools.partial: ("func", "args", "keywords"),
}


def read(recorder: Recorder, owner: Any) -> None:
    """Note the plain state of an owner and of what it holds, however deep."""
    pending = [owner]
    while pending:
        part = pending.pop()
        place = recorder.place_of(part)
        if place is None or place.expectation not in _LOOKED_INTO or not is_open(part):
            continue
        if id(part) in recorder.read_whole:
            continue
        recorder.read_whole.add(id(part))
        if len(recorder.read_whole) > _MOST_OWNERS:
            recorder.refuse(
                f"hands a {type(owner).__name__} that leads to more than {_MOST_OWNERS} objects to code that cannot be "
                "followed",
                "Hand over only what is needed",
            )
        pending += _parts(recorder, part)


def _parts(recorder: Recorder, owner: Any) -> Iterator[Any]:
    """What an owner holds; all of it is noted."""
    if isinstance(owner, CONTAINERS):
        recorder.read_all(owner)
        yield from owner.values() if isinstance(owner, dict) else owner
    namespace = recorder.namespace_of(owner)
    if namespace is not None:
        recorder.read_all(namespace)
        yield from namespace.values()
    for name in (*_OTHER_PARTS.get(type(owner), ()), *slot_names(type(owner))):
        value = take(owner, Step.ATTRIBUTE, name)
        recorder.note(owner, Step.ATTRIBUTE, name, value)
        yield value


def expect_content(recorder: Recorder, array: np.ndarray[Any, Any]) -> None:
    place = recorder.place_of(array)
    if place is None or place.expectation is not Expectation.SAME:
        return
    if array.dtype == object:
        recorder.refuse("reads a NumPy array of objects from outside", "Keep them in a list")
    recorder.refuse("reads a large NumPy array from outside", "Pass it to the step as a tensor")


def read_arrays(recorder: Recorder, given: Any) -> None:
    """Note the content of arrays that code of C is given, be it in containers; attributes it would have to ask for."""
    pending, seen = [given], set[int]()
    while pending:
        part = pending.pop()
        if isinstance(part, np.ndarray):
            recorder.expect_content(part)
        elif isinstance(part, CONTAINERS) and id(part) not in seen and not is_plain(part):
            seen.add(id(part))
            pending += part.values() if isinstance(part, dict) else part


def keep(recorder: Recorder, owner: Any) -> None:
    """Keep what an owner and all it holds were."""
    place = recorder.place_of(owner)
    if place is None or id(owner) in recorder.kept:
        return
    if place.expectation is not Expectation.ARRAY and (place.expectation not in _LOOKED_INTO or not is_open(owner)):
        return
    if isinstance(owner, (tuple, frozenset)):
        for part in owner:
            keep(recorder, part)
        return
    if type(owner) in (MethodType, functools.partial):
        return
    namespace = recorder.namespace_of(owner)
    if isinstance(owner, (*CONTAINERS, np.ndarray)) or namespace is None:
        recorder.about_to_change(owner)
    for part in (namespace, *([] if namespace is None else namespace.values())):
        keep(recorder, part)
