"""Functions of the step that draw in Python and compute with what they have drawn: each is one draw.

    mask = spans(batch.shape, 0.05)     draws from NumPy, loops, branches; an array comes out
    mask = torch.tensor(mask)           the graph's input

Nothing of this can be told in lines of arithmetic. But a function that is given plain values and neither touches a
tensor nor writes to anything that was there before may run again at each call as it is, before the graph, in its place
among the other draws. That it is one comes out when the step computes with something drawn: the trace is made again,
and calls of the function that has drawn it are noted whole (`DrawsWhole`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from types import CodeType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from wholestep.capture import source
from wholestep.capture.record import early_arrays, numbers
from wholestep.capture.record.again import DrawsWhole
from wholestep.capture.record.places import CONTAINERS, Expectation, Rooted, Step, is_open, is_plain
from wholestep.errors import CaptureError

if TYPE_CHECKING:
    from wholestep.capture.record.recorder import Recorder

_ADVICE = "Draw with torch, or outside the step"
_NOT_WHOLE = "not whole"
"""Stands before the key of a function that has turned out to be more than a draw."""
_DRAWS = object()
"""The root of paths to draws: the step's first, its second, ..."""


class Draws:
    """Counts the draws of a trace, and knows which of them are taken as they are: others need another graph."""

    def __init__(self, fixed: Iterable[tuple[Any, ...]], *, may_fix: bool) -> None:
        """`fixed` are paths, some of draws; without `may_fix`, as all ranks run one graph, none can be fixed."""
        self.number = 0
        self._may_fix = may_fix
        self._fixed = {path[-1][1] for path in fixed if path[0] == Rooted(_DRAWS)}

    def next(self) -> int:
        self.number += 1
        return self.number - 1

    def is_fixed(self, index: int) -> bool:
        return index in self._fixed

    def paths_of(self, ledger: numbers.Ledger, names: Iterable[str]) -> frozenset[tuple[Any, ...]]:
        """The paths of what some names in the ledger stand for: what is read, and what is drawn if it can be fixed."""
        leaves, drawn = ledger.leaves, ledger.drawn if self._may_fix else {}
        places = [leaves[name] for name in names if name in leaves]
        return frozenset([*places, *((Rooted(_DRAWS), (Step.ITEM, drawn[name])) for name in names if name in drawn)])


def drawn(recorder: Recorder, text: str, value: Any) -> Any:
    """What the step is given for a value that a line of the ledger draws; `REFUSED` if it cannot be drawn again.

    A number is a `Number`, or itself where torch has asked for it before.
    """
    ledger = recorder.ledger
    number, is_fixed = named(recorder, text, value)
    name = numbers.name_of(number)
    if numbers.is_real(value):
        ledger.assume(f"type({name}) is {ledger.constant(type(value))}")
        number = numbers.Number(ledger, name, value, frozenset([name]))
        return numbers.settled(number) if is_fixed else number
    if isinstance(value, np.ndarray):
        if key_of(recorder.calling_frame().f_code) in recorder.whole_draws:  # which cannot be one draw
            return early_arrays.early(recorder, value, name, frozenset([name]))
        note(recorder, value, number)
        return value
    if type(value) is list and all(numbers.is_real(one) or is_plain(one) for one in value):
        return _listed(recorder, name, value, is_fixed=is_fixed)
    if not is_plain(value):
        return REFUSED
    ledger.assume(f"same({name}, {ledger.constant(value)})")
    return value


def _listed(recorder: Recorder, name: str, values: list[Any], *, is_fixed: bool) -> list[Any]:
    """The items of a list that is drawn."""
    ledger, items = recorder.ledger, list[Any]()
    ledger.assume(f"len({name}) == {len(values)}")
    for index, value in enumerate(values):
        item = ledger.computed(f"{name}[{index}]", value, frozenset([name]))
        if numbers.is_real(value):
            ledger.assume(f"type({numbers.name_of(item)}) is {ledger.constant(type(value))}")
            items.append(numbers.settled(item) if is_fixed else item)
        else:
            ledger.assume(f"same({numbers.name_of(item)}, {ledger.constant(value)})")
            items.append(value)
    return items


def named(recorder: Recorder, text: str, value: Any) -> tuple[numbers.Number, bool]:
    """A line that draws something, and whether that is to be taken as it is."""
    index = recorder.draws.next()
    number = recorder.ledger.computed(text, value)
    recorder.ledger.drawn[numbers.name_of(number)] = index
    return number, recorder.draws.is_fixed(index)


REFUSED = object()


def key_of(code: CodeType) -> tuple[Any, ...]:
    """A function's code by where it stands, instrumented or not."""
    return code.co_filename, code.co_firstlineno, code.co_qualname


def note(recorder: Recorder, array: Any, number: numbers.Number) -> None:
    """An array was drawn, and has a name in the ledger."""
    name = numbers.name_of(number)
    recorder.drawn_arrays[id(array)] = array, name
    recorder.drawers[name] = key_of(recorder.calling_frame().f_code)


def refuse_array(recorder: Recorder, array: Any, what: str) -> None:
    """The step does something with an array that it has drawn: the function that drew it may be one draw."""
    _, name = recorder.drawn_arrays[id(array)]
    refuse(recorder, recorder.drawers[name], f"{what} an array that it has drawn", _ADVICE)


def refuse(recorder: Recorder, drawer: tuple[Any, ...], what: str, advice: str) -> None:
    """What a function has drawn, or is going to, can only be drawn again with all that the function does."""
    if drawer not in recorder.whole_draws:
        raise DrawsWhole(drawer)
    recorder.refuse(what, advice)


