"""Functions that compute with values of the graph as only their own code can tell: each call is one, made after it.

    wer += edit_distance(target, output)        loops and branches over what `.tolist()` gives
    print(json.dumps(stats))                    C code looks at each number

Where a step looks at a value, the functions that are running may be called later, as they are. That comes out as the
step is traced: the trace is made again, and calls of such a function are noted whole (`CallsLater`). A trial run with
this call's values shows whether that is safe, and what comes back. It must not touch a tensor, draw, or look into what
the step has written before; what it reads is no guard, as it runs at each call. If it is not safe, the trace is made
once more without, and the look is refused, or a function further out is tried (`NotWhole`).

One that returns nothing may print: it is said as one, in its place among what the step prints.
"""

from __future__ import annotations

import contextlib
import copy
import dis
import functools
import inspect
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from types import CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from wholestep import _torch
from wholestep.capture import source
from wholestep.capture.record import forms
from wholestep.capture.record.again import CallsLater, NotWhole
from wholestep.capture.record.arrays import LateArray
from wholestep.capture.record.drawing import key_of
from wholestep.capture.record.follow import is_of_torch
from wholestep.capture.record.late_values import finder, has_late, is_late_value
from wholestep.capture.record.numbers import Number
from wholestep.capture.record.outside import Output
from wholestep.capture.record.places import CONTAINERS, Expectation, Place, find, is_open, is_plain, slot_names, take
from wholestep.capture.record.places import Step as PlaceStep
from wholestep.capture.record.standins import is_number
from wholestep.capture.record.state import Kept, content_of
from wholestep.errors import CaptureError

if TYPE_CHECKING:
    from wholestep.capture.record.recorder import Recorder

_MOST_OWNERS = 20_000
_MOST_TRIALS = 12
_MOST_PARTS = 64
_NOT_PLAIN = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_INNER = ("<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>")
_LEFT_ALONE = (nn.Module, Optimizer, torch.Tensor, ModuleType)
"""What a function may be handed that does not look at tensors: those it must not touch."""


@dataclass
class WholeCalls:
    """What is known from earlier traces of functions that may be called later as a whole."""

    chosen: frozenset[tuple[Any, ...]] = frozenset()
    impossible: frozenset[tuple[Any, ...]] = frozenset()
    running: tuple[Any, ...] | None = None
    """The one that has a trial run just now."""
    current: Any = None
    """The call that is running, with its arguments (`recording.Current`)."""
    find: Callable[..., Any] = field(default=lambda: None)

    def with_chosen(self, key: tuple[Any, ...]) -> WholeCalls:
        return WholeCalls(self.chosen | {key}, self.impossible)

    def without(self, key: tuple[Any, ...]) -> WholeCalls:
        return WholeCalls(self.chosen - {key}, self.impossible | {key})

    def refuse_inside(self) -> None:
        """Something happens that must not, in a function that would be called later."""
        if self.running is not None:
            raise NotWhole(self.running)


# Which function it is


def escalate(recorder: Recorder) -> None:
    """A value is looked at: trace again with a function that is running called later, if there is one to try."""
    calls = recorder.whole_calls
    calls.refuse_inside()
    if not recorder.late.can_find() or len(calls.chosen | calls.impossible) >= _MOST_TRIALS:
        return
    frames = [frame for frame in _running() if recorder.followers.instrumenter.is_instrumented(frame.f_code)]
    candidates = [frame for frame in frames[:-1] if _may_be_whole(frame)]  # the last one is the step
    tried = calls.chosen | calls.impossible
    candidates = [frame for frame in candidates if key_of(frame.f_code) not in tried]
    if candidates:
        raise CallsLater(key_of(_outermost_of_library(candidates, frames).f_code))


def _running() -> Iterator[FrameType]:
    """Frames from here to where the trace begins."""
    frame: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None and frame.f_code.co_name != "_traced_run":
        yield frame
        frame = frame.f_back


def _outermost_of_library(candidates: list[FrameType], frames: list[FrameType]) -> FrameType:
    """The innermost function; of a library's, the one that the user has called."""
    chosen = candidates[0]
    if source.is_library_file(chosen.f_code.co_filename):
        for frame in frames[frames.index(chosen) :]:
            if not source.is_library_file(frame.f_code.co_filename):
                break
            chosen = frame if frame in candidates else chosen
    return chosen


