"""Draws from a sequence of the user's: what is drawn are places in it, and what stands there is found at each call.

    batch = random.sample(self.memory, 4)       b_1 = c_sample(range(len of memory), 4);  b_2 = b_1[0];  ...
    state = batch[0].state                      b_6 = item(memory, b_2);  b_7 = item(b_6, 0), an input of the graph

How long the sequence is may change. What stands at a place is to be of the same kind: tensors of the same shape, dtype
and device, tuples, lists and dicts of as many parts, other values the same. Numbers may be any of their type.
"""

from __future__ import annotations

import collections
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from wholestep import _recording_torch
from wholestep.capture.record import drawing, early_arrays, numbers
from wholestep.capture.record.places import Place, Step, is_plain

if TYPE_CHECKING:
    from wholestep.capture.record.recorder import Recorder

_KINDS = (list, tuple, collections.deque)
_NAMES = ("population", "seq")
_FROM_A_SEQUENCE = ("choice", "choices", "sample")


def is_drawn_from(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call draws from a sequence that holds more than plain values, by places alone."""
    is_known = isinstance(function.__self__, random.Random) and function.__name__ in _FROM_A_SEQUENCE
    if not is_known or type(function.__self__) not in (random.Random, random.SystemRandom):
        return False
    population = _population(args, kwargs)
    return type(population) in _KINDS and "counts" not in kwargs and not all(map(is_plain, population))


def is_shuffled(recorder: Recorder, function: Any, args: tuple[Any, ...]) -> bool:
    """Whether a call puts numbers in another order, in a list that the step has made."""
    if function.__name__ != "shuffle" or type(function.__self__) is not random.Random or len(args) != 1:
        return False
    is_own = type(args[0]) is list and recorder.place_of(args[0]) is None and bool(args[0])
    return is_own and all(map(numbers.is_real, args[0]))


def shuffle(recorder: Recorder, function: Any, values: list[Any]) -> None:
    """`random.shuffle(places)`."""
    recorder.keep_generator(function.__self__)
    recorder.num_deeds += 1
    ledger = recorder.ledger
    text = f"{ledger.constant(_shuffled)}({ledger.constant(function)}, {ledger.constant([*values])})"
    values[:] = drawing.drawn(recorder, text, _shuffled(function, values))


def _shuffled(shuffle: Callable[[list[Any]], None], values: list[Any]) -> list[Any]:
    values = [*values]
    shuffle(values)
    return values


def _population(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0] if args else next((kwargs[name] for name in _NAMES if name in kwargs), None)


def draw(recorder: Recorder, function: Any, *args: Any, **kwargs: Any) -> Any:
    """`random.choice(memory)`, and what is like it."""
    recorder.keep_generator(function.__self__)
    recorder.num_deeds += 1
    population = _population(args, kwargs)
    others, kwargs = args[1:], {key: value for key, value in kwargs.items() if key not in _NAMES}
    found = _Sequence(recorder, population)
    texts = [f"range({_text(recorder, found.size)})", *(_text(recorder, value) for value in others)]
    texts += [f"{key}={_text(recorder, value)}" for key, value in kwargs.items()]
    given = range(numbers.value_of(found.size)), *map(numbers.value_of, others)
    value = function(*given, **{key: numbers.value_of(value) for key, value in kwargs.items()})
    ledger = recorder.ledger
    text = f"{ledger.constant(function)}({', '.join(texts)})"
    if not isinstance(value, list):
        return found.item(drawing.drawn(recorder, text, value))
    number, is_fixed = drawing.named(recorder, text, value)
    name = numbers.name_of(number)
    ledger.assume(f"len({name}) == {len(value)}")
    places = [ledger.computed(f"{name}[{index}]", one, frozenset([name])) for index, one in enumerate(value)]
    return [found.item(numbers.settled(place) if is_fixed else place) for place in places]


def is_picked_from(recorder: Recorder, owner: Any, index: Any) -> bool:
    """Whether an item of a sequence is asked for by a number that is drawn, and is more than a plain value."""
    if type(index) is not numbers.Number or numbers.is_late(index) or type(owner) not in _KINDS:
        return False
    is_drawn = not recorder.ledger.drawn.keys().isdisjoint(numbers.origins_of(index))
    return is_drawn and not all(map(is_plain, owner))


class Picked:
    """A sequence, of which an item is taken by a number that is drawn."""

    def __init__(self, recorder: Recorder, owner: Any) -> None:
        self._recorder = recorder
        self._owner = owner

    def __getitem__(self, index: Any) -> Any:
        found = _Sequence(self._recorder, self._owner)
        size = numbers.value_of(found.size)
        if not -size <= numbers.value_of(index) < size:
            return self._owner[numbers.settled(index)]  # which raises
        if index >= 0:
            return found.item(index)
        return found.item(index + found.size)


class _Sequence:
    """A sequence as the step finds it: what was in it before, and what the step has put into it."""

    def __init__(self, recorder: Recorder, owner: Any) -> None:
        self._recorder = recorder
        self._owner = owner
        self._place: Place | None = recorder.place_of(owner)
        kept = recorder.kept.get(id(owner))
        is_told = kept is None or all(_is_told(owner, *operation) for operation in kept.operations)
        if self._place is None or not is_told:
            recorder.read_all(owner)
            self._place = None
            self.size: Any = len(owner)
            return
        ledger, operations = recorder.ledger, [] if kept is None else kept.operations
        self._before = owner if kept is None else kept.before
        self.size = ledger.leaf(len(self._before), (*self._place.path, (Step.LENGTH, None)))
        self._own: list[tuple[Any, Any]] = []
        """Places that the step has written to, and what it has put there."""
        for name, args in operations:
            self._own.append((self.size, args[0]) if name == "append" else args)
            self.size = self.size + 1 if name == "append" else self.size
        self._num_gone: Any = 0
        most = owner.maxlen if isinstance(owner, collections.deque) else None
        if self._own and most is not None and self.size > most:
            self._num_gone, self.size = self.size - most, most
        self._name = ledger.object_leaf(self._place.path)
        ledger.assume(f"type({self._name}) is {ledger.constant(type(owner))}")
        if most is not None:
            ledger.assume(f"{self._name}.maxlen == {ledger.constant(most)}")

    def item(self, index: Any) -> Any:
        """What stands at a place that is drawn."""
        recorder = self._recorder
        if self._place is None:
            return self._owner[numbers.settled(index)]
        position = index + self._num_gone if self._own else index
        for place, value in reversed(self._own):
            if position == place:
                return value
        value = self._before[numbers.value_of(position)]
        if not _can_be_given(value):
            recorder.read_item(self._owner, numbers.settled(position))
            return value
        ledger = recorder.ledger
        where = numbers.name_of(position) if numbers.is_number(position) else str(position)
        name = numbers.name_of(ledger.computed(f"{ledger.constant(item_of)}({self._name}, {where})", 0))
        return _given(recorder, name, value, numbers.origins_of(position))


def _is_told(owner: Any, name: str, args: tuple[Any, ...]) -> bool:
    """Whether it is known where in a sequence an operation has put something, however long that was."""
    if name == "append" or type(owner) is not list:
        return name == "append"
    return name == "__setitem__" and numbers.kind_of(args[0]) is int and numbers.value_of(args[0]) >= 0


def item_of(owner: Any, key: Any) -> Any:
    """An item of a container, whatever a subclass makes of `[]`."""
    kind: Any = next(kind for kind in (dict, *_KINDS) if isinstance(owner, kind))
    return kind.__getitem__(owner, key)


def form_of(value: Any) -> Any:
    """What is taken for granted of something that stands at a place that is drawn."""
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            return type(value), value.layout
        form = type(value), value.shape, value.stride(), value.dtype, value.device, value.requires_grad
        return *form, tuple(vars(value))
    if isinstance(value, np.ndarray):
        return early_arrays.form_of(value)
    if isinstance(value, (list, tuple)):
        return type(value), len(value)
    return (type(value), tuple(value)) if isinstance(value, dict) else type(value)


def _can_be_given(value: Any) -> bool:
    """Whether something can be made of parts that are found at each call."""
    if isinstance(value, torch.Tensor):
        is_plain_tensor = type(value) is torch.Tensor and not value.requires_grad and not vars(value)
        return is_plain_tensor and value.layout is torch.strided
    if isinstance(value, np.ndarray):
        return type(value) is np.ndarray and value.dtype != object
    if type(value) is dict:
        return all(type(key) in (str, int) for key in value) and all(map(_can_be_given, value.values()))
    if type(value) in (list, tuple) or _is_named_tuple(value):
        return all(map(_can_be_given, value))
    return is_plain(value) or numbers.is_real(value)


def _is_named_tuple(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(type(value), "_make") and not hasattr(value, "__dict__")


def _given(recorder: Recorder, name: str, value: Any, origins: frozenset[str]) -> Any:
    """What the step is given for a value that has a name in the ledger."""
    ledger = recorder.ledger
    if numbers.is_real(value) or type(value) is bool:
        ledger.assume(f"type({name}) is {ledger.constant(type(value))}")
        return numbers.Number(ledger, name, value, origins)
    if isinstance(value, np.ndarray):
        return early_arrays.early(recorder, value, name, origins, is_frozen=True)
    if not isinstance(value, (torch.Tensor, list, tuple, dict)) or value == ():
        ledger.assume(f"same({name}, {ledger.constant(value)})")
        return value
    ledger.assume(f"{ledger.constant(form_of)}({name}) == {ledger.constant(form_of(value))}")
    if isinstance(value, torch.Tensor):
        with _recording_torch.untraced():
            made: Any = value.detach()
        recorder.drawn_tensors[id(made)] = made, name, _itself
    else:
        made = _made_of_parts(value, lambda key: _part(recorder, name, value, key, origins))
    recorder.drawn_items[id(made)] = made, name, _content_of(made)
    return made


def _part(recorder: Recorder, name: str, value: Any, key: Any, origins: frozenset[str]) -> Any:
    ledger = recorder.ledger
    text = f"{ledger.constant(item_of)}({name}, {ledger.constant(key)})"
    return _given(recorder, numbers.name_of(ledger.computed(text, 0)), item_of(value, key), origins)


def _made_of_parts(value: Any, part: Callable[[Any], Any]) -> Any:
    if type(value) is dict:
        return {key: part(key) for key in value}
    parts: Any = [part(index) for index in range(len(value))]
    return type(value)._make(parts) if hasattr(type(value), "_make") else type(value)(parts)


def _content_of(made: Any) -> list[Any]:
    if isinstance(made, dict):
        return [*made, *made.values()]
    return [*made] if isinstance(made, list) else []


def refuse_identity(recorder: Recorder, *values: Any) -> None:
    """The same may have been drawn twice, or stand elsewhere as well: what the trace has been given is not that."""
    if any(id(value) in recorder.drawn_items for value in values):
        recorder.refuse("asks which object it is that it has drawn", "Draw places, and compare those")


def require_unchanged(recorder: Recorder, written: Sequence[Any]) -> None:
    """The trace is over: nothing that was drawn has been written to, as the graph does to some tensors."""
    for tensor in written:
        if id(tensor) in recorder.drawn_items or id(tensor) in recorder.lent_tensors:
            recorder.refuse("writes to a tensor that it has drawn", _ADVICE)
    for made, _, content in recorder.drawn_items.values():
        now = _content_of(made)
        if len(now) != len(content) or any(one is not other for one, other in zip(now, content, strict=True)):
            recorder.refuse(f"writes to a {type(made).__name__} that it has drawn", _ADVICE)


_ADVICE = "Copy what was drawn before changing it, or draw outside the step and pass what was drawn"


def _itself(value: Any) -> Any:
    return value


def _text(recorder: Recorder, value: Any) -> str:
    if numbers.is_number(value):
        return numbers.name_of(value)
    return recorder.ledger.constant([*value] if isinstance(value, list) else value)


def are_repeatable(values: Sequence[Any]) -> bool:
    """Whether what a draw is given besides the sequence may be taken as it is."""
    return all(
        all(map(is_plain, value)) if isinstance(value, (list, tuple)) else is_plain(value) or _is_known(value)
        for value in values
    )


def _is_known(value: Any) -> bool:
    return numbers.is_number(value) and not numbers.is_late(value)
