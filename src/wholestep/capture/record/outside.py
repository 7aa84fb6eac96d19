"""Calls that reach past the step: draws from Python's and NumPy's generators, and output. Both happen again each time.

A draw that gives a number becomes a line of the ledger: `b_1 = generator.random()`. Output is kept as the call that it
is, with its arguments as templates, and made after the step has run.
"""

from __future__ import annotations

import collections
import concurrent.futures
import datetime
import functools
import logging
import random
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar, Token
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from wholestep import _recording_torch
from wholestep.capture import remedies, source
from wholestep.capture.record import drawing, late_calls, numbers, sequences
from wholestep.capture.record.early_arrays import EarlyArray
from wholestep.capture.record.follow import is_followed_file
from wholestep.capture.record.places import ABSENT, CONTAINERS, Step, is_plain, slot_names, take
from wholestep.errors import CaptureError

if TYPE_CHECKING:
    from wholestep.capture.record.calls import Handler
    from wholestep.capture.record.recorder import Recorder
    from wholestep.capture.record.state import Kept

_PROGRESS = ("update", "set_description", "set_description_str", "set_postfix", "set_postfix_str", "refresh", "close")
_IN_PLACE = ("shuffle",)
_ADVICE = "Draw outside the step and pass what was drawn, or draw with torch"


@dataclass(frozen=True)
class Output:
    """Something that the step said, and how it is said again: `function(*args, **kwargs)`."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    then: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    """The arguments as they were then, where containers among them are copies."""

    def as_said(self, recorder: Recorder) -> Output:
        """The same with what was said then, where the step has changed it afterwards."""
        owners = [value for value in (*self.args, *self.kwargs.values()) if has_changed(recorder, value)]
        if not owners or self.then is None:
            return self
        for owner in owners:
            recorder.read_deep(owner)
            if not isinstance(owner, CONTAINERS):
                recorder.refuse(f"changes a {type(owner).__name__} after it was printed", "Print it behind the step")
        return Output(self.function, *self.then)


def _is_touched(kept: Kept) -> bool:
    return kept.was_written or kept.has_changed()


def has_changed(recorder: Recorder, owner: Any) -> bool:
    """Whether the step has written to an owner, to what it holds, or to what it may read when it is shown."""
    seen: set[int] = set()
    pending = [owner]
    while pending:
        part = pending.pop()
        if id(part) in seen or is_plain(part) or isinstance(part, (torch.Tensor, torch.nn.Module, types.ModuleType)):
            continue
        seen.add(id(part))
        if id(part) in recorder.kept and _is_touched(recorder.kept[id(part)]):
            return True
        pending += _read_when_shown(recorder, part)
    return False


def _read_when_shown(recorder: Recorder, part: Any) -> Iterator[Any]:
    if isinstance(part, CONTAINERS):
        yield from part.values() if isinstance(part, dict) else part
    elif isinstance(part, types.CellType):
        yield take(part, Step.CELL, None)
    elif recorder.place_of(part) is not None and (namespace := recorder.namespace_of(part)) is not None:
        yield namespace
    for name in slot_names(type(part)):
        yield take(part, Step.ATTRIBUTE, name)
    for base in type(part).__mro__:
        for name in ("__str__", "__repr__", "__format__"):
            shown = vars(base).get(name)
            if isinstance(shown, types.FunctionType) and is_followed_file(shown.__code__.co_filename):
                yield from shown.__closure__ or ()
                known = shown.__globals__
                if id(known) in recorder.kept and recorder.kept[id(known)].keys & {*shown.__code__.co_names}:
                    yield known
                yield from (known[name] for name in shown.__code__.co_names if name in known)


# Draws


def save_generator(generator: Any) -> Callable[[], None]:
    """What puts a generator back to where it is now."""
    if isinstance(generator, random.Random):
        return functools.partial(generator.setstate, generator.getstate())
    if isinstance(generator, torch.Generator):
        stands = generator.get_state()
        return lambda: _put(generator, stands)
    if isinstance(generator, np.random.RandomState):
        state: Any = generator.get_state(legacy=False)
        return functools.partial(generator.set_state, state)
    bits: Any = generator.bit_generator if isinstance(generator, np.random.Generator) else generator
    state = bits.state
    return lambda: setattr(bits, "state", state)


def _put(generator: torch.Generator, state: torch.Tensor) -> None:
    generator.set_state(state)


def _make_generator(recorder: Recorder, kind: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A generator that the step makes for itself, from a seed: what it draws is the same at each call."""
    if not any(value is not None for value in (*args, *kwargs.values())):
        recorder.refuse(f"makes a {kind.__name__} without a seed", _ADVICE)

    def make(*args: Any, **kwargs: Any) -> Any:
        made = kind(*map(numbers.settled, args), **{name: numbers.settled(value) for name, value in kwargs.items()})
        recorder.own_generators[id(made)] = made
        return made

    return make


