"""The state of one owner: kept before the step changes it, put back behind the trace, compared with what it became.

A trace runs the user's Python once more than eager would. Whatever it writes is undone, and written again at each call
with that call's values (see `effects`).
"""

from __future__ import annotations

import collections
import operator
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import CellType
from typing import Any

import numpy as np

from wholestep.capture.record.places import ABSENT, Step, slot_names, take

_EMPTY = object()
_STEADY = ("append", "extend", "insert", "pop")

Operation = tuple[str, tuple[Any, ...]]
"""A method of a container and what it was given."""


@dataclass(eq=False)
class Kept:
    """What an owner held before the step wrote to it.

    `before` is a shallow copy: a dict for what has keys (dicts, slots, attributes of a class), a list for sequences,
    the content of a cell, an array. `operations` are the calls that changed a list, set or deque, in order; `keys` are
    what was set by name or key, and `is_cleared` says that a dict was emptied: both are done again even where they
    left everything as it was, since it may be otherwise before the next call.
    """

    owner: Any
    before: Any
    operations: list[Operation] = field(default_factory=list[Operation])
    keys: set[Any] = field(default_factory=set[Any])
    is_cleared: bool = False

    @staticmethod
    def of(owner: Any) -> Kept:
        return Kept(owner, content_of(owner))

    @property
    def has_steady_length(self) -> bool:
        """Whether the noted operations change a list's length by the same number, however long it is."""
        return all(name in _STEADY for name, _ in self.operations)

    @property
    def num_appended(self) -> int:
        """How many items at the end of a list are the step's own, however long it was."""
        is_longer = all(name in ("append", "extend", "__setitem__") for name, _ in self.operations)
        return len(self.owner) - len(self.before) if isinstance(self.owner, list) and is_longer else 0

    def restore(self) -> None:
        """Put the owner back as it was."""
        owner, before = self.owner, self.before
        if isinstance(owner, dict):
            _restore_dict(owner, before)
        elif isinstance(owner, list):
            list.__setitem__(owner, slice(None), before)  # pyright: ignore[reportUnknownMemberType]
        elif isinstance(owner, set):
            set.clear(owner)  # pyright: ignore[reportUnknownMemberType]
            set.update(owner, before)  # pyright: ignore[reportUnknownMemberType]
        elif isinstance(owner, collections.deque):
            owner.clear()  # pyright: ignore[reportUnknownMemberType]
            owner.extend(before)  # pyright: ignore[reportUnknownMemberType]
        elif isinstance(owner, CellType):
            _fill_cell(owner, before)
        elif isinstance(owner, ContextVar):
            if owner.get(ABSENT) is not before:
                owner.set(before)
        elif isinstance(owner, np.ndarray):
            owner[...] = before
        else:
            _restore_attributes(owner, before)

    def is_as_before(self, value: Any) -> bool:
        """Whether the content of a cell or context variable is what it was before the step wrote to it."""
        return value is self.before or (value is ABSENT and self.before is _EMPTY)

    @property
    def was_written(self) -> bool:
        """Whether something was done to the owner, whatever came of it."""
        return bool(self.operations or self.keys or self.is_cleared)

    def has_changed(self) -> bool:
        """Whether the owner holds something else now, or the same in another order."""
        now = content_of(self.owner)
        if isinstance(now, np.ndarray):
            return now.tobytes() != self.before.tobytes()
        if isinstance(self.owner, (CellType, ContextVar)):
            return now is not self.before
        if isinstance(now, dict):
            pairs = zip(now.items(), self.before.items(), strict=False)
            return len(now) != len(self.before) or any(a is not c or b is not d for (a, b), (c, d) in pairs)
        return len(now) != len(self.before) or any(a is not b for a, b in zip(now, self.before, strict=True))

    def is_explained(self) -> bool:
        """Whether the noted operations, done to what was there before, give what is there now."""
        copy = _same_kind(self.owner, self.before)
        for name, args in self.operations:
            try:
                apply_operation(copy, name, args)
            except (IndexError, KeyError, ValueError, TypeError):
                return False
        now = content_of(self.owner)
        return len(now) == len(copy) and all(a is b for a, b in zip(now, content_of(copy), strict=True))


def content_of(owner: Any) -> Any:
    """A shallow copy of what an owner holds."""
    if isinstance(owner, dict):
        return dict(owner)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    if isinstance(owner, (list, set, frozenset, tuple, collections.deque)):
        return list(owner)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    if isinstance(owner, CellType):
        return _cell_content(owner)
    if isinstance(owner, ContextVar):
        return take(owner, Step.CELL, None)
    if isinstance(owner, np.ndarray):
        return owner.copy()
    if isinstance(owner, type):
        return {name: value for name, value in vars(owner).items() if name not in ("__dict__", "__weakref__")}
    return {name: take(owner, Step.ATTRIBUTE, name) for name in slot_names(type(owner))}


def apply_operation(owner: Any, name: str, args: tuple[Any, ...]) -> Any:
    """Do one of a container's own operations, whatever a subclass makes of it."""
    kind = next(kind for kind in (list, dict, set, collections.deque) if isinstance(owner, kind))
    return getattr(kind, name)(owner, *args)


def _restore_dict(owner: dict[Any, Any], before: dict[Any, Any]) -> None:
    """Not by way of an empty dict where that can be helped: it may be the builtins, or what another thread looks at."""
    kind = dict_kind(owner)
    for key in [key for key in kind.keys(owner) if key not in before]:
        kind.pop(owner, key, None)
    kind.update(owner, before)
    if not all(map(operator.is_, kind.keys(owner), before)):
        kind.clear(owner)
        kind.update(owner, before)


def dict_kind(owner: Any) -> Any:
    """The class whose methods change a dict as it is, whatever a subclass makes of them."""
    return collections.OrderedDict if isinstance(owner, collections.OrderedDict) else dict


def _same_kind(owner: Any, content: list[Any]) -> Any:
    if isinstance(owner, collections.deque):
        return collections.deque(content, owner.maxlen)  # pyright: ignore[reportUnknownMemberType]
    return set(content) if isinstance(owner, set) else list(content)


def _cell_content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _EMPTY


def _fill_cell(cell: CellType, content: Any) -> None:
    if content is _EMPTY:
        del cell.cell_contents
    else:
        cell.cell_contents = content


def _restore_attributes(owner: Any, before: dict[str, Any]) -> None:
    setter: Callable[..., None] = type.__setattr__ if isinstance(owner, type) else object.__setattr__
    deleter: Callable[..., None] = type.__delattr__ if isinstance(owner, type) else object.__delattr__
    now = content_of(owner)
    for name, value in now.items():
        absent = name not in before or before[name] is ABSENT
        if absent and value is not ABSENT:
            deleter(owner, name)
    for name, value in before.items():
        if value is not ABSENT and now.get(name, _EMPTY) is not value:
            setter(owner, name, value)