def _may_be_whole(frame: FrameType) -> bool:
    code = frame.f_code
    if code.co_flags & _NOT_PLAIN or code.co_name in _INNER or is_of_torch(code.co_filename):
        return False
    count = code.co_argcount + code.co_kwonlyargcount
    given = [frame.f_locals.get(name) for name in code.co_varnames[:count]]
    return not any(map(_has_tensor, given))


def _has_tensor(value: Any, depth: int = 3) -> bool:
    if _torch.is_traced(value) or isinstance(value, (nn.Module, Optimizer)):
        return True
    is_deep = depth and isinstance(value, CONTAINERS) and not is_plain(value)
    parts = value.values() if isinstance(value, dict) else value
    return bool(is_deep) and any(_has_tensor(part, depth - 1) for part in parts)


# The call


def whole_call(recorder: Recorder, function: FunctionType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What to call in place of a function that is called later; None if it is none, or has nothing late to do."""
    calls = recorder.whole_calls
    if not calls.chosen or calls.running is not None or key_of(function.__code__) not in calls.chosen:
        return None
    if not has_late(args, kwargs):
        return None
    return functools.partial(_call_later, recorder, function)


def _call_later(recorder: Recorder, function: FunctionType, *args: Any, **kwargs: Any) -> Any:
    key = key_of(function.__code__)
    late = recorder.late
    if late.is_handled() or (function.__closure__ and recorder.place_of(function) is None):
        raise NotWhole(key)
    try:
        with recorder.deaf():
            trial = _Trial(recorder, function, args, kwargs)
        result = trial.run()
    except (CaptureError, Exception) as error:
        raise NotWhole(key) from error
    trial.require_unchanged()
    never_returns = _returns_nothing(_code_of(recorder, function))
    if result is None and never_returns:
        if trial.outputs:
            recorder.outputs.append(Said(function, args, kwargs, None, trial.key, trial.reached))
        return None
    if trial.outputs or trial.reads_written or not _is_handed_out(result):
        raise NotWhole(key)
    return late.noted_whole(trial.text(), result, trial.given)


@dataclass(frozen=True)
class Said(Output):
    """A call that prints, said in its place: behind all that the step writes."""

    key: tuple[Any, ...] = ()
    reached: tuple[tuple[Any, Any], ...] = ()
    """What it may read, and what that held then."""

    def as_said(self, recorder: Recorder) -> Output:
        for owner, content in self.reached:
            kept = recorder.kept.get(id(owner))
            if kept is not None and not _same_parts(content_of(owner), kept.before if content is None else content):
                raise NotWhole(self.key)
        return Output(self.function, self.args, self.kwargs)


class _Trial:
    """One call, tried out with the values of this call."""

    def __init__(
        self, recorder: Recorder, function: FunctionType, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.recorder, self.function = recorder, function
        self.key = key_of(function.__code__)
        self.given: tuple[Any, Any] = (args, kwargs)
        self.outputs = False
        self._spelled = [self._spell(arg) for arg in args]
        self._spelled += [f"{name}={self._spell(arg)}" for name, arg in kwargs.items()]
        owners = [*_reached(recorder, function, (args, kwargs))]
        kept = recorder.kept
        self.reads_written = any(id(owner) in kept and _is_changed(kept[id(owner)]) for owner in owners)
        self.reached = tuple((owner, content_of(owner) if id(owner) in kept else None) for owner in owners)

    def text(self) -> str:
        """The line that makes the call."""
        return f"{self.recorder.late.constant(self.function)}({', '.join(self._spelled)})"

    def run(self) -> Any:
        """What the call gives now; all that it does is undone."""
        recorder = self.recorder
        self._found = finder(self.given)()
        args, kwargs = self._values = _read_only(self._found)
        self._before = _shape_of(self._values)
        num_outputs = len(recorder.outputs)
        calls = recorder.whole_calls
        with _scratch(recorder) as kept:
            recorder.follow(self.function)
            recorder.read_defaults(self.function)
            calls.running = self.key
            try:
                result = self.function(*args, **kwargs)
                self.outputs = len(recorder.outputs) > num_outputs
                self._writes = any(map(_is_changed, kept.values()))
            finally:
                calls.running = None
        shares = [
            np.may_share_memory(a, b) for a in forms.arrays_in([*args, *kwargs.values()]) for b in _arrays(result)
        ]
        if any(shares):
            raise NotWhole(self.key)
        return _settled(result)

    def require_unchanged(self) -> None:
        """What it is given is made anew for it at each call: it must not write to that, nor to anything else."""
        if self._writes or _shape_of(self._values) != self._before:
            raise NotWhole(self.key)

    def _spell(self, value: Any) -> str:
        late = self.recorder.late
        if type(value) is LateArray:
            return f"{late.constant(_frozen)}({late.name(value)})"
        if type(value) is Number or is_late_value(value):
            return late.name(value)
        if _torch.is_traced(value) or isinstance(value, torch.Tensor):
            raise NotWhole(self.key)
        place = self.recorder.place_of(value)
        if place is not None:
            return self._spell_place(value, place)
        if isinstance(value, np.ndarray):
            return f"{late.constant(value.copy())}.copy()"
        if type(value) is dict:
            return f"{{{', '.join(f'{self._spell(key)}: {self._spell(part)}' for key, part in value.items())}}}"
        if type(value) in (list, tuple):
            parts = "".join(f"{self._spell(part)}, " for part in value)
            return f"[{parts}]" if type(value) is list else f"({parts})"
        if is_plain(value) or isinstance(value, (type, ModuleType)):
            return late.constant(value)
        if isinstance(value, FunctionType) and not value.__closure__:
            return late.constant(value)
        raise NotWhole(self.key)

    def _spell_place(self, value: Any, place: Place) -> str:
        late = self.recorder.late
        if place.expectation is Expectation.SAME:
            return late.constant(value)
        found = functools.partial(_found_now, place.path, self.recorder.whole_calls.current)
        return f"{late.constant(found)}()"


def _found_now(path: tuple[Any, ...], current: Any) -> Any:
    return find(path, current.call)


def _frozen(array: Any) -> Any:
    """An array that must not be written to: it may lie in the memory of a tensor."""
    view = array.view()
    view.flags.writeable = False
    return view


def _read_only(value: Any) -> Any:
    for array in forms.arrays_in([*value[0], *value[1].values()]):
        array.flags.writeable = False
    return value


def _shape_of(value: Any) -> Any:
    """What containers hold, however deep; arrays cannot be written to."""
    if type(value) is dict:
        return [(key, _shape_of(part)) for key, part in value.items()]
    return [*map(_shape_of, value)] if type(value) in (list, tuple) else id(value)


def _same_parts(now: Any, then: Any) -> bool:
    if isinstance(now, np.ndarray):
        return bool(np.array_equal(now, then))
    if isinstance(now, dict) and isinstance(then, dict):
        return len(now) == len(then) and all(then.get(key, now) is part for key, part in now.items())
    if isinstance(now, list) and isinstance(then, list):
        return len(now) == len(then) and all(a is b for a, b in zip(now, then, strict=True))
    return now is then


def _arrays(result: Any) -> Iterator[Any]:
    if issubclass(type(result), np.ndarray):
        yield result
    elif isinstance(result, CONTAINERS):
        for part in result.values() if isinstance(result, dict) else result:
            yield from _arrays(part)


def _is_handed_out(result: Any) -> bool:
    """Whether a result is made of plain values and arrays: another object may lead to what the call was given."""
    if type(result) in (list, tuple, dict, set, frozenset):
        parts = [*result.keys(), *result.values()] if type(result) is dict else result
        return all(map(_is_handed_out, parts))
    return is_plain(result) or (type(result) is np.ndarray and result.dtype != object)


def _settled(value: Any) -> Any:
    """A result with plain numbers."""
    if type(value) is Number:
        return value._value  # pyright: ignore[reportPrivateUsage]
    if type(value) is dict:
        return {key: _settled(part) for key, part in value.items()}
    return type(value)(map(_settled, value)) if type(value) in (list, tuple) else value


def _is_changed(kept: Kept) -> bool:
    return kept.was_written or kept.has_changed()


def _code_of(recorder: Recorder, function: FunctionType) -> CodeType:
    try:
        return recorder.followers.code_of(function)
    except KeyError:
        return function.__code__


def _returns_nothing(code: CodeType) -> bool:
    """Whether a function can only return None."""
    previous = None
    for instruction in dis.get_instructions(code):
        is_none = previous is not None and previous.opname == "LOAD_CONST" and previous.argval is None
        if instruction.opname == "RETURN_VALUE" and (instruction.is_jump_target or not is_none):
            return False
        if instruction.opname == "RETURN_CONST" and instruction.argval is not None:
            return False
        previous = instruction
    return True


# What it may read


def _reached(recorder: Recorder, function: FunctionType, given: Any) -> Iterator[Any]:
    """Owners from outside that a function may look into: through its arguments, and by the names in its code."""
    pending, seen = [*_globals_of(recorder, function, set()), *_items(given)], set[int]()
    while pending:
        part = pending.pop()
        if id(part) in seen or is_plain(part) or isinstance(part, _LEFT_ALONE):
            continue
        if is_number(part) or is_late_value(part):
            continue
        seen.add(id(part))
        if len(seen) > _MOST_OWNERS:
            raise NotWhole(key_of(function.__code__))
        yield part
        pending += _items(part)


def _items(part: Any) -> Iterable[Any]:
    if isinstance(part, dict):
        return [*part.keys(), *part.values()]
    if isinstance(part, CONTAINERS):
        return [*part]
    if type(part) is MethodType:
        return [part.__self__]
    if type(part) is functools.partial:
        return [part.func, *part.args, *part.keywords.values()]
    if isinstance(part, (type, FunctionType)) or not is_open(part):
        return []
    names = slot_names(type(part))
    inner = getattr(part, "__dict__", {})
    return [inner, *inner.values(), *(take(part, PlaceStep.ATTRIBUTE, name) for name in names)]


def _globals_of(recorder: Recorder, function: FunctionType, seen: set[CodeType]) -> Iterator[Any]:
    """What a function finds by name outside, and what the functions among that do."""
    code = _code_of(recorder, function)
    if code in seen or len(seen) > _MOST_PARTS:
        return
    seen.add(code)
    names = {*_names(code)}
    known = function.__globals__
    if id(known) in recorder.kept and recorder.kept[id(known)].keys & names:
        raise NotWhole(key_of(function.__code__))
    found = [known[name] for name in names if name in known]
    found += [cell.cell_contents for cell in function.__closure__ or () if _has_content(cell)]
    yield from function.__closure__ or ()
    for value in found:
        if isinstance(value, FunctionType):
            yield from _globals_of(recorder, value, seen)
        elif not isinstance(value, (type, ModuleType)):
            yield value


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _has_content(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


# The trial


@contextlib.contextmanager
def _scratch(recorder: Recorder) -> Generator[dict[int, Kept]]:
    """Let a recorder hear what is done, and forget it afterwards; all that was written is put back."""
    books = {name: copy.copy(value) for name, value in vars(recorder).items() if type(value) in (dict, list, set)}
    books |= {"num_deeds": recorder.num_deeds}
    books.pop("_alive")
    places = [(place, copy.copy(vars(place)), dict(place.children)) for place in _places(recorder.roots)]
    ledger = recorder.ledger
    lines, leaves = len(ledger.lines), dict(ledger.leaves)
    kept = recorder.kept = dict[int, Kept]()
    forget = recorder.followers.remembered()
    try:
        yield kept
    finally:
        forget()
        for one in reversed(kept.values()):
            one.restore()
        vars(recorder).update(books)
        for place, state, children in places:
            vars(place).update(state)
            place.children = children
        del ledger.lines[lines:]
        ledger.leaves = leaves


def _places(roots: Iterable[Place]) -> Iterator[Place]:
    pending = [*roots]
    while pending:
        place = pending.pop()
        yield place
        pending += place.children.values()