def _draw(recorder: Recorder, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    owner = function.__self__
    recorder.whole_calls.refuse_inside()
    if id(owner) in recorder.own_generators:
        for value in (*args, *kwargs.values()):
            recorder.read_deep(value)
            recorder.might_change(value)
        return functools.partial(_call_settled, function)
    if isinstance(owner, random.SystemRandom):
        recorder.refuse("draws from the operating system (random.SystemRandom)", _ADVICE)
    if recorder.place_of(owner) is None and owner not in _GLOBAL_GENERATORS:
        recorder.refuse(f"draws from a {type(owner).__name__} that it has made", _ADVICE)
    if recorder.is_drawing:
        writes = function.__name__ in _IN_PLACE or kwargs.get("out") is not None
        if writes and any(recorder.place_of(value) is not None for value in (*args, *kwargs.values())):
            drawing.require_more_than_draws(recorder)
        recorder.keep_generator(owner)
        return functools.partial(_call_settled, function)
    name = f"{type(function.__self__).__name__}.{function.__name__}()"
    if sequences.is_drawn_from(function, args, kwargs) and sequences.are_repeatable(args[1:]):
        return functools.partial(sequences.draw, recorder, function)
    if function.__name__ in _IN_PLACE and type(args[0]) is EarlyArray:
        recorder.keep_generator(owner)
        recorder.num_deeds += 1
        return lambda array: array.shuffled(function)
    if sequences.is_shuffled(recorder, function, args):
        return functools.partial(sequences.shuffle, recorder, function)
    if function.__name__ in _IN_PLACE:
        drawing.refuse(
            recorder, drawing.key_of(recorder.calling_frame().f_code), f"draws an order with {name}", _ADVICE
        )
    if not all(_is_repeatable(value) for value in (*args, *kwargs.values())):
        recorder.refuse(f"calls {name} with something that the step has computed", _ADVICE)
    for value in (*args, *kwargs.values()):
        recorder.read_deep(value)
    return functools.partial(_drawn, recorder, function)


def _draw_by_function(name: str) -> Handler:
    """A function of `numpy.random` that is not the global generator's method, but calls it."""
    method = getattr(_GLOBAL_GENERATORS[1], name)
    return lambda recorder, _function, args, kwargs: _draw(recorder, method, args, kwargs)


def _call_settled(function: Any, *args: Any, **kwargs: Any) -> Any:
    return function(*map(numbers.settled, args), **{name: numbers.settled(value) for name, value in kwargs.items()})


# Whose methods are the functions of `random` and `numpy.random`.
_GLOBAL_GENERATORS: tuple[Any, ...] = tuple(draw.__self__ for draw in (random.random, np.random.random))


def _is_repeatable(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(is_plain(item) for item in value)
    if type(value) is np.ndarray:
        return value.dtype != object
    is_known = numbers.is_number(value) and not numbers.is_late(value)
    is_known |= isinstance(value, type) and issubclass(value, (np.generic, int, float))
    return is_known or is_plain(value) or type(value) is EarlyArray


def _drawn(recorder: Recorder, function: Any, *args: Any, **kwargs: Any) -> Any:
    recorder.keep_generator(function.__self__)
    recorder.num_deeds += 1
    ledger = recorder.ledger
    result = function(*map(_value, args), **{key: _value(value) for key, value in kwargs.items()})
    texts = [_text(recorder, value) for value in args] + [
        f"{key}={_text(recorder, value)}" for key, value in kwargs.items()
    ]
    text = f"{ledger.constant(function)}({', '.join(texts)})"
    if (given := drawing.drawn(recorder, text, result)) is drawing.REFUSED:
        name = f"{type(function.__self__).__name__}.{function.__name__}()"
        recorder.refuse(f"draws a {type(result).__name__} with {name}", _ADVICE)
    return given


def _value(value: Any) -> Any:
    return value.array if type(value) is EarlyArray else numbers.value_of(value)


def _text(recorder: Recorder, value: Any) -> str:
    if numbers.is_number(value):
        return numbers.name_of(value)
    if type(value) is EarlyArray:
        return value.name
    if isinstance(value, np.ndarray):
        recorder.expect_content(value)
        value = value.copy()
    return recorder.ledger.constant(list(value) if isinstance(value, list) else value)


def convert_drawn(recorder: Recorder, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call that is given an array that was drawn: torch makes a tensor of it, which is drawn anew at each call."""
    root = str(getattr(function, "__module__", None) or "").split(".")[0]
    [drawn, *_] = [value for value in (*args, *kwargs.values()) if id(value) in recorder.drawn_arrays]
    [position] = [index for index, arg in enumerate(args) if arg is drawn] or [-1]
    others = [arg for index, arg in enumerate(args) if index != position]
    if root != "torch" or position < 0 or not all(is_plain(arg) for arg in (*others, *kwargs.values())):
        drawing.refuse_array(recorder, drawn, "computes with")

    def call(*args: Any, **kwargs: Any) -> Any:
        def make(array: Any) -> Any:
            return function(*args[:position], array, *args[position + 1 :], **kwargs)

        with _recording_torch.untraced():
            tensor = make(args[position].copy())
        recorder.drawn_tensors[id(tensor)] = tensor, recorder.drawn_arrays[id(args[position])][1], make
        return tensor

    return call


# Output


def _say(recorder: Recorder, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return functools.partial(_keep_output, recorder, function)


def _keep_output(recorder: Recorder, function: Any, *args: Any, **kwargs: Any) -> None:
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor) and value.requires_grad:
            raise CaptureError(
                "printing a tensor needs a value that is only known when the step runs",
                location=source.current_location(),
                advice=remedies.for_values(),
            )
    args, kwargs = late_calls.snapshot(args), late_calls.snapshot(kwargs)
    recorder.outputs.append(Output(function, args, kwargs, _as_it_is((args, kwargs))))


def _as_it_is(value: Any) -> Any:
    """A container as it is now: the step may change it after it was printed."""
    if isinstance(value, dict):
        return type(value)({key: _as_it_is(item) for key, item in value.items()}) if type(value) is dict else value
    if type(value) in (list, tuple):
        return type(value)(_as_it_is(item) for item in value)
    return value.copy() if type(value) in (set, collections.deque) else value


def _log(recorder: Recorder, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    levels = {"debug": 10, "info": 20, "warning": 30, "warn": 30, "error": 40, "critical": 50, "fatal": 50}
    name = method.__name__
    if isinstance(method.__func__, functools._lru_cache_wrapper):  # pyright: ignore[reportPrivateUsage]
        return functools.partial(_say_once, recorder, method)
    if method.__func__.__module__ != logging.__name__:
        recorder.follow(method.__func__)
        return method
    if name in ("isEnabledFor", "getEffectiveLevel", "hasHandlers"):
        return functools.partial(recorder.asked_again, method)
    if name == "getChild":
        return method
    if kwargs.get("exc_info") or kwargs.get("stack_info") or name == "exception":
        recorder.refuse(f"logs where it is ({name}() with exc_info or stack_info)", "Log it outside the step")
    if name not in levels and name != "log":
        recorder.refuse(f"calls {name}() of a logger", "Call it outside the step")
    location = source.current_location() or "unknown:0"
    function = recorder.calling_frame().f_code.co_name
    logger: logging.Logger = method.__self__

    def keep(*args: Any, **kwargs: Any) -> None:
        level, *rest = args if name == "log" else (levels[name], *args)
        said = functools.partial(_log_again, logger, location, function)
        said_args = (level, *rest)
        recorder.outputs.append(Output(said, said_args, kwargs, _as_it_is((said_args, kwargs))))

    return keep


def _say_once(recorder: Recorder, method: Any, *args: Any, **kwargs: Any) -> Any:
    """What a logger says only once (`warning_once`) is said now; its cache knows from then on."""
    with recorder.deaf():
        return method(*map(numbers.settled, args), **{name: numbers.settled(value) for name, value in kwargs.items()})


def _log_again(
    logger: logging.Logger, location: str, function: str, level: int, message: Any, *args: Any, **kwargs: Any
) -> None:
    """A log record as it came from the user's line."""
    while isinstance(logger, logging.LoggerAdapter):
        message, kwargs = logger.process(message, kwargs)  # pyright: ignore[reportAssignmentType]
        logger = logger.logger
    if logger.isEnabledFor(level):
        filename, _, line = location.rpartition(":")
        record = logger.makeRecord(
            logger.name, level, filename, int(line), message, args, None, function, kwargs.get("extra")
        )
        logger.handle(record)


def _warn(recorder: Recorder, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    def keep(message: Any, category: Any = None, stacklevel: int = 1, source: Any = None, **_: Any) -> None:
        frame = _frame_above(stacklevel)
        names = frame.f_globals
        kind = type(message) if isinstance(message, Warning) else category or UserWarning
        about = (message, kind, frame.f_code.co_filename, frame.f_lineno, names.get("__name__"))
        if warnings.filters is not recorder.warning_filters:
            if _is_ignored(str(message), kind, names.get("__name__") or "", frame.f_lineno):
                return
            recorder.refuse("warns under filters that it has set itself", "Set filters outside the step")
        recorder.outputs.append(Output(functools.partial(_warn_again, names), about, {}))

    return keep


def _frame_above(stacklevel: int) -> types.FrameType:
    frame: types.FrameType = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]
    for _ in range(stacklevel - 1):
        frame = frame.f_back or frame
    return frame


def _is_ignored(text: str, kind: type[Warning], module: str, line: int) -> bool:
    """Whether the filters of the moment let nobody see a warning."""
    for action, message, category, of_module, of_line in warnings.filters:
        if (
            (message is None or _matches(message, text))
            and issubclass(kind, category)
            and (of_module is None or _matches(of_module, module))
            and of_line in (0, line)
        ):
            return action == "ignore"
    return False


def _matches(pattern: Any, text: str) -> bool:
    return pattern == text if isinstance(pattern, str) else pattern.match(text) is not None


def _warn_again(names: dict[str, Any], *about: Any) -> None:
    warnings.warn_explicit(*about, registry=names.setdefault("__warningregistry__", {}))


# Who is asked


def _progress(recorder: Recorder, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if method.__name__ in _PROGRESS:
        return _say(recorder, method, args, kwargs)
    recorder.refuse(f"calls {method.__name__}() of a progress bar", "Call it outside the step")
    return method


def _stream(recorder: Recorder, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _say(recorder, method, args, kwargs) if method.__name__ in ("write", "flush") else method


def _clock(recorder: Recorder, method: Any, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    if method.__name__ in ("now", "today", "utcnow"):
        recorder.refuse(f"asks the clock (datetime.{method.__name__})", "Ask for the time outside the step")
    return method


def _context_variable(recorder: Recorder, method: Any, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    recorder.root(method.__self__)
    if method.__name__ == "get":
        recorder.read_cell(method.__self__)
    else:
        recorder.about_to_change(method.__self__)
    return method


def read_replaced(recorder: Recorder, token: Token[Any]) -> None:
    """`token.old_value`: what a context variable held before it was set, in the step or before."""
    kept = recorder.kept.get(id(token.var))
    old = ABSENT if token.old_value is Token.MISSING else token.old_value
    if kept is not None and kept.is_as_before(old):
        recorder.note(token.var, Step.CELL, None, old)


def _generator(recorder: Recorder, method: Any, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    recorder.refuse(
        f"calls {method.__name__}() of a torch.Generator", "Use torch.manual_seed, get_rng_state and set_rng_state"
    )
    return method


def _thread(recorder: Recorder, _function: Any, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    recorder.refuse("works in threads or processes of its own", "Start them outside the step")


def handler_of(owner: Any) -> Handler | None:
    """How calls of methods of an object are handled; None for most objects."""
    if isinstance(owner, (threading.Thread, concurrent.futures.Executor)):
        return _thread
    if isinstance(owner, (random.Random, np.random.RandomState, np.random.Generator)):
        return _draw
    if isinstance(owner, torch.Generator):
        return _generator
    if isinstance(owner, ContextVar):
        return _context_variable
    if isinstance(owner, (logging.Logger, logging.LoggerAdapter)):
        return _log
    if owner is sys.stdout or owner is sys.stderr:
        return _stream
    if isinstance(owner, type) and issubclass(owner, datetime.date):
        return _clock
    kinds: Any = type(owner).__mro__
    if any(base.__name__ == "tqdm" and base.__module__.split(".")[0] == "tqdm" for base in kinds):
        return _progress
    return None


def is_output(function: Any) -> bool:
    """Whether a call only says something, which is said again after the graph has run."""
    if function is print:
        return True
    if isinstance(function, (types.MethodType, types.BuiltinMethodType)):
        handler = handler_of(function.__self__)
        return handler in (_log, _progress) or (handler is _stream and function.__name__ in ("write", "flush"))
    return function in _ROOT or function is warnings.warn


def _log_to_root(recorder: Recorder, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _log(recorder, getattr(logging.getLogger(), function.__name__), args, kwargs)


_ROOT = (logging.debug, logging.info, logging.warning, logging.error, logging.critical, logging.log)
_GENERATORS = (random.Random, np.random.RandomState, np.random.Generator, np.random.default_rng)
HANDLERS: dict[Any, Handler] = {
    print: _say,
    warnings.warn: _warn,
    **dict.fromkeys(_ROOT, _log_to_root),
    **dict.fromkeys((threading.Thread, threading.Timer), _thread),
    np.random.seed: _draw_by_function("seed"),
    **dict.fromkeys((np.random.sample, np.random.ranf), _draw_by_function("random_sample")),
    **dict.fromkeys(_GENERATORS, _make_generator),
    **dict.fromkeys(np.random.BitGenerator.__subclasses__(), _make_generator),
}
