"""Texts among the arguments that the step only hands on: they may be others at each call.

    batch = {"input_ids": ids, "file": "a.txt"}
    batch = {name: value.to(device) if torch.is_tensor(value) else value for name, value in batch.items()}

takes the name of a file out of one dict and puts it into another, and nothing depends on what it says. So the trace is
given a copy of each such text, an object that nobody else has, and as long as it is only moved, kept, returned or
printed, no more is expected of it than that it is text. Who compares it, formats it, looks something up by it or hands
it to code that cannot be followed has read it: it is expected to be the same then, like any plain value (`settle`).
"""

from __future__ import annotations

import collections
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from wholestep.capture.record import outside, texts
from wholestep.capture.record.places import Expectation, Step, expectation

if TYPE_CHECKING:
    from wholestep.capture.record.recorder import Recorder

_SHORTEST = 2
"""Python has one object for each text of one letter."""
_HANDING_ON = frozenset(["set_cell", "set_global", "entered", "imported", "global_name", "cell"])
"""Hooks of instructions that do not look at what they are given."""
_LOOKING_UP = frozenset(["item", "set_item", "delete_item", "contains"])
"""Hooks of those that look for something in a container."""
_OF_THE_OUTSIDE = frozenset(["iterate", "slice", "truth", "identity"])
"""Hooks of those that look at a container, and not at what it holds."""
_PUTTING = frozenset(["append", "appendleft", "insert", "extend", "extendleft", "update", "setdefault"])
_WALKING: tuple[Any, ...] = (list, tuple, dict, zip, enumerate, iter, reversed, len)
_BY_TYPE: tuple[Any, ...] = (isinstance, type, callable, str, torch.is_tensor)
_HASHED = (dict, set, frozenset)
_CONTAINERS = (list, tuple, set, frozenset, dict, collections.deque)


@dataclass
class _Text:
    value: str
    path: tuple[Any, ...]
    owner: Any = None
    step: Step = Step.ITEM
    key: Any = None


def note_looks(recorder: Recorder, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A function is about to be called that nobody follows: it may look into texts that it is given.

    One with something missing it may put somewhere, or print it.
    """
    if texts.may_make(recorder):
        texts.refuse_padding_by_format(recorder, function, args, kwargs)
    if outside.is_output(function):
        return
    if recorder.late.has_texts:
        texts.refuse_in_call(recorder, function, args, kwargs)
    if recorder.texts:
        recorder.texts.settle_in_call(recorder, function, args, kwargs)


class QuietTexts:
    """The texts of one trace that nobody has looked into so far."""

    def __init__(self) -> None:
        self._texts: dict[int, _Text] = {}
        self._settled: list[str] = []
        """Keeps them from being freed, so that an id means one object."""

    def __bool__(self) -> bool:
        return bool(self._texts)

    def copy_of(self, value: Any, path: tuple[Any, ...]) -> Any:
        """What the trace gets in place of an argument, if that is a text."""
        if type(value) is not str or len(value) < _SHORTEST:
            return value
        copy = "".join([value[0], value[1:]])
        self._texts[id(copy)] = _Text(copy, path)
        return copy

    def given(self, value: Any, owner: Any, step: Step, key: Any) -> None:
        """An argument stands somewhere in what the step is given."""
        text = self._texts.get(id(value))
        if text is not None:
            text.owner, text.step, text.key = owner, step, key

    def expectation(self, value: Any) -> Expectation:
        """What is to be expected where a value was found: where it is such a text, any other."""
        return Expectation.NUMBER if id(value) in self._texts else expectation(value)

    def path_of(self, value: Any) -> tuple[Any, ...] | None:
        """Where a text is to be found at each call; None for any other value."""
        text = self._texts.get(id(value))
        return None if text is None else text.path

    def among(self, value: Any) -> bool:
        """Whether a plain value is such a text, or a tuple that holds one."""
        is_tuple = isinstance(value, (tuple, frozenset))
        return any(map(self.among, value)) if is_tuple else id(value) in self._texts  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]

    def paths(self) -> tuple[tuple[Any, ...], ...]:
        """The paths of all of which nothing depends on what they say."""
        return tuple(text.path for text in self._texts.values())

    def settle(self, recorder: Recorder, values: Iterable[Any], *, is_deep: bool = True) -> None:
        """Somebody looks into values: texts among them, or if that `is_deep` in what they hold, have been read."""
        for value in self._found([*values], is_deep):
            text = self._texts[id(value)]
            place = recorder.note(text.owner, text.step, text.key, value)
            del self._texts[id(value)]
            self._settled.append(value)
            if place is not None:
                place.expectation, place.value = Expectation.VALUE, value

    def settle_in_instruction(self, recorder: Recorder, hook: str, operands: tuple[Any, ...]) -> None:
        """An instruction is about to run; `hook` is what is told of it."""
        if hook in _HANDING_ON or hook == "attribute":  # of an attribute of a text, the call that follows tells
            return
        if hook == "identity" and any(operand is None for operand in operands):
            return
        if hook in _LOOKING_UP:
            *rest, owner, key = operands if hook != "contains" else reversed(operands)
            is_put = isinstance(owner, _CONTAINERS)
            self.settle(recorder, [key, *([] if is_put else rest)])
            self.settle(recorder, [owner], is_deep=not isinstance(owner, _HASHED) and hook == "contains")
            return
        self.settle(recorder, operands, is_deep=hook not in _OF_THE_OUTSIDE)

    def settle_in_call(self, recorder: Recorder, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A function is about to be called that nobody follows."""
        if function in _BY_TYPE:
            return
        owner = getattr(function, "__self__", None)
        if function in (getattr, hasattr):
            args = args[1:]
        if isinstance(owner, types.ModuleType):
            owner = None
        is_putting = isinstance(owner, _CONTAINERS) and getattr(function, "__name__", "") in _PUTTING
        if is_putting and not isinstance(owner, (set, frozenset)):
            self.settle(recorder, (owner,), is_deep=False)
            return
        is_outside = function in _WALKING or (isinstance(owner, dict) and function.__name__ in ("items", "values"))
        self.settle(recorder, (*args, *kwargs.values(), owner), is_deep=not is_outside)

    def _found(self, values: list[Any], is_deep: bool) -> Iterator[Any]:
        seen: set[int] = set()
        while values:
            value = values.pop()
            if id(value) in seen:
                continue
            seen.add(id(value))
            if id(value) in self._texts:
                yield value
            elif isinstance(value, _HASHED):
                values += value  # looked up by what they say
            if is_deep and isinstance(value, _CONTAINERS):
                values += value.values() if isinstance(value, dict) else value
