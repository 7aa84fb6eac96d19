"""Values that a step leaves behind or returns, as templates: made anew at each call from that call's results.

    self.seen.append({"loss": loss.detach(), "epoch": epoch})

leaves a dict of a computed tensor and a number. Its template is a dict of `Computed(3)` and `Numeric("a0")`.
"""

from __future__ import annotations

import collections
import enum
import functools
import types
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from wholestep import _memory_torch, _torch
from wholestep.capture.entries import Entries
from wholestep.capture.record.again import AsksBefore
from wholestep.capture.record.arrays import LateArray, LateObject, array_of
from wholestep.capture.record.early_arrays import EarlyArray
from wholestep.capture.record.numbers import Number, is_late, name_of
from wholestep.capture.record.places import ABSENT, Expectation, Place, Step, find, is_open, is_plain, slot_names, take
from wholestep.capture.record.standins import is_stand_in
from wholestep.capture.record.state import dict_kind
from wholestep.capture.record.texts import is_marked, is_taken_apart, pieces
from wholestep.errors import CaptureError

if TYPE_CHECKING:
    from wholestep.capture.binding import Binding
    from wholestep.capture.record.quiet_texts import QuietTexts


@dataclass
class Filling:
    """What templates are filled with: the graph's outputs, the call, its numbers; objects already made in this call."""

    outputs: tuple[Any, ...]
    leaves: list[Any]
    numbers: dict[str, Any]
    call: Any = None
    made: dict[int, Any] = field(default_factory=dict[int, Any])


class Template:
    """A value of each call."""

    __slots__ = ()

    def fill(self, filling: Filling) -> Any:
        raise NotImplementedError


Items = tuple[tuple[Template, Template], ...]
"""Keys of a dict, or positions in a sequence, and what stands there."""


@dataclass(frozen=True, slots=True)
class Constant(Template):
    """The same object after every call."""

    value: Any

    def fill(self, filling: Filling) -> Any:
        return self.value


@dataclass(frozen=True, slots=True)
class Numeric(Template):
    """A number that is computed at each call."""

    name: str

    def fill(self, filling: Filling) -> Any:
        return filling.numbers[self.name]


@dataclass(frozen=True, slots=True)
class Text(Template):
    """Text made of numbers that the graph computes: pieces, and whether each is the name of one."""

    pieces: tuple[tuple[str, bool], ...]

    def fill(self, filling: Filling) -> Any:
        return "".join([filling.numbers[piece] if is_name else piece for piece, is_name in self.pieces])


@dataclass(frozen=True, slots=True)
class Computed(Template):
    """A tensor (or size) that the graph computes: its position among the graph's outputs."""

    index: int

    def fill(self, filling: Filling) -> Any:
        return filling.outputs[self.index]


@dataclass(frozen=True, slots=True)
class FromSlot(Template):
    """What a slot holds: a parameter, an argument handed through, a learning rate."""

    where: Binding

    def fill(self, filling: Filling) -> Any:
        return self.where.read(filling.leaves)


@dataclass(frozen=True, slots=True)
class ViewOfSlot(Template):
    """A view of a parameter or another input: it shares its memory, as in eager, maybe as numbers of another kind."""

    where: Binding
    form: _memory_torch.Form

    def fill(self, filling: Filling) -> Any:
        return _memory_torch.memory_as(self.where.read(filling.leaves).detach(), self.form)


@dataclass(frozen=True, slots=True)
class Existing(Template):
    """An object that was there before the step."""

    path: tuple[Any, ...]

    def fill(self, filling: Filling) -> Any:
        return find(self.path, filling.call)


@dataclass(frozen=True, slots=True)
class Built(Template):
    """An object that the step makes: `make()` gives an empty one, `parts` are what is put in.

    One that stands in several places is made once (`number`).
    """

    number: int
    make: Callable[[], Any]
    items: Items | None
    attributes: tuple[tuple[str, Template], ...]

    def fill(self, filling: Filling) -> Any:
        known = filling.made.get(self.number)
        if known is not None:
            return known
        built = filling.made[self.number] = self.make()
        _put_items(built, self.items, filling)
        for name, template in self.attributes:
            object.__setattr__(built, name, template.fill(filling))
        return built


@dataclass(frozen=True, slots=True)
class Converted(Template):
    """An object that cannot be filled after it is made (a tuple): made from a filled list, or from arguments."""

    number: int
    make: Callable[..., Any]
    parts: tuple[Template, ...]

    def fill(self, filling: Filling) -> Any:
        if self.number not in filling.made:
            filling.made[self.number] = self.make(*[part.fill(filling) for part in self.parts])
        return filling.made[self.number]


