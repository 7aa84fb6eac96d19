"""Whether a call would read what the captured one has read.

Twice: `ReadGuard.check` first runs one generated expression that asks for the very objects seen last (some 20 ns for
each read, and less for those of one dict that nobody has written to), and only if that fails walks the places and
compares as they expect. What passes there is what the expression asks for from then on.
"""

from __future__ import annotations

import collections
import operator
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

from wholestep import _recording_torch
from wholestep._recording_torch import class_namespace, dict_version, has_plain_namespace, tensor_types, unwritten
from wholestep.capture.record.follow import Followers
from wholestep.capture.record.numbers import value_of
from wholestep.capture.record.places import (
    ARGUMENTS,
    HEAP_TYPE,
    Expectation,
    Place,
    Step,
    equal_arrays,
    is_made_anew,
    same,
    take,
)

_EXACT = (dict, list, tuple)
_IMMUTABLE = (tuple, frozenset)
_SHARED = ("__code__", "__mro__")
"""What is asked of all functions and of all classes at once."""
_UNSEEN = object()
"""In place of an object among the arguments that nobody has kept: nothing is it."""


@dataclass
class Difference:
    """Why a call does not fit: a sentence, and the paths of numbers that have changed if that is all."""

    reason: str
    numbers: list[tuple[Any, ...]] = field(default_factory=list[tuple[Any, ...]])


