"""Owners that somebody is given whom we cannot follow: all that they hold counts as read, and maybe as written to.

Something from outside may also be in what the step has made: `max(map(len, queues.values()))` gives C code an iterator,
through which it gets at a view, and through that at the lists (`reached`).
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterable, Iterator
from types import FunctionType, GeneratorType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from wholestep.capture.record import drawing
from wholestep.capture.record.follow import is_followed_file
from wholestep.capture.record.places import CONTAINERS, Expectation, Step, is_open, is_plain, slot_names, take
from wholestep.capture.record.standins import is_number

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
        recorder.texts.settle(recorder, (part,), is_deep=False)
        place = recorder.place_of(part)
        if place is None:
            continue
        if type(part).__hash__ is None:  # what may change, and only C may know how
            recorder.refuse_hidden_state(part)
        if place.expectation not in _LOOKED_INTO or not is_open(part):
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


def identify(recorder: Recorder, owner: Any) -> None:
    """Something depends on which object this is; tuples are compared by what they hold, and hashed by it."""
    if isinstance(owner, (tuple, frozenset)):
        read_reached(recorder, owner)
        return
    place = recorder.place_of(owner)
    if place is not None and place.expectation is Expectation.OPEN:
        place.expectation = Expectation.SAME


VIEWS = (type({}.keys()), type({}.values()), type({}.items()))
_LEFT_ALONE = (type, FunctionType, GeneratorType, ModuleType, nn.Module, Optimizer, torch.Tensor)
"""What tells itself what it does, or is looked after by others."""
_OWN_PACKAGES = ("torch", "wholestep")


def reached(recorder: Recorder, given: Iterable[Any]) -> Iterator[Any]:
    """What code is given, and what it can get at through that up to the first object from outside on each way."""
    pending, kept = [*given], dict[int, Any]()
    while pending:
        part = pending.pop()
        if id(part) in kept or is_number(part) or (is_plain(part) and recorder.place_of(part) is None):
            continue
        kept[id(part)] = part  # or an object that is made on the way might get the place of another in memory
        yield part
        if recorder.place_of(part) is None and not isinstance(part, _LEFT_ALONE):
            pending += _parts_of_made(part)


def read_reached(recorder: Recorder, *given: Any) -> None:
    """Note the whole state of what is reached from some values."""
    for part in reached(recorder, given):
        recorder.read_deep(part)
        if isinstance(part, np.ndarray):
            recorder.expect_content(part)


def _parts_of_made(value: Any) -> Iterable[Any]:
    """What the step has put into something that it has made."""
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    if isinstance(value, (*CONTAINERS, *VIEWS)):
        return [*value]
    if isinstance(value, slice):
        return [value.start, value.stop, value.step]
    if _tells_itself(value):
        return []
    if type(value) in _OTHER_PARTS:
        return [take(value, Step.ATTRIBUTE, name) for name in _OTHER_PARTS[type(value)]]
    if hasattr(type(value), "__next__") and not isinstance(type(value).__next__, FunctionType):
        return gc.get_referents(value)  # an iterator of C: to ask it would use it up
    if not is_open(value) or type(value).__module__.partition(".")[0] in _OWN_PACKAGES:
        return []
    names = slot_names(type(value))
    return [*getattr(value, "__dict__", {}).values(), *(take(value, Step.ATTRIBUTE, name) for name in names)]


def _tells_itself(value: Any) -> bool:
    """Whether a method or partial can only be called, by code of C, and leads to a function that is followed then."""
    while type(value) is functools.partial:
        value = value.func
    function = value.__func__ if type(value) is MethodType else value
    return isinstance(function, FunctionType) and is_followed_file(function.__code__.co_filename)


def expect_content(recorder: Recorder, array: np.ndarray[Any, Any]) -> None:
    """Somebody is going to look into an array, who cannot be told to look again at each call."""
    if id(array) in recorder.drawn_arrays:
        drawing.refuse_array(recorder, array, "computes with")
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
    pending, seen = [owner], set[int]()
    while pending:
        part = pending.pop()
        if id(part) not in seen and recorder.place_of(part) is not None and id(part) not in recorder.kept:
            seen.add(id(part))  # objects may lead back to each other
            pending += _kept_with(recorder, part)


def _kept_with(recorder: Recorder, owner: Any) -> Iterable[Any]:
    """Keep an owner as it is; what it holds has to be kept as well."""
    place = recorder.place_of(owner)
    assert place is not None
    if place.expectation is not Expectation.ARRAY and (place.expectation not in _LOOKED_INTO or not is_open(owner)):
        return []
    if isinstance(owner, (tuple, frozenset)):
        return owner
    if type(owner) in (MethodType, functools.partial):
        return []
    namespace = recorder.namespace_of(owner)
    if isinstance(owner, (*CONTAINERS, np.ndarray)) or namespace is None:
        recorder.about_to_change(owner)
    parts = (owner.values() if isinstance(owner, dict) else owner) if isinstance(owner, CONTAINERS) else ()
    return [*parts, *([] if namespace is None else [namespace, *namespace.values()])]
