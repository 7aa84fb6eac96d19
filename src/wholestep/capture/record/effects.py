"""What a step leaves in the user's objects: found by comparing them with what they were, done again at each call.

Only the last state counts, since nobody looks while the step runs. Lists, sets and deques are changed by the calls that
the step made (`append`, `pop`, ...), so that what was in them before need not be known; everything else by key.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from types import CellType
from typing import Any

import numpy as np

from wholestep.capture.binding import FixedTensor
from wholestep.capture.record.outside import Output
from wholestep.capture.record.places import ABSENT, Place, Step, find
from wholestep.capture.record.state import Kept, apply_operation, content_of, dict_kind
from wholestep.capture.record.templates import Built, Constant, Converted, Filling, FromSlot, Template, Templates
from wholestep.errors import CaptureError

Prepare = Callable[[Any, Filling], Callable[[], None]]


@dataclass(frozen=True)
class Change:
    """What happens to one owner after each call: `prepare` makes the new values and returns what puts them in."""

    name: str
    path: tuple[Any, ...]
    prepare: Prepare
    is_repeat: bool
    """Whether it only writes what was there before."""
    places: frozenset[tuple[Any, ...]] = frozenset()
    """Paths of the items of a dict that it sets."""


@dataclass(frozen=True)
class Effects:
    """Everything that Python does besides the graph: output and changes of owners, in order."""

    outputs: tuple[tuple[Callable[..., Any], tuple[Template, ...], dict[str, Template]], ...] = ()
    changes: tuple[Change, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.outputs or self.changes)

    @property
    def places(self) -> frozenset[tuple[Any, ...]]:
        """Paths of all items of dicts that are set."""
        return frozenset[tuple[Any, ...]]().union(*(change.places for change in self.changes))

    def perform(self, filling: Filling, *, is_quiet: bool = False) -> None:
        """Do it all with the values of one call, without the output if that `is_quiet`."""
        # All are found and all values made before anything is written: `a, b = b, a`.
        ready = [change.prepare(find(change.path, filling.call), filling) for change in self.changes]
        for write in ready:
            write()
        for function, args, kwargs in () if is_quiet else self.outputs:
            function(
                *[arg.fill(filling) for arg in args], **{name: value.fill(filling) for name, value in kwargs.items()}
            )


def find_effects(
    kept: Iterable[Kept], outputs: Iterable[Output], place_of: Callable[[Any], Place | None], templates: Templates
) -> Effects:
    """The effects of a trace that has just ended, before anything is put back."""
    changes: list[Change] = []
    for item in kept:
        place = place_of(item.owner)
        if place is not None and ((has_changed := item.has_changed()) or item.was_written):
            prepare = _change(item, place, templates)
            changes.append(Change(str(place), place.path, prepare, not has_changed, _places_set(item, place)))
    said = [
        (
            output.function,
            tuple(templates.of(arg, "the step prints") for arg in output.args),
            {name: templates.of(value, "the step prints") for name, value in output.kwargs.items()},
        )
        for output in outputs
    ]
    return Effects(tuple(said), tuple(changes))


def _places_set(kept: Kept, place: Place) -> frozenset[tuple[Any, ...]]:
    if not isinstance(kept.owner, dict):
        return frozenset()
    now: dict[Any, Any] = dict(kept.owner)
    changed = {key for key in {**kept.before, **now} if now.get(key, ABSENT) is not kept.before.get(key, ABSENT)}
    return frozenset((*place.path, (Step.ITEM, key)) for key in changed | kept.keys)


def _change(kept: Kept, place: Place, templates: Templates) -> Prepare:
    owner, what = kept.owner, f"the step keeps in '{place}'"
    if isinstance(owner, np.ndarray):
        content = owner.copy()
        return lambda array, _: functools.partial(np.copyto, array, content)
    if isinstance(owner, ContextVar):
        content = templates.of(owner.get(), what)
        return lambda variable, filling: functools.partial(variable.set, content.fill(filling))
    if isinstance(owner, CellType):
        template = templates.of(owner.cell_contents, what)
        return lambda cell, filling: functools.partial(setattr, cell, "cell_contents", template.fill(filling))
    if isinstance(owner, dict):
        return _dict_change(kept, place, templates, what)
    if isinstance(kept.before, dict):
        return _attributes_change(kept, templates, what)
    if not kept.is_explained():
        raise CaptureError(
            f"the step changes '{place}' in a way that cannot be done again at each call",
            advice="Use append, pop, clear or item assignment, or change it outside the step",
        )
    operations = [(name, [templates.of(arg, what) for arg in args]) for name, args in kept.operations]

    def prepare(sequence: Any, filling: Filling) -> Callable[[], None]:
        filled = [(name, tuple(arg.fill(filling) for arg in args)) for name, args in operations]

        def write() -> None:
            for name, args in filled:
                apply_operation(sequence, name, args)

        return write

    return prepare


def _dict_change(kept: Kept, place: Place, templates: Templates, what: str) -> Prepare:
    """By key, and in the order in which a dict ends up: keys that were taken out and put in again go to its end."""
    now: dict[Any, Any] = dict(kept.owner)
    gone = [key for key in kept.before if key not in now]
    is_cleared = kept.is_cleared  # the owner may be the trace's own, and is not to be kept
    written = set(now) if is_cleared else kept.keys
    new: list[Template | None] = [
        templates.of(value, what) if key in written or kept.before.get(key, ABSENT) is not value else None
        for key, value in now.items()
    ]
    if _is_of_torch(place):
        new = [
            None if value is None or _gives(value, kept.before.get(key, ABSENT)) else value
            for key, value in zip(now, new, strict=True)
        ]
    staying = iter([key for key in kept.before if key in now])
    num_in_place = next((i for i, key in enumerate(now) if next(staying, ABSENT) is not key), len(now))
    has_moved = any(key in kept.before for key in list(now)[num_in_place:])
    if not has_moved and not gone and all(value is None for value in new) and not is_cleared:
        return lambda _owner, _filling: _nothing
    # A key may be a number of this call, or have one in it.
    known = set(map(id, kept.before))
    keys = [Constant(key) if id(key) in known else templates.of(key, what) for key in now]

    def prepare(owner: dict[Any, Any], filling: Filling) -> Callable[[], None]:
        kind = dict_kind(owner)
        filled = [None if template is None else (template.fill(filling),) for template in new]
        order = [key.fill(filling) for key in keys]

        def write() -> None:
            if is_cleared:
                kind.clear(owner)
            for key in gone:
                kind.pop(owner, key, None)
            for index, (key, value) in enumerate(zip(order, filled, strict=True)):
                before = kind.pop(owner, key, None) if has_moved and index >= num_in_place else None
                if value is not None or (has_moved and index >= num_in_place):
                    kind.__setitem__(owner, key, before if value is None else value[0])

        return write

    return prepare


def _nothing() -> None:
    """No change after all."""


def _is_of_torch(place: Place) -> bool:
    """Whether attributes are those of one of torch's own layers."""
    return place.parent is not None and type(place.parent.value).__module__.startswith("torch.nn.modules")