def require_whole(recorder: Recorder) -> None:
    """A function writes what it has drawn to an array of its own: its call may be one draw, or its arrays early."""
    drawer = key_of(recorder.calling_frame().f_code)
    if drawer not in recorder.whole_draws:
        raise DrawsWhole(drawer)


def without_failures(whole_draws: frozenset[tuple[Any, ...]]) -> frozenset[tuple[Any, ...]]:
    """The functions that were to be one draw, whatever has become of that."""
    return frozenset(drawer for drawer in whole_draws if drawer[0] != _NOT_WHOLE)


def require_more_than_draws(recorder: Recorder) -> None:
    """A function that was to be one draw does what cannot be done before the graph: traced again without that."""
    if recorder.is_drawing is not None:
        raise DrawsWhole((_NOT_WHOLE, *recorder.is_drawing))


def whole_call(recorder: Recorder, function: FunctionType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What to call in place of a function that is one draw; None if it is none, with these arguments."""
    key = key_of(function.__code__)
    is_one = key in recorder.whole_draws and (_NOT_WHOLE, *key) not in recorder.whole_draws
    if recorder.is_drawing or not is_one or function.__closure__:
        return None
    given = (*args, *kwargs.values())
    if not all(_is_repeatable(value) or _is_outside(recorder, value) for value in given):
        return None
    return functools.partial(_draw_whole, recorder, function)


def refused_where_fixed(values: Sequence[Any]) -> CaptureError:
    """Torch takes a number as it is, for good, where a step gives it one that is drawn, or that the graph computes."""
    is_late = any(map(numbers.is_late, values))
    what = "a number that it has computed" if is_late else "a draw"
    return CaptureError(
        f"the step uses {what} where torch needs a fixed number",
        location=source.current_location(),
        advice="Keep it a tensor (x.detach() instead of x.item()), where torch takes one"
        if is_late
        else "Draw outside the step and pass what was drawn",
    )


def _is_repeatable(value: Any) -> bool:
    if type(value) in (tuple, torch.Size):
        return all(map(_is_repeatable, value))
    return is_plain(value) or type(value) is torch.SymInt or (numbers.is_number(value) and not numbers.is_late(value))


def whole_method(recorder: Recorder, method: MethodType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The same for a method of the user's."""
    if not isinstance(method.__func__, FunctionType):
        return None
    made = whole_call(recorder, method.__func__, (method.__self__, *args), kwargs)
    return None if made is None else functools.partial(made, method.__self__)


def _is_outside(recorder: Recorder, value: Any) -> bool:
    """Whether a value is an object of the user's (`self`), which is found at each call as it is then."""
    is_object = not isinstance(value, (*CONTAINERS, np.ndarray, torch.Tensor, type)) and not is_plain(value)
    return is_object and (isinstance(value, torch.nn.Module) or is_open(value)) and recorder.place_of(value) is not None


def _told(recorder: Recorder, value: Any) -> str:
    """How a line spells what a function that draws is given."""
    place = recorder.place_of(value)
    if not _is_outside(recorder, value) or place is None or place.expectation is Expectation.SAME:
        return recorder.ledger.constant(value)
    return recorder.ledger.object_leaf(place.path)


def _draw_whole(recorder: Recorder, function: FunctionType, *args: Any, **kwargs: Any) -> Any:
    before = _deeds(recorder)
    values = tuple(map(_settled, args))
    named_values = {name: _settled(value) for name, value in kwargs.items()}
    recorder.follow(function)
    recorder.read_defaults(function)
    written, num_lines = recorder.kept, len(recorder.ledger.lines)
    recorder.is_drawing, recorder.kept = key_of(function.__code__), _Unread(recorder)
    try:
        result = numbers.settled(function(*values, **named_values))
    finally:
        after = _deeds(recorder)
        written |= recorder.kept
        key, recorder.is_drawing, recorder.kept = recorder.is_drawing, None, written
    if after != before or len(recorder.ledger.lines) != num_lines:  # it needs the value of a number that changes
        raise DrawsWhole((_NOT_WHOLE, *key))
    recorder.num_deeds += 1
    ledger = recorder.ledger
    told = [_told(recorder, value) for value in values]
    told += [f"{key}={_told(recorder, value)}" for key, value in named_values.items()]
    text = f"{ledger.constant(function)}({', '.join(told)})"
    if (given := drawn(recorder, text, result)) is REFUSED:
        raise DrawsWhole((_NOT_WHOLE, *key))
    return given


def _deeds(recorder: Recorder) -> tuple[int, ...]:
    return recorder.num_deeds, len(recorder.kept), len(recorder.outputs)


class _Unread(dict[int, Any]):
    """What the step has written to until now: the function that draws must not read it, as it runs before the graph."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(recorder.kept)
        self._recorder = recorder

    def __contains__(self, key: object) -> bool:
        return self.get(key) is not None

    def get(self, key: Any, default: Any = None) -> Any:
        kept = super().get(key, default)
        if kept is not None and (kept.was_written or kept.has_changed()):
            require_more_than_draws(self._recorder)
        return kept


def _settled(value: Any) -> Any:
    """The value itself: a size is pinned, a number taken for granted."""
    if type(value) in (tuple, torch.Size):
        return tuple(map(_settled, value))
    return int(value) if type(value) is torch.SymInt else numbers.settled(value)
