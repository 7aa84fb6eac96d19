"""The state of one parameter as a trace finds it: a dict that notes what is asked of it.

An entry that appears later means nothing to a graph whose step has never asked for it:

    'slow' in state         only in the steps that average: a graph of the others holds with that entry and without it
    len(state) == 0         of their number: another one may be as good, here any but 0
    state.items()           of the state as a whole: any other entry is another graph
"""

from __future__ import annotations

import contextlib
import dis
import operator
import os
import sys
from collections.abc import Callable, Generator
from dataclasses import dataclass
from types import FrameType
from typing import Any, ClassVar

import torch

from wholestep.capture import source

StateKeys = tuple[Any, ...]
_COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


_RECORD = os.path.join(os.path.dirname(__file__), "record", "")
_CONSTANTS = ("LOAD_CONST", "LOAD_SMALL_INT")
_TELLING = ("PUSH_NULL", "LOAD_CONST", "COPY", "PRECALL", "CALL", "POP_TOP")
"""What tells the recorder of a comparison comes before it."""


class Entries(dict[Any, Any]):
    """What an optimizer keeps of one parameter, traced."""

    is_noting: ClassVar[bool] = False
    """Whether it is the step who asks. One trace runs at a time."""
    __slots__ = ("absent", "compared", "is_asked_whole", "num_before")

    def __init__(self, *content: Any) -> None:
        super().__init__(*content)
        self.absent: set[Any] = set()
        """Keys that were asked for and not there."""
        self.compared: set[tuple[str, int]] = set()
        """Comparisons of their number, and with what."""
        self.is_asked_whole = False
        self.num_before = dict.__len__(self)

    def length(self) -> int:
        """`len(state)`, asked in code that is followed."""
        return self._length(sys._getframe(1))  # pyright: ignore[reportPrivateUsage]

    def __len__(self) -> int:
        frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
        is_torchs = frame.f_code.co_filename.startswith(source.TORCH_ROOT)
        return self._length(frame, may_be_compared=is_torchs)

    def _length(self, frame: FrameType, *, may_be_compared: bool = True) -> int:
        """Their number, for a frame that may do nothing but compare it at once: if it has called `len`."""
        number = dict.__len__(self)
        if not _is_asked(frame):
            return number
        comparison = _comparison(frame) if may_be_compared and number == self.num_before else None
        if comparison is None:
            self.is_asked_whole = True
        else:
            self.compared.add(comparison)
        return number

    def plain(self) -> dict[Any, Any]:
        return {**_items(self)}

    def _note(self, key: Any) -> None:
        if Entries.is_noting and not dict.__contains__(self, key):
            self.absent.add(key)

    def __missing__(self, key: Any) -> Any:
        self._note(key)
        raise KeyError(key)

    def __contains__(self, key: object) -> bool:
        self._note(key)
        return super().__contains__(key)

    def get(self, key: Any, default: Any = None, /) -> Any:
        self._note(key)
        return super().get(key, default)

    def setdefault(self, key: Any, default: Any = None, /) -> Any:
        self._note(key)
        return super().setdefault(key, default)

    def pop(self, key: Any, *default: Any) -> Any:
        self._note(key)
        return super().pop(key, *default)


def _is_asked(frame: FrameType) -> bool:
    """Whether the step asks, and not what records it, which goes through all that some function is given."""
    return Entries.is_noting and not frame.f_code.co_filename.startswith(_RECORD)


def _as_whole(name: str) -> Callable[..., Any]:
    original = getattr(dict, name)

    def asked(self: Entries, *args: Any) -> Any:
        if _is_asked(sys._getframe(1)):  # pyright: ignore[reportPrivateUsage]
            self.is_asked_whole = True
        return original(self, *args)

    return asked


for _name in ("iter", "reversed", "eq", "ne", "or", "ror", "ior", "repr", "reduce_ex", "sizeof"):
    setattr(Entries, f"__{_name}__", _as_whole(f"__{_name}__"))
for _name in ("keys", "values", "items", "copy", "clear", "popitem"):
    setattr(Entries, _name, _as_whole(_name))


def _items(entries: dict[Any, Any]) -> dict[Any, Any]:
    return dict(dict.items(entries))


@contextlib.contextmanager
def noting() -> Generator[None]:
    """The step runs inside, and what it asks is noted."""
    Entries.is_noting = True
    try:
        yield
    finally:
        Entries.is_noting = False


@dataclass(frozen=True)
class KeysAsked:
    """What a step has asked about the keys of one parameter's state."""

    before: StateKeys
    """Those that were there before it."""
    absent: frozenset[Any] = frozenset()
    compared: frozenset[tuple[str, int]] = frozenset()
    is_whole: bool = True

    def allow(self, now: StateKeys) -> bool:
        """Whether the step would have been told the same of these keys."""
        if now == self.before or self.is_whole:
            return now == self.before
        known = set(self.before)
        is_as_many = all(_COMPARISONS[how](len(now), n) is _COMPARISONS[how](len(known), n) for how, n in self.compared)
        are_there = tuple(key for key in now if key in known) == self.before
        return is_as_many and are_there and self.absent.isdisjoint(now)


def _comparison(frame: FrameType) -> tuple[str, int] | None:
    """How a frame compares what the call gives that it makes just now, with which number; None if it does not."""
    instructions = (one for one in dis.get_instructions(frame.f_code) if one.offset > frame.f_lasti)
    following = (one for one in instructions if one.opname not in ("EXTENDED_ARG", "CACHE"))
    number = next(following, None)
    compare = next((one for one in following if one.opname not in _TELLING), None)
    if number is None or compare is None or compare.opname != "COMPARE_OP" or type(number.argval) is not int:
        return None
    how = compare.argrepr.removeprefix("bool(").removesuffix(")")
    return (how, number.argval) if number.opname in _CONSTANTS and how in _COMPARISONS else None


def keys_asked(state: dict[Any, Any], reals: dict[int, torch.Tensor]) -> dict[int, KeysAsked]:
    """By id of a parameter, what a trace has asked about its state; what was there before it tells the guard."""
    return {
        id(reals[id(twin)]): KeysAsked((), frozenset(one.absent), frozenset(one.compared), one.is_asked_whole)
        for twin, one in state.items()
        if type(one) is Entries and id(twin) in reals
    }
