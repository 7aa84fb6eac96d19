"""Whether a call would read what the captured one has read.

Twice: `ReadGuard.check` first runs one generated expression that asks for the very objects seen last (some 20 ns for
each read, and less for those of one dict that nobody has written to), and only if that fails walks the places and
compares as they expect. What passes there is what the expression asks for from then on. What is left to a `Watch` is
not asked for as long as that is quiet.
"""

from __future__ import annotations

import collections
import operator
from collections.abc import Callable, Collection, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

from wholestep._recording_torch import (
    class_namespace,
    dict_version,
    has_plain_namespace,
    is_definition,
    tensor_types,
)
from wholestep.capture.record.follow import Followers
from wholestep.capture.record.numbers import is_real, value_of
from wholestep.capture.record.places import (
    ARGUMENTS,
    HEAP_TYPE,
    Expectation,
    Place,
    Step,
    equal_arrays,
    find,
    is_made_anew,
    same,
    take,
)
from wholestep.capture.record.program import Outcome
from wholestep.capture.record.watch import Watch

_EXACT = (dict, list, tuple)
_IMMUTABLE = (tuple, frozenset)
_SHARED = ("__code__", "__mro__")
"""What is asked of all functions and of all classes at once."""
_UNSEEN = object()
"""In place of an object among the arguments that nobody has kept: nothing is it."""


@dataclass
class Difference:
    """Why a call does not fit: a sentence, and the paths of numbers that have changed if that is all.

    If all fits but what is drawn, `outcome` tells where that leads.
    """

    reason: str
    numbers: list[tuple[Any, ...]] = field(default_factory=list[tuple[Any, ...]])
    outcome: Outcome | None = None