@dataclass(frozen=True, slots=True)
class Again(Template):
    """An object that is being made just now: it holds one that leads back to it."""

    number: int

    def fill(self, filling: Filling) -> Any:
        return filling.made[self.number]


def _put_items(built: Any, items: Items | None, filling: Filling) -> None:
    if items is None:
        return
    if isinstance(built, dict):
        kind = dict_kind(built)
        for key, template in items:
            kind.__setitem__(built, key.fill(filling), template.fill(filling))
    elif isinstance(built, set):
        set.update(built, [template.fill(filling) for _, template in items])  # pyright: ignore[reportUnknownMemberType]
    else:
        base: Any = list if isinstance(built, list) else collections.deque
        base.extend(built, [template.fill(filling) for _, template in items])  # pyright: ignore[reportUnknownMemberType]


class Templates:
    """Makes templates of the values of one trace.

    `place_of` tells where an object was found; `slot_of` the binding of a traced input, `base_of` that of the
    one that a traced view looks at; `computed` makes a traced value
    one of the graph's outputs and returns its position. `drawn_tensor` gives the traced value of a tensor made of an
    array that the step has drawn, None for others; `drawn` has the names of those arrays, and of what stands at places
    that are drawn, by their ids. `texts` are those among the arguments that may be others at each call.
    """

    def __init__(
        self,
        place_of: Callable[[Any], Place | None],
        slot_of: Callable[[Any], Binding | None],
        base_of: Callable[[torch.Tensor], Binding | None],
        computed: Callable[[Any], int],
        drawn_tensor: Callable[[Any], torch.Tensor | None],
        drawn: Mapping[int, str],
        texts: QuietTexts,
    ) -> None:
        self._place_of = place_of
        self._slot_of = slot_of
        self._base_of = base_of
        self._computed = computed
        self._drawn_tensor = drawn_tensor
        self._drawn = drawn
        self._texts = texts
        self._known: dict[int, Template | None] = {}
        self._alive: list[Any] = []
        self.numbers: set[str] = set()
        """Names of the changing numbers in templates that are known before the graph runs."""
        self.late_numbers: set[str] = set()
        """Names of those that it computes."""

    def of(self, value: Any, what: str) -> Template:
        """The template of a value; raises `CaptureError` if it cannot be made again. `what` says whose it is."""
        template = self._of(value, what)
        if isinstance(template, Constant) and is_stand_in(_behind(template.value)):
            raise CaptureError(
                f"{what} something that stands in for a value while it is traced ({type(value).__name__})",
                advice="Make it outside the step",
            )
        return template

    def _of(self, value: Any, what: str) -> Template:
        if type(value) is Number:
            (self.late_numbers if is_late(value) else self.numbers).add(name_of(value))
            return Numeric(name_of(value))
        if isinstance(value, torch.SymBool):
            raise AsksBefore
        if id(value) in self._drawn:
            self.numbers.add(self._drawn[id(value)])
            return Numeric(self._drawn[id(value)])
        if isinstance(value, (torch.Tensor, torch.SymInt, torch.SymFloat)):
            return self._tensor(value)
        if type(value) is EarlyArray:
            self.numbers.add(value.name)
            return Numeric(value.name)
        if type(value) in (LateArray, LateObject):
            return self._array(value, what)
        if is_taken_apart(value):
            raise CaptureError(
                f"{what} text made of the text of a value which is only known when the step runs",
                advice="Return the number, and make the text after the call",
            )
        if is_marked(value):
            parts = tuple(pieces(value))
            self.late_numbers |= {piece for piece, is_name in parts if is_name}
            return Text(parts)
        if (path := self._texts.path_of(value)) is not None:
            return Existing(path)
        place = self._place_of(value)
        if place is None and is_plain(value) and not _has_text(value) and not self._texts.among(value):
            return Constant(value)
        if place is not None:
            return Constant(value) if place.expectation is Expectation.SAME else Existing(place.path)
        if id(value) in self._known:
            known = self._known[id(value)]
            if known is None:
                raise CaptureError(f"{what} a tuple that leads back to itself", advice="Use a list")
            return known
        self._alive.append(value)
        template = self._known[id(value)] = self._built(value, what)
        return template

    def _tensor(self, value: Any) -> Template:
        drawn = self._drawn_tensor(value)
        if drawn is not None:
            return Computed(self._computed(drawn))
        where = self._slot_of(value)
        if where is not None:
            return FromSlot(where)
        if isinstance(value, torch.Tensor) and not _torch.is_traced(value):
            place = self._place_of(value)
            return Constant(value) if place is None else Existing(place.path)
        if isinstance(value, torch.Tensor) and (base := self._base_of(value)) is not None:
            geometry = (*value.shape, *value.stride(), value.storage_offset())
            if all(type(number) is int for number in geometry) and not _torch.given_attributes(value):
                return ViewOfSlot(base, _memory_torch.form_of(value))
        if isinstance(value, torch.Tensor):
            refuse_attributes(value)
        return Computed(self._computed(value))

    def _array(self, array: Any, what: str) -> Template:
        about = array.late
        if about.tensor is None:
            name = about.ledger.name(array)
            if any(memory.tensor is not None and self._is_of_slot(memory.tensor) for memory in about.seen):
                raise CaptureError(
                    f"{what} a view of an array of a parameter, a buffer or an argument",
                    advice="Copy it: array[...].copy()",
                )
            self.late_numbers.add(name)
            return Numeric(name)
        known = self._known.get(id(array))
        if known is None:
            self._alive.append(array)
            known = Converted(len(self._known), array_of, (self._tensor(about.tensor),))
            self._known[id(array)] = known
        return known

    def _is_of_slot(self, tensor: torch.Tensor) -> bool:
        return self._slot_of(tensor) is not None or self._base_of(tensor) is not None

    def _built(self, value: Any, what: str) -> Template:
        number = len(self._known)
        value = value.plain() if type(value) is Entries else value
        is_ready = is_open(value) and not isinstance(value, (tuple, frozenset, types.MethodType))
        self._known[id(value)] = Again(number) if is_ready else None  # in a ring of objects; replaced below
        if isinstance(value, (tuple, frozenset)):
            parts = tuple(self.of(part, what) for part in value)
            return Converted(number, functools.partial(_from_parts, type(value)), parts)
        if isinstance(value, weakref.ref):
            return Converted(number, weakref.ref, (self.of(value(), what),))
        if type(value) is types.MethodType:
            return Converted(
                number, functools.partial(types.MethodType, value.__func__), (self.of(value.__self__, what),)
            )
        if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)) or not (
            is_open(value) and type(value) not in (functools.partial, types.CellType)
        ):
            return self._opaque(number, value, what)
        items = None
        if isinstance(value, dict):
            items = tuple((self.of(key, what), self.of(item, what)) for key, item in value.items())
        elif isinstance(value, (list, set, collections.deque)):
            items = tuple((Constant(index), self.of(item, what)) for index, item in enumerate(value))
        attributes = [(name, item) for name, item in getattr(value, "__dict__", {}).items()]
        attributes += [
            (name, item)
            for name in slot_names(type(value))
            if (item := take(value, Step.ATTRIBUTE, name)) is not ABSENT
        ]
        return Built(
            number,
            _empty(value),
            items,
            tuple((name, self.of(item, what)) for name, item in attributes if name not in ("__dict__", "__weakref__")),
        )

    def _opaque(self, number: int, value: Any, what: str) -> Template:
        if isinstance(value, (types.BuiltinFunctionType, types.ModuleType, type, enum.Enum)):
            return Constant(value)
        if isinstance(value, np.ndarray) and value.dtype != object:
            return Converted(number, functools.partial(np.array, value.copy()), ())
        raise CaptureError(
            f"{what} a {type(value).__name__} that the step has made, which cannot be made again at each call",
            advice="Make it outside the step",
        )


