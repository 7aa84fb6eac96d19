"""What a step leaves in the user's objects: found by comparing them with what they were, done again at each call.

Only the last state counts, since nobody looks while the step runs. Lists, sets and deques are changed by the calls that
the step made (`append`, `pop`, ...), so that what was in them before need not be known; everything else by key.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import CellType
from typing import Any

import numpy as np

from wholestep.capture.binding import FixedTensor
from wholestep.capture.record.outside import Output
from wholestep.capture.record.places import ABSENT, Place, find
from wholestep.capture.record.state import Kept, apply_operation, content_of, dict_kind
from wholestep.capture.record.templates import Built, Constant, Converted, Filling, FromSlot, Template, Templates
from wholestep.errors import CaptureError


@dataclass(frozen=True)
class Change:
    """What happens to one owner behind each call."""

    name: str
    path: tuple[Any, ...]
    apply: Callable[[Any, Filling], None]


@dataclass(frozen=True)
class Effects:
    """Everything that Python does besides the graph: output and changes of owners, in order."""

    outputs: tuple[tuple[Callable[..., Any], tuple[Template, ...], dict[str, Template]], ...] = ()
    changes: tuple[Change, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.outputs or self.changes)

    def perform(self, filling: Filling) -> None:
        """Do it all with the values of one call."""
        owners = [find(change.path, filling.call) for change in self.changes]
        for change, owner in zip(self.changes, owners, strict=True):
            change.apply(owner, filling)
        for function, args, kwargs in self.outputs:
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
        if place is not None and item.has_changed():
            changes.append(Change(str(place), place.path, _change(item, place, templates)))
    said = [
        (
            output.function,
            tuple(templates.of(arg, "the step prints") for arg in output.args),
            {name: templates.of(value, "the step prints") for name, value in output.kwargs.items()},
        )
        for output in outputs
    ]
    return Effects(tuple(said), tuple(changes))


def _change(kept: Kept, place: Place, templates: Templates) -> Callable[[Any, Filling], None]:
    owner, what = kept.owner, f"the step keeps in '{place}'"
    if isinstance(owner, np.ndarray):
        content = owner.copy()
        return lambda array, _: np.copyto(array, content)
    if isinstance(owner, CellType):
        template = templates.of(owner.cell_contents, what)
        return lambda cell, filling: setattr(cell, "cell_contents", template.fill(filling))
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

    def apply(sequence: Any, filling: Filling) -> None:
        for name, args in operations:
            apply_operation(sequence, name, tuple(arg.fill(filling) for arg in args))

    return apply


def _dict_change(kept: Kept, place: Place, templates: Templates, what: str) -> Callable[[Any, Filling], None]:
    now: dict[Any, Any] = dict(kept.owner)
    gone = [key for key in kept.before if key not in now]
    new = [(key, templates.of(value, what)) for key, value in now.items() if kept.before.get(key, ABSENT) is not value]
    new = [(key, template) for key, template in new if not _gives(template, kept.before.get(key, ABSENT))]
    if [key for key in kept.before if key in now] + [key for key in now if key not in kept.before] != list(now):
        raise CaptureError(
            f"the step changes the order of '{place}'", advice="Remove and add items outside the step"
        )

    def apply(owner: dict[Any, Any], filling: Filling) -> None:
        kind = dict_kind(owner)
        for key in gone:
            kind.pop(owner, key, None)
        for key, template in new:
            kind.__setitem__(owner, key, template.fill(filling))

    return apply


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


def _attributes_change(kept: Kept, templates: Templates, what: str) -> Callable[[Any, Filling], None]:
    """Slots of an object, or attributes of a class."""
    now = content_of(kept.owner)
    setter: Callable[..., None] = type.__setattr__ if isinstance(kept.owner, type) else object.__setattr__
    gone = [name for name in kept.before if now.get(name, ABSENT) is ABSENT and kept.before[name] is not ABSENT]
    new = [
        (name, templates.of(value, what) if value is not ABSENT else Constant(ABSENT))
        for name, value in now.items()
        if value is not ABSENT and kept.before.get(name, ABSENT) is not value
    ]

    def apply(owner: Any, filling: Filling) -> None:
        for name in gone:
            (type.__delattr__ if isinstance(owner, type) else object.__delattr__)(owner, name)
        for name, template in new:
            setter(owner, name, template.fill(filling))

    return apply