class ReadGuard:
    """The places that a captured step depends on."""

    def __init__(self, roots: list[Place], type_of: Callable[[Any], Any]) -> None:
        """`type_of` is all that matters about what stands in a tensor's place."""
        # Functions with a cache are asked last: what they compute for nothing stays in the cache.
        self._places = sorted([place for root in roots for place in _walk(root)], key=_is_asked)
        self._roots = roots
        self._type_of = type_of
        self._types = {p: type_of(p.value) for p in self._places if p.expectation is Expectation.TENSOR}
        self._objects = [place for place in self._places if place.twin is None and _is_object(place)]
        self._now: dict[Place, Any] = {
            place: _UNSEEN if place.is_forgotten else value_of(place.value) for place in self._places
        }
        self._fast: Callable[[Any], bool] | None = None
        self._quiet: Callable[[Any], bool] | None = None
        self._num_quiet = 0
        self._names: dict[str, Any] = {}
        shared = ((name, [p for p in self._places if _is_shared(p) and p.key == name]) for name in _SHARED)
        self._shared = {name: places for name, places in shared if places}
        self._numbers = {place: index for index, place in enumerate(self._places)}

    @property
    def num_reads(self) -> int:
        return sum(place.parent is not None for place in self._places)

    def call_cached_functions(self) -> None:
        """Ask the functions with a cache, as the step would: the trace has left their caches as they were."""
        for place in self._places:
            if place.step is Step.CALL and place.parent is not None and place.expectation is not Expectation.TENSOR:
                take(self._now[place.parent], place.step, place.key)

    def check(self, call: Any) -> Difference | None:
        """None if the call fits."""
        if self._fast is None:
            terms = [term for place in self._places for term in self._terms_of(place)]
            terms.sort(key=lambda term: ", CALL, " in term)
            self._fast = self._generated(["[*map(type, objects)] == classes", *terms])
        try:
            if self._quiet is not None and self._quiet(call):
                return None
            if self._fast(call):
                self._num_quiet += 1
                is_quiet = self._num_quiet == _recording_torch.QUIET_CALLS
                self._quiet = self._generated_for_quiet_calls() if is_quiet else None
                return None
        except (KeyError, IndexError, AttributeError, TypeError, ValueError):
            pass
        self._num_quiet, self._quiet = 0, None
        return self._compare(call)

    def _compare(self, call: Any) -> Difference | None:
        """Walk all places from their roots."""
        now: dict[Place, Any] = {}
        changed: list[Place] = []
        paths: list[tuple[Any, ...]] = []
        for place in self._places:
            if place.parent is None and place.key is ARGUMENTS:
                now[place] = call
                continue
            if place.parent is None:
                now[place] = place.key
                if type(place.key) is not place.kind:
                    return Difference(_class_difference(place, place.key))
                continue
            value = now[place] = take(now[place.parent], place.step, place.key)
            if place.is_given or self._is_as_expected(place, value):
                continue
            numbers = _changed_numbers(place.value, value) if place.expectation is Expectation.VALUE else None
            if numbers is None and value is place.value and type(value) is not place.kind:
                return Difference(_class_difference(place, value))
            if numbers is None:
                return Difference(f"'{place}' changed from {_shown(place.value)} to {_shown(value)}")
            changed.append(place)
            paths += [(*place.path, *step) for step in numbers]
        for place in self._places:
            if place.twin is not None and now[place] is not now.get(place.twin, self):
                return Difference(f"'{place}' is no longer '{place.twin}'")
        merged = self._merged(now)
        if merged is not None:
            return Difference(f"'{merged[1]}' and '{merged[0]}' are one object now")
        if changed:
            first = changed[0]
            return Difference(f"'{first}' changed from {first.value!r} to {now[first]!r}", paths)
        self._now = now
        self._rename()
        return None

    def _merged(self, now: dict[Place, Any]) -> tuple[Place, Place] | None:
        """Two places of different objects that hold one now, which the step writes to or has told apart."""
        seen: dict[int, Place] = {}
        for place in self._objects:
            other = seen.setdefault(id(now[place]), place)
            matters = place.is_written or other.is_written or (place.is_told_apart and other.is_told_apart)
            if matters and other is not place:
                was_one = place.value is not None and place.value is other.value
                if not was_one:
                    return other, place
        return None

    def _is_as_expected(self, place: Place, value: Any) -> bool:
        expected = place.expectation
        if expected is Expectation.VALUE:
            return same(place.value, value)
        if expected is Expectation.SAME:
            is_alike = value is place.value or is_made_anew(place.value, value) or _is_being_traced(place, value)
            return is_alike and type(value) is place.kind
        if expected in (Expectation.OPEN, Expectation.NUMBER):
            return type(value) is place.kind and _maxlen(value) == place.maxlen
        if expected is Expectation.TENSOR:
            return self._type_of(value) == self._types[place]
        if expected is Expectation.ARRAY:
            return equal_arrays(place.value, value)
        return (value is place.value) if expected is Expectation.ABSENT else type(value).__name__ != "Absent"

    # The generated expression

    def _generated(self, terms: list[str]) -> Callable[[Any], bool]:
        for name in self._shared:
            terms.insert(1, f"[*map(get{name}, owners{name})] == found{name}")
        terms.insert(1, "have_types(*tensors)")
        lines = ["def check(call):"]
        lines += [f"    if not ({' and '.join(chunk)}): return False" for chunk in _chunks(terms)]
        self._rename()
        exec("\n".join([*lines, "    return True"]), self._names)
        return self._names["check"]

    def _generated_for_quiet_calls(self) -> Callable[[Any], bool] | None:
        """A check for as long as nobody writes to any of the dicts, of which one question in C++ is asked.

        The question is also whether objects have the classes and the dicts that they had.
        """
        split = [(self._name(place), *self._split(place)) for place in self._places]
        dicts = [self._names[f"in_{name}"] for name, by_version, _ in split if by_version]
        unwritten_now = unwritten(dicts, self._names["objects"])
        if unwritten_now is None:
            return None
        asked = {f"{self._name(place)}.__dict__ is" for place in self._places if self._is_watched(place)}
        others = [term for _, _, terms in split for term in terms if term.rsplit(" ", 1)[0] not in asked]
        check = self._generated(["unwritten_now()", *others])
        self._names["unwritten_now"] = unwritten_now
        return check

    def _is_watched(self, owner: Place) -> bool:
        """Whether the dict of an owner is that of one of the objects asked of in C++."""
        value = self._now[owner]
        return not owner.is_given and _has_changeable_class(value) and has_plain_namespace(value)

    def _terms_of(self, owner: Place) -> Iterator[str]:
        """What to ask of an owner; of a dict, or of the dict of a class, only after somebody has written to it."""
        by_version, others = self._split(owner)
        yield from others
        if by_version:
            name = self._name(owner)
            holder = f"in_{name}"
            yield f"(version({holder}) == of_{name} or ({' and '.join(by_version)} and note({holder}, 'of_{name}')))"

    def _split(self, owner: Place) -> tuple[list[str], list[str]]:
        """What need not be asked of an owner that nobody has written to, and what has to."""
        has_version = not owner.is_given and (type(self._now[owner]) is dict or isinstance(self._now[owner], type))
        by_version: list[str] = []
        others: list[str] = []
        for place in owner.children.values():
            is_by_version = place.expectation is not Expectation.ARRAY and place.step is not Step.ATTRIBUTE
            (by_version if has_version and is_by_version else others).extend(self._terms(place))
        return by_version, others

    def _terms(self, place: Place) -> Iterator[str]:
        assert place.parent is not None
        owner, value, key = self._spelled(place.parent), self._name(place), self._key(place)
        step, expected = place.step, place.expectation
        if place.is_given:
            return  # the structure of the arguments is guarded as such
        if _is_shared(place) or self._is_of_immutable(place):
            return
        if step is Step.ITEM:
            is_plain_item = place.parent.is_given or type(self._now[place.parent]) in _EXACT
            get = f"{owner}[{key}]" if is_plain_item else f"take({owner}, ITEM, {key})"
            yield from self._test(get, owner, key, value, expected)
        elif step is Step.ATTRIBUTE:
            yield from self._test(f"{owner}.{place.key}", owner, key, value, expected)
        elif step is Step.CALL:
            # A tensor is asked for when the graph runs: as often as in eager.
            yield "True" if expected is Expectation.TENSOR else f"same(take({owner}, CALL, {key}), {value})"
        elif step is Step.CLASS:
            yield from self._test(f"{owner}.__dict__[{key}]", f"{owner}.__dict__", key, value, expected)
        elif step is Step.CELL:
            is_variable = isinstance(self._now[place.parent], ContextVar)
            get = f"take({owner}, CELL, None)" if is_variable else f"{owner}.cell_contents"
            is_empty = expected is Expectation.ABSENT
            yield from [f"{get} is {value}"] if is_empty else self._test(get, owner, key, value, expected)
        elif step is Step.LENGTH:
            yield "True" if expected is Expectation.NUMBER else f"len({owner}) == {value}"
        elif step is Step.TRUTH:
            yield f"bool(len({owner})) is {value}"
        else:
            if isinstance(self._now[place.parent], type):
                owner = f"{owner}.__dict__"
            yield f"(len({owner}) == len({value}) and all(map(is_, {owner}, {value})) or same(tuple({owner}), {value}))"

    def _is_of_immutable(self, place: Place) -> bool:
        """Whether the owner is an object that has what it had for as long as it is the very object that it was."""
        owner = place.parent
        return owner is not None and not owner.is_given and type(self._now[owner]) in _IMMUTABLE

    def _test(self, get: str, owner: str, key: str, value: str, expected: Expectation) -> Iterator[str]:
        if expected is Expectation.ABSENT:
            yield f"{key} not in {owner}"
        elif expected is Expectation.PRESENT:
            yield f"{key} in {owner}"
        elif expected is Expectation.NUMBER:
            yield f"type({get}) is type({value})"
        elif expected is Expectation.ARRAY:
            yield f"{get} is {value} and equal_arrays({value}, expected_{value})"
        else:
            yield f"{get} is {value}"

    def _spelled(self, place: Place) -> str:
        """An owner: the object seen last, or the way to a container among the arguments of this call."""
        if not place.is_given:
            return self._name(place)
        if place.parent is None:
            return "call"
        above = self._spelled(place.parent)
        return f"{above}[{self._key(place)}]" if place.step is Step.ITEM else f"{above}.{place.key}"

    def _name(self, place: Place) -> str:
        return f"v{self._numbers[place]}"

    def _note_version(self, owner: dict[Any, Any], name: str) -> bool:
        """A dict holds what it should; no need to ask again before it is written to."""
        self._names[name] = dict_version(owner)
        self._num_quiet = 0
        return True

    def _key(self, place: Place) -> str:
        if type(place.key) in (str, int, bool):
            return repr(place.key)
        name = f"k{self._numbers[place]}"
        self._names[name] = place.key
        return name

    def _rename(self) -> None:
        """Let the expression ask for what was seen last."""
        names = self._names
        names |= {
            "take": take,
            "ITEM": Step.ITEM,
            "CALL": Step.CALL,
            "CELL": Step.CELL,
            "is_": operator.is_,
            "same": same,
            "equal_arrays": equal_arrays,
            "version": dict_version,
            "note": self._note_version,
        }
        objects = [*{id(value): value for value in self._now.values() if _has_changeable_class(value)}.values()]
        found = [self._now[place] for place in self._types if place.step is not Step.CALL]
        tensors = {id(value): value for value in found if isinstance(value, torch.Tensor)}
        names |= {"objects": objects, "classes": [*map(type, objects)], "tensors": [*tensors.values()]}
        names["have_types"] = tensor_types(names["tensors"])
        for name, places in self._shared.items():
            names[f"get{name}"] = operator.attrgetter(name)
            names[f"owners{name}"] = [self._now[place.parent] for place in places if place.parent is not None]
            names[f"found{name}"] = [self._now[place] for place in places]
        for place, value in self._now.items():
            names[self._name(place)] = value
            if type(value) is dict or isinstance(value, type):
                names[f"of_{self._name(place)}"] = None
                names[f"in_{self._name(place)}"] = class_namespace(value) if isinstance(value, type) else value
            if place.expectation is Expectation.ARRAY:
                names[f"expected_{self._name(place)}"] = place.value