def refuse_attributes(tensor: torch.Tensor) -> None:
    """A tensor that the step has computed outlives it: it would be another one, without what the step gave to it."""
    for name in _torch.given_attributes(tensor):
        raise CaptureError(
            f"the step gives an attribute '{name}' to a tensor that it has computed",
            advice="Return it beside the tensor, or keep it in an object of its own",
        )


def _has_text(value: Any) -> bool:
    """Whether text of numbers is among what a plain value holds."""
    if isinstance(value, (tuple, frozenset)):
        return any(map(_has_text, value))  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    return is_marked(value) or is_taken_apart(value)


def _behind(value: Any) -> Any:
    """What a method of C code is bound to; other values as they are."""
    return value.__self__ if isinstance(value, types.BuiltinFunctionType) else value


def _from_parts(kind: type, *parts: Any) -> Any:
    if hasattr(kind, "_make"):
        return kind._make(parts)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownVariableType]
    return kind(parts)


def _empty(value: Any) -> Callable[[], Any]:
    kind: Any = type(value)
    if isinstance(value, collections.deque):
        return (
            functools.partial(collections.deque, (), value.maxlen)
            if kind is collections.deque
            else (
                lambda: kind.__new__(kind)  # pyright: ignore[reportUnknownLambdaType]
            )
        )
    if isinstance(value, collections.defaultdict):
        if value.default_factory is Entries:  # pyright: ignore[reportUnknownMemberType]
            return functools.partial(kind, dict)
        return functools.partial(kind, value.default_factory)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return functools.partial(kind.__new__, kind)