class ReadGuard:
    """The places that a captured step depends on."""

    def __init__(self, roots: list[Place], type_of: Callable[[Any], Any], watch: Watch) -> None:
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
        self._watch = watch
        self._moving: set[Place] = set()
        """Where another object was found than at the call before."""
        self._left: Collection[int] = ()
        self._ids: set[int] = set()
        """Of all objects that were found elsewhere than among the arguments."""
        is_writing = any(place.is_written for place in self._objects)
        self._given = [place for place in self._objects if is_writing and _is_container_given(place)]
        self._names: dict[str, Any] = {}
        shared = ((name, [p for p in self._places if _is_shared(p) and p.key == name]) for name in _SHARED)
        self._shared = {name: places for name, places in shared if places}
        self._numbers = {place: index for index, place in enumerate(self._places)}
        watch.add(self)

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
            self._rename()
            self._fast = self._generated()
        ask = self._quiet if self._watch.is_quiet else self._fast
        try:
            if ask is not None and ask(call) and not self._meets(call):
                return None
        except (KeyError, IndexError, AttributeError, TypeError, ValueError):
            pass
        return self._compare(call)

    def changed_numbers(self, call: Any) -> list[tuple[Any, ...]]:
        """Paths of the numbers that are others than expected, whatever else has changed."""
        paths: list[tuple[Any, ...]] = []
        for place in self._places:
            if place.expectation is Expectation.VALUE and type(place.value) in (int, float) and not _is_asked(place):
                now = find(place.path, call)
                if type(now) is type(place.value) and not same(now, place.value):
                    paths.append(place.path)
        return paths

    def _meets(self, call: Any) -> bool:
        """Whether a container among the arguments is one that is found elsewhere, too."""
        given = {id(find(place.path, call)) for place in self._given}
        return len(given) < len(self._given) or not given.isdisjoint(self._ids)

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
            if numbers is None:
                is_same = value is place.value and type(value) is not place.kind
                change = f"'{place}' changed from {_shown(place.value)} to {_shown(value)}"
                return Difference(_class_difference(place, value) if is_same else change, self.changed_numbers(call))
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
        moving = {place for place, value in now.items() if value is not self._now[place]}
        if not moving <= self._moving:
            self._moving |= moving
            self._watch.look_again()
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

    def _generated(self, left: Collection[int] = ()) -> Callable[[Any], bool]:
        """The expression as a function; it does not ask of what is `left` to the watch, by `id`."""
        prefix = "rest_" if left else ""
        groups = ["objects", *self._shared]
        terms = [f"[*map(get_{name}, {prefix}{name})] == {prefix}found_{name}" for name in groups]
        terms += sorted(
            [term for place in self._places for term in self._terms_of(place, left)],
            key=lambda term: ", CALL, " in term,
        )
        lines = ["def check(call):"]
        lines += [
            f"    if not ({' and '.join(chunk)}): return False" for chunk in _chunks(["have_types(*tensors)", *terms])
        ]
        exec("\n".join([*lines, "    return True"]), self._names)
        return self._names["check"]

    # What is left to the watch

    def dicts(self) -> list[dict[Any, Any]]:
        owners = {p.parent: None for p in self._places if p.parent is not None and self._goes_by_version(p)}
        return [self._names[f"in_{self._name(owner)}"] for owner in owners if self._is_still(owner)]

    def objects(self) -> list[Any]:
        owners = {id(owner) for name in self._shared for owner in self._names[name] if is_definition(owner)}
        still = [self._now[place] for place in self._places if self._is_still(place)]
        return [value for value in still if _has_changeable_class(value) or id(value) in owners]

    def _is_still(self, place: Place) -> bool:
        """Whether the same object has always stood there: what is left to the watch does not move by itself."""
        return not place.is_given and place not in self._moving

    def leave_to_watch(self, dicts: Collection[int]) -> None:
        self._left = {*dicts, *map(id, self.objects())}
        self._pick_rest()
        self._quiet = self._generated(self._left)

    def _terms_of(self, owner: Place, left: Collection[int]) -> Iterator[str]:
        """What to ask of an owner; of a dict, or of the dict of a class, only after somebody has written to it."""
        value, name = self._now[owner], self._name(owner)
        holder = f"in_{name}"
        by_version, others = self._split(owner)
        left = left if self._is_still(owner) else ()
        if id(value) in left and has_plain_namespace(value):  # the watch asks whether it has the same one
            others = [term for term in others if not term.startswith(f"{name}.__dict__ is ")]
        yield from others
        if by_version and id(self._names[holder]) not in left:
            yield f"(version({holder}) == of_{name} or ({' and '.join(by_version)} and note({holder}, 'of_{name}')))"

    def _split(self, owner: Place) -> tuple[list[str], list[str]]:
        """What need not be asked of an owner that nobody has written to, and what has to."""
        by_version: list[str] = []
        others: list[str] = []
        for place in owner.children.values():
            (by_version if self._goes_by_version(place) else others).extend(self._terms(place))
        return by_version, others

    def _goes_by_version(self, place: Place) -> bool:
        """Whether something stands in a dict, or in the dict of a class, and cannot change but by a write to that."""
        owner = place.parent
        if owner is None or owner.is_given or place.expectation is Expectation.ARRAY or place.step is Step.ATTRIBUTE:
            return False
        return type(self._now[owner]) is dict or isinstance(self._now[owner], type)

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
        if self._names[name] is not None:
            self._watch.wrote(owner)
        self._names[name] = dict_version(owner)
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
        found = [self._now[place] for place in self._types if place.step is not Step.CALL]
        tensors = {id(value): value for value in found if isinstance(value, torch.Tensor)}
        names["tensors"] = [*tensors.values()]
        names["have_types"] = tensor_types(names["tensors"])
        objects = [*{id(value): value for value in self._now.values() if _has_changeable_class(value)}.values()]
        names |= {"get_objects": type, "objects": objects, "found_objects": [*map(type, objects)]}
        for name, places in self._shared.items():
            owners = [self._now[place.parent] for place in places if place.parent is not None]
            found = [self._now[place] for place in places]
            names |= {f"get_{name}": operator.attrgetter(name), name: owners, f"found_{name}": found}
        self._pick_rest()
        self._ids = {id(self._now[place]) for place in self._objects if not place.is_given} if self._given else set()
        for place, value in self._now.items():
            name = self._name(place)
            names[name] = value
            if type(value) is dict or isinstance(value, type):
                holder = class_namespace(value) if isinstance(value, type) else value
                is_same = names.get(f"in_{name}") is holder
                if is_same and names[f"of_{name}"] not in (None, dict_version(holder)):
                    self._watch.wrote(holder)
                names |= {f"in_{name}": holder, f"of_{name}": None}
            if place.expectation is Expectation.ARRAY:
                names[f"expected_{name}"] = place.value

    def _pick_rest(self) -> None:
        """What of the objects that are asked all at once is not left to the watch."""
        names = self._names
        for name in ("objects", *self._shared):
            pairs = zip(names[name], names[f"found_{name}"], strict=True)
            rest = [(owner, found) for owner, found in pairs if id(owner) not in self._left]
            names |= {f"rest_{name}": [owner for owner, _ in rest], f"rest_found_{name}": [found for _, found in rest]}


def _maxlen(value: Any) -> int | None:
    return value.maxlen if isinstance(value, collections.deque) else None


def _is_asked(place: Place) -> bool:
    """Whether something is what a function returns, or a part of that."""
    return place.step is Step.CALL or (place.parent is not None and _is_asked(place.parent))


def _is_object(place: Place) -> bool:
    """Whether something stands at a place that can be told apart from an equal one."""
    kinds = (Expectation.OPEN, Expectation.SAME, Expectation.TENSOR, Expectation.ARRAY)
    return place.is_given or place.expectation in kinds


def _is_container_given(place: Place) -> bool:
    """Whether the trace has copied it, and somebody could write to it."""
    return place.is_given and place.parent is not None and place.parent.parent is not None and place.kind is not tuple


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
    if is_real(old):
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