def _gives(template: Template, before: Any) -> bool:
    """Whether a template only makes again what is there: `nn.LSTM` gathers its weights in a list anew."""
    if isinstance(template, FromSlot):
        return isinstance(template.where, FixedTensor) and template.where.tensor is before
    if isinstance(template, Built) and type(before) is list and template.items is not None:
        return len(before) == len(template.items) and all(
            _gives(item, old) for (_, item), old in zip(template.items, before, strict=True)
        )
    if isinstance(template, Converted) and isinstance(before, weakref.ref):
        return _gives(template.parts[0], before())
    return False


def _attributes_change(kept: Kept, templates: Templates, what: str) -> Prepare:
    """Slots of an object, or attributes of a class."""
    now = content_of(kept.owner)
    setter: Callable[..., None] = type.__setattr__ if isinstance(kept.owner, type) else object.__setattr__
    gone = [name for name in kept.before if now.get(name, ABSENT) is ABSENT and kept.before[name] is not ABSENT]
    new = [
        (name, templates.of(value, what) if value is not ABSENT else Constant(ABSENT))
        for name, value in now.items()
        if value is not ABSENT and (name in kept.keys or kept.before.get(name, ABSENT) is not value)
    ]

    def prepare(owner: Any, filling: Filling) -> Callable[[], None]:
        filled = [(name, template.fill(filling)) for name, template in new]

        def write() -> None:
            for name in gone:
                (type.__delattr__ if isinstance(owner, type) else object.__delattr__)(owner, name)
            for name, value in filled:
                setter(owner, name, value)

        return write

    return prepare