def _maxlen(value: Any) -> int | None:
    return value.maxlen if isinstance(value, collections.deque) else None


def _is_asked(place: Place) -> bool:
    """Whether something is what a function returns, or a part of that."""
    return place.step is Step.CALL or (place.parent is not None and _is_asked(place.parent))


def _is_object(place: Place) -> bool:
    """Whether something stands at a place that can be told apart from an equal one."""
    kinds = (Expectation.OPEN, Expectation.SAME, Expectation.TENSOR, Expectation.ARRAY)
    return place.is_given or place.expectation in kinds


def _is_shared(place: Place) -> bool:
    return place.step is Step.ATTRIBUTE and place.key in _SHARED and place.expectation is Expectation.SAME


def _is_being_traced(place: Place, value: Any) -> bool:
    """Whether a function has other code only as long as another thread traces a step that calls it too."""
    return _is_shared(place) and place.key == "__code__" and Followers.instrumenter.tells_of(value, place.value)


def _has_changeable_class(value: Any) -> bool:
    return bool(type(value).__flags__ & HEAP_TYPE) and not isinstance(value, (type, torch.Tensor))


def _class_difference(place: Place, value: Any) -> str:
    return f"'{place}' is a {type(value).__qualname__} now instead of a {place.kind.__qualname__}"


def _walk(place: Place) -> Iterator[Place]:
    yield place
    for child in place.children.values():
        yield from _walk(child)


def _changed_numbers(old: Any, new: Any) -> list[tuple[Any, ...]] | None:
    """Where numbers differ between two values that are alike otherwise: steps into tuples; None if more differs."""
    if type(old) is not type(new):
        return None
    if type(old) in (int, float):
        return [()]
    if not isinstance(old, tuple) or len(old) != len(new):
        return None
    steps: list[tuple[Any, ...]] = []
    for index, (before, after) in enumerate(zip(old, new, strict=True)):
        inner = [] if same(before, after) else _changed_numbers(before, after)
        if inner is None:
            return None
        steps += [((Step.ITEM, index), *step) for step in inner]
    return steps


def _chunks(terms: list[str], size: int = 200) -> Iterator[list[str]]:
    for start in range(0, len(terms), size):
        yield terms[start : start + size]


def _shown(value: Any) -> str:
    text = repr(value) if not isinstance(value, torch.Tensor) else f"a tensor of shape {list(value.shape)}"
    return text if len(text) <= 60 else f"{text[:57]}..."
