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
from collections.abc import Sequence
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from wholestep.capture import source
from wholestep.capture.record import numbers
from wholestep.capture.record.again import DrawsWhole
from wholestep.capture.record.places import is_plain
from wholestep.errors import CaptureError

if TYPE_CHECKING:
    from wholestep.capture.record.recorder import Recorder

_ADVICE = "Draw with torch, or outside the step"


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


def whole_call(recorder: Recorder, function: FunctionType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What to call in place of a function that is one draw; None if it is none, with these arguments."""
    if recorder.is_drawing or key_of(function.__code__) not in recorder.whole_draws or function.__closure__:
        return None
    if not all(map(_is_repeatable, (*args, *kwargs.values()))):
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


def _draw_whole(recorder: Recorder, function: FunctionType, *args: Any, **kwargs: Any) -> Any:
    before = _deeds(recorder)
    values = tuple(map(_settled, args))
    named = {name: _settled(value) for name, value in kwargs.items()}
    recorder.follow(function)
    recorder.read_defaults(function)
    written = recorder.kept
    recorder.is_drawing, recorder.kept = True, _Unread(recorder, function.__name__)
    try:
        result = numbers.settled(function(*values, **named))
    finally:
        after = _deeds(recorder)
        written |= recorder.kept
        recorder.is_drawing, recorder.kept = False, written
    if after != before:
        recorder.refuse(f"writes to objects or prints in {function.__name__}, which draws", "Do so outside of it")
    recorder.num_deeds += 1
    ledger = recorder.ledger
    told = [ledger.constant(value) for value in values]
    told += [f"{name}={ledger.constant(value)}" for name, value in named.items()]
    text = f"{ledger.constant(function)}({', '.join(told)})"
    if numbers.is_real(result):
        return ledger.computed_alike(text, result)
    number = ledger.computed(text, result)
    if isinstance(result, np.ndarray):
        note(recorder, result, number)
    elif is_plain(result):
        ledger.assume(f"same({numbers.name_of(number)}, {ledger.constant(result)})")
    else:
        recorder.refuse(f"draws a {type(result).__name__} with {function.__name__}", "Return an array or a number")
    return result


def _deeds(recorder: Recorder) -> tuple[int, ...]:
    return recorder.num_deeds, len(recorder.kept), len(recorder.outputs)


class _Unread(dict[int, Any]):
    """What the step has written to until now: the function that draws must not read it, as it runs before the graph."""

    def __init__(self, recorder: Recorder, drawer: str) -> None:
        super().__init__(recorder.kept)
        self._recorder, self._drawer = recorder, drawer

    def __contains__(self, key: object) -> bool:
        return self.get(key) is not None

    def get(self, key: Any, default: Any = None) -> Any:
        kept = super().get(key, default)
        if kept is not None and (kept.was_written or kept.has_changed()):
            what = f"reads in {self._drawer}, which draws, what it has written before"
            self._recorder.refuse(what, "Draw before, and pass what was drawn")
        return kept


def _settled(value: Any) -> Any:
    """The value itself: a size is pinned, a number taken for granted."""
    if type(value) in (tuple, torch.Size):
        return tuple(map(_settled, value))
    return int(value) if type(value) is torch.SymInt else numbers.settled(value)
