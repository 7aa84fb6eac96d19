"""What is called, and what that means for the recording.

Python functions are followed. A C function cannot be: what it is given counts as read, whole (`read_deep`), and what it
does besides is known for those that matter:

    getattr, vars, len, list.append, dict.items, ...     reads and writes, like the instructions for them
    print, logging, warnings, progress bars              done again at each call (`output`)
    random, numpy.random                                 drawn again at each call (`draws`)
    math.cos, round, float of a changing number          computed again at each call (`numbers`)
    clocks, files, processes, iterators from outside     refused by name

`choose` is asked before each call and says what is called instead; mostly the callable itself.
"""

from __future__ import annotations

import abc
import builtins
import collections
import enum
import functools
import importlib
import operator
import types
import typing
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from wholestep import _recording_torch, _torch
from wholestep.capture.record import (
    c_modules,
    classes,
    containers,
    drawing,
    early_arrays,
    late_calls,
    number_calls,
    numbers,
    outside,
    sequences,
    simple_calls,
    standins,
    tensors,
    whole,
    whole_late,
)
from wholestep.capture.record.again import AsksBefore
from wholestep.capture.record.arrays import LateObject
from wholestep.capture.record.caches import cached_call
from wholestep.capture.record.follow import is_of_stdlib
from wholestep.capture.record.places import CONTAINERS, Step, is_open, is_plain
from wholestep.capture.record.quiet_texts import note_looks

if TYPE_CHECKING:
    from wholestep.capture.record.recorder import Recorder

Handler = Callable[["Recorder", Any, tuple[Any, ...], dict[str, Any]], Any]

_C_CALLABLES = (
    types.BuiltinFunctionType,
    types.MethodWrapperType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.ClassMethodDescriptorType,
)


def _is_hashable(function: Any) -> bool:
    try:
        hash(function)
    except TypeError:  # a weak reference has the hash of what it refers to, which may have none
        return False
    return True


def choose(recorder: Recorder, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What to call in place of `function` with these arguments."""
    kind = type(function)
    if recorder.late.is_used and (later := late_calls.chosen(recorder, function, args, kwargs)) is not None:
        recorder.texts.settle(recorder, (*args, *kwargs.values()))
        return later
    if len(args) == 1 and _torch.is_traced(args[0]) and _is_hashable(function) and function in number_calls.OF_NUMBERS:
        return functools.partial(number_calls.of_tensor, recorder, function)
    if any(_is_to_be_told(recorder, arg) for arg in (*args, *kwargs.values())) and not _keeps(function):
        return functools.partial(_call_telling, recorder, function)
    if recorder.drawn_arrays and any(id(arg) in recorder.drawn_arrays for arg in (*args, *kwargs.values())):
        return outside.convert_drawn(recorder, function, args, kwargs)
    if (recorder.whole_draws or recorder.ledger.drawn) and _is_hashable(function):
        chosen = early_arrays.choose(recorder, function, args, kwargs)
        if chosen is not None:
            return chosen
    if kind is types.FunctionType:
        return _python(recorder, function, args, kwargs)
    if kind is types.MethodType:
        return _method(recorder, function, args, kwargs)
    if isinstance(function, nn.Module):
        recorder.enter_module(function)
        return function
    if (python := c_modules.scripted(recorder, function, args, kwargs)) is not None:
        return _python(recorder, python, args, kwargs)
    if kind is not functools.partial:
        note_looks(recorder, function, args, kwargs)
    has_numbers = any(type(arg) is numbers.Number for arg in (*args, *kwargs.values()))
    if isinstance(function, type):
        return (_with_numbers if has_numbers else _class)(recorder, function, args, kwargs)
    is_number_call = has_numbers and (number_calls.is_torchs(function) or number_calls.is_on_numbers(function))
    if kind in _C_CALLABLES or kind is types.BuiltinMethodType or is_number_call:
        return (_with_numbers if has_numbers else _builtin)(recorder, function, args, kwargs)
    if _is_hashable(function) and function in recorder.handlers:
        return recorder.handlers[function](recorder, function, args, kwargs)
    if kind is functools.partial:
        recorder.read_deep(function)
        for part in (function.func, *function.args, *function.keywords.values()):
            recorder.follow_all(part)
        inner = choose(recorder, function.func, (*function.args, *args), {**function.keywords, **kwargs})
        return function if inner is function.func else functools.partial(inner, *function.args, **function.keywords)
    if kind in _GETTERS:
        _GETTERS[kind](recorder, function, args)
        return function
    if kind is functools._lru_cache_wrapper:  # pyright: ignore[reportPrivateUsage]
        return cached_call(recorder, function)
    if isinstance(function, weakref.ref):
        found = function()
        recorder.note(function, Step.CALL, ((), ()), found)
        if type(found) is types.MethodType:  # of `WeakMethod`, which makes a new one each time
            recorder.read_bound(found)
        return function
    if kind is np.ufunc and any(type(arg) is torch.SymFloat for arg in args):
        raise AsksBefore  # a rate: NumPy knows no symbols
    recorder.follow_operators(function)
    classes.read_from_class(recorder, kind, "__call__")
    _give(recorder, args, kwargs)
    if type(getattr(kind, "__call__", None)) in _C_CALLABLES:  # noqa: B004
        return functools.partial(number_calls.with_all_settled, function)  # as of json, which asks for a float
    return function


def _is_to_be_told(recorder: Recorder, value: Any) -> bool:
    """Whether a value is C code that writes to or reads objects from outside: `history.append`, an `attrgetter`."""
    if type(value) in _GETTERS:
        return True
    if type(value) not in (types.BuiltinMethodType, types.MethodWrapperType):
        return False
    return recorder.place_of(value.__self__) is not None and not isinstance(value.__self__, types.ModuleType)


def _keeps(function: Any) -> bool:
    """Whether a call only puts its arguments somewhere: nothing is called yet."""
    return isinstance(getattr(function, "__self__", None), CONTAINERS) or function in (setattr, print, isinstance, id)


def _call_telling(recorder: Recorder, function: Any, *args: Any, **kwargs: Any) -> Any:
    """A call that is handed methods which it may call: what they do then is noted as if the step had called them."""
    args = tuple(told(recorder, arg) for arg in args)
    kwargs = {name: told(recorder, arg) for name, arg in kwargs.items()}
    with recorder.deaf():
        chosen = choose(recorder, function, args, kwargs)
    return chosen(*args, **kwargs)


def told(recorder: Recorder, value: Any) -> Any:
    """What to hand over in place of a method of C code, whoever is going to call it; anything else as it is."""
    if not _is_to_be_told(recorder, value):
        return value

    def call(*args: Any, **kwargs: Any) -> Any:
        with recorder.deaf():
            chosen = choose(recorder, value, args, kwargs)
        return chosen(*args, **kwargs)

    return call


def _python(recorder: Recorder, function: types.FunctionType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    handler = recorder.handlers.get(function)
    if handler is not None:
        note_looks(recorder, function, args, kwargs)
        return handler(recorder, function, args, kwargs)
    if function.__code__ is _DISPATCHING and args:
        return _dispatched(recorder, function, args, kwargs)
    if recorder.whole_draws and (whole_call := drawing.whole_call(recorder, function, args, kwargs)) is not None:
        return whole_call
    if (later := whole_late.whole_call(recorder, function, args, kwargs)) is not None:
        return later
    if recorder.follow(function):
        recorder.read_defaults(function)
        return function
    note_looks(recorder, function, args, kwargs)
    wraps_followed = recorder.follow_all(function)
    _give(recorder, args, kwargs)
    if function.__module__ == "inspect" and args:
        classes.read_reflected(recorder, args[0])
    if not wraps_followed and any(type(arg) is numbers.Number for arg in (*args, *kwargs.values())):
        return _with_numbers(recorder, function, args, kwargs)
    return functools.partial(_finding, recorder, function) if function.__module__ in _FINDERS else function


# Modules of Python that are not followed, whose functions return objects that others know as well.
_FINDERS = ("threading", "logging")


def _finding(recorder: Recorder, function: Any, *args: Any, **kwargs: Any) -> Any:
    """A call that returns something which was there before the step: what is read from it is noted."""
    found = function(*args, **kwargs)
    if is_open(found):
        recorder.root(found)
    return found


_DISPATCHING: types.CodeType = getattr(functools.singledispatch(lambda: None), "__code__")  # noqa: B009


def _dispatched(recorder: Recorder, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function of `functools.singledispatch`: what it calls for the class that its first argument has in eager."""
    recorder.root(function.dispatch)
    cls = standins.type_of(recorder, args[0])
    chosen = function.dispatch(cls)
    recorder.note(function.dispatch, Step.CALL, ((cls,), ()), chosen)
    return choose(recorder, chosen, args, kwargs)


def _method(recorder: Recorder, method: types.MethodType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    recorder.read_bound(method)
    handler = recorder.handler_of(method.__self__)
    if handler is not None:
        note_looks(recorder, method, args, kwargs)
        return handler(recorder, method, args, kwargs)
    function = method.__func__
    handler = recorder.handlers.get(function) if isinstance(function, types.FunctionType) else None
    if handler is not None:
        return handler(recorder, method, args, kwargs)
    if type(function) is functools._lru_cache_wrapper:  # pyright: ignore[reportPrivateUsage]
        return functools.partial(cached_call(recorder, function), method.__self__)
    if recorder.whole_draws and (whole_call := drawing.whole_method(recorder, method, args, kwargs)) is not None:
        return whole_call
    if isinstance(function, types.FunctionType):
        later = whole_late.whole_call(recorder, function, (method.__self__, *args), kwargs)
        if later is not None:
            recorder.texts.settle(recorder, (*args, *kwargs.values()))
            return functools.partial(later, method.__self__)
        if recorder.follow(function):
            recorder.read_defaults(function)
            return method
    note_looks(recorder, method, args, kwargs)
    recorder.follow_all(function)
    recorder.follow_operators(method.__self__)
    if isinstance(method.__self__, type):  # `apply` of an autograd.Function calls what its class defines
        recorder.follow_class(method.__self__)
    _give(recorder, (method.__self__, *args), kwargs)
    return method


def _class(recorder: Recorder, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    handler = recorder.handlers.get(cls)
    if handler is not None:
        return handler(recorder, cls, args, kwargs)
    if type(cls) is not type:  # whose metaclass may have a `__call__` of its own
        recorder.read_attribute(cls, "__call__")
        recorder.follow_operators(cls)
    for name in ("__new__", "__init__", "__post_init__"):
        recorder.follow_all(getattr(cls, name, None))
    recorder.follow_operators(cls)
    if not any(isinstance(vars(base).get("__init__"), types.FunctionType) for base in cls.__mro__):
        _give(recorder, args, kwargs, is_kept=cls is functools.partial)
    return cls


def _builtin(recorder: Recorder, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        handler = recorder.handlers.get(function)
    except TypeError:  # bound to something that has no hash
        handler = None
    if handler is not None:
        return handler(recorder, function, args, kwargs)
    owner = getattr(function, "__self__", None)
    if owner is None or isinstance(owner, types.ModuleType):
        c_modules.refuse_effects(recorder, function, owner)
        _give(recorder, args, kwargs)
        return function
    recorder.read_bound(function)
    if function.__name__ in _ATTRIBUTE_METHODS and not isinstance(owner, torch.Tensor):
        _ATTRIBUTE_METHODS[function.__name__](recorder, owner, *args)
        return function
    handler = recorder.handler_of(owner)
    if handler is not None:
        return handler(recorder, function, args, kwargs)
    if isinstance(owner, CONTAINERS) and not isinstance(owner, type):
        _give(recorder, args, kwargs, is_kept=function.__name__ in containers.KEEPING)
        containers.call_method(recorder, owner, function.__name__, args, kwargs)
        return function
    if isinstance(owner, types.MappingProxyType):
        classes.read_view(recorder, owner, args[:1] if function.__name__ in ("get", "__getitem__") else None)
        return function
    if isinstance(owner, type):
        recorder.follow_class(owner)
        if function.__name__ == "__subclasses__":
            return functools.partial(recorder.asked_again, function)
    if isinstance(owner, type) or is_plain(owner) or isinstance(owner, (torch.Tensor, enum.Enum)):
        _give(recorder, args, kwargs)
        return function
    return _object_method(recorder, owner, function, args, kwargs)


def _object_method(recorder: Recorder, owner: Any, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if id(owner) in recorder.drawn_arrays:
        drawing.refuse_array(recorder, owner, "computes with")
    _give(recorder, (owner, *args), kwargs)
    if recorder.place_of(owner) is None or isinstance(owner, np.ndarray):
        return function
    name = type(owner).__module__.split(".")[0]
    if name == "_thread" and function.__name__ == "locked":
        recorder.refuse("asks whether a lock is locked", "Ask outside the step")
    if name in ("torch", "_thread", "re", "_sre"):
        return function
    recorder.refuse_iterator(owner)
    if function.__name__.startswith("__"):
        recorder.refuse_hidden_state(owner)
        return function
    recorder.refuse(
        f"calls {type(owner).__name__}.{function.__name__}(), which cannot be followed",
        "Call it outside the step, and pass what it returns",
    )
    return function


def _give(recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_kept: bool = False) -> None:
    """Arguments of a call that cannot be followed: read whole, maybe written to, and called; or only kept."""
    given = (*args, *kwargs.values())
    for arg in whole.reached(recorder, given) if not is_kept else _handed_on(recorder, given):
        if isinstance(arg, torch.Tensor):
            continue
        if not is_kept:
            whole.read_arrays(recorder, arg)
        recorder.follow_all(arg)
        if isinstance(arg, nn.Module):  # as `checkpoint(layer, x)` calls it
            if id(arg) in recorder.known_modules:
                recorder.enter_module(arg)
        elif isinstance(arg, type):
            classes.read_plain(recorder, arg)
        elif isinstance(arg, types.MappingProxyType):
            classes.read_view(recorder, arg)
        elif recorder.place_of(arg) is not None:
            recorder.refuse_iterator(arg)
            recorder.read_deep(arg)
            recorder.might_change(arg)


def _handed_on(recorder: Recorder, values: Iterable[Any]) -> Iterator[Any]:
    """Arguments that are put away, and what is in lists among them."""
    for value in values:
        if not is_plain(value) or recorder.place_of(value) is not None:
            yield value
            if type(value) in (list, tuple):
                yield from _handed_on(recorder, value)


def _with_numbers(recorder: Recorder, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call with a changing number among its arguments: computed again, exchanged by torch's own kind, or settled."""
    if number_calls.is_on_numbers(function) and all(map(numbers.are_numbers, (*args, *kwargs.values()))):
        return functools.partial(number_calls.compute, function)
    if _is_hashable(function) and function in number_calls.COMPARING:
        _give(recorder, args, kwargs)
        return number_calls.COMPARING[function]
    if function in (min, max, sum, isinstance, print, getattr, setattr, str, repr, format, type):
        return (
            _class(recorder, function, args, kwargs)
            if isinstance(function, type)
            else _builtin(recorder, function, args, kwargs)
        )
    if number_calls.is_torchs(function):
        return functools.partial(number_calls.with_symbols, recorder, function)
    if number_calls.takes_real_numbers(function):
        args, kwargs = tuple(map(numbers.settled, args)), {key: numbers.settled(arg) for key, arg in kwargs.items()}
        return functools.partial(number_calls.with_settled, choose(recorder, function, args, kwargs))
    if isinstance(function, type):
        return _class(recorder, function, args, kwargs)
    return _builtin(recorder, function, args, kwargs)


# Builtins with a meaning of their own


def _getattr(recorder: Recorder, function: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    owner, name = args[0], args[1]
    if isinstance(name, str) and type(owner) is not numbers.Number:
        recorder.read_attribute(owner, name)
    return function


def _find(recorder: Recorder, function: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    recorder.find_attribute(args[0], args[1])
    return function


def _setattr(recorder: Recorder, function: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    recorder.write_attribute(args[0], args[1])
    return function


def _call_method(recorder: Recorder, caller: Any, args: tuple[Any, ...]) -> None:
    """`operator.methodcaller("name")(owner)`."""
    name, *_ = caller.__reduce__()[1]
    recorder.read_attribute(args[0], name)
    _give(recorder, args, {})


_GETTERS: dict[type, Callable[..., None]] = {
    operator.attrgetter: simple_calls.get_attributes,
    operator.itemgetter: simple_calls.get_items,
    operator.methodcaller: _call_method,
}


def _pick(symbolic: Callable[[Any, Any], Any]) -> Handler:
    """`min(a, b)` and `max(a, b)` of symbols, which Python's own would ask for their values (rates are clipped so).

    Python asks if one is an int and the other a float: its result may be either, a symbol is always a float.
    """

    def handler(recorder: Recorder, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        is_symbolic = any(type(arg) is torch.SymFloat for arg in args) and standins.are_numbers(args)
        if len(args) == 2 and is_symbolic and len({standins.type_of(recorder, arg) for arg in args}) == 1:
            return functools.partial(number_calls.with_symbols, recorder, symbolic)
        if len(args) > 1 and not kwargs and any(map(numbers.is_late, args)) and numbers.are_numbers(*args):
            return functools.partial(number_calls.compute, function)
        if len(args) > 1 and not kwargs and any(map(_torch.is_traced, args)):
            return functools.partial(late_calls.pick, recorder, function)
        _give(recorder, args, kwargs)
        return function

    return handler


def _next(recorder: Recorder, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    recorder.read_through(args[0])
    return function


_PLAIN_CONTAINERS = (list, tuple, dict, set, frozenset, collections.deque, collections.OrderedDict)


def _walk(recorder: Recorder, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`enumerate(owner)`, `zip(a, b)`: goes through containers, and does not look into what they hold."""
    walked = [arg for arg in args if type(arg) in _PLAIN_CONTAINERS]
    for owner in walked:
        recorder.read_through(owner)
    others = [arg for arg in args if type(arg) not in _PLAIN_CONTAINERS]
    for owner in others:
        recorder.follow_operators(owner)
    walked_in_c = [arg for arg in others if not isinstance(getattr(type(arg), "__iter__", None), types.FunctionType)]
    _give(recorder, tuple(walked_in_c), kwargs)
    return function


def _identity_of(recorder: Recorder, function: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    recorder.identify(args[0])
    sequences.refuse_identity(recorder, args[0])
    owner = tensors.id_of(recorder, args[0])
    return function if owner is args[0] else lambda _: function(owner)


def _is(recorder: Recorder, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`operator.is_(left, right)`."""
    standins.refuse_identity(recorder, *args[:2])
    _give(recorder, args, kwargs)
    return function


def _for_real(recorder: Recorder, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`torch.from_numpy`: a tensor in the array's own memory, which the trace must not stand in for."""
    is_array = any(isinstance(arg, np.ndarray) for arg in (*args, *kwargs.values()))
    _give(recorder, args, kwargs, is_kept=is_array)
    if not is_array:
        return function

    def call(*args: Any, **kwargs: Any) -> Any:
        if function in (torch.as_tensor, torch.asarray) and len(args) < 3:
            kwargs = {"device": torch.get_default_device(), **kwargs}  # which is a mode, too
        with _recording_torch.untraced():
            return function(*args, **kwargs)

    return call


def _type(recorder: Recorder, function: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    return functools.partial(standins.type_of, recorder) if len(args) == 1 else function


def _isinstance(recorder: Recorder, function: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    whole.read_reached(recorder, args[1])  # which may be a tuple
    if standins.is_number(args[0]):
        return functools.partial(standins.is_instance, recorder)
    if type(args[0]) is LateObject:
        return functools.partial(late_calls.is_instance, recorder)
    for cls in args[1] if isinstance(args[1], tuple) else typing.get_args(args[1]) or (args[1],):
        if getattr(cls, "_is_protocol", False):
            classes.read_protocol(recorder, args[0], cls)
    if recorder.place_of(args[0]) is None or type(args[1]) is not abc.ABCMeta:  # to which classes may be added
        return function
    if args[0].__class__ is not type(args[0]):
        return functools.partial(recorder.asked_again, function)
    # The type decides, and is guarded where the object was found. The object itself may be the copy of an argument.
    return lambda one, cls: recorder.asked_again(issubclass, type(one), cls)


def _quiet(_recorder: Recorder, function: Any, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    return function


_ATTRIBUTE_METHODS: dict[str, Callable[..., None]] = {
    "__getattribute__": lambda recorder, owner, name: recorder.find_attribute(owner, name),
    "__setattr__": lambda recorder, owner, name, _: recorder.write_attribute(owner, name),
    "__delattr__": lambda recorder, owner, name: recorder.write_attribute(owner, name),
}


def _refused(what: str, advice: str, *, but_python: bool = False) -> Handler:
    """Refuses a call, `but_python` not one by Python's own library: a named tuple is made of text."""

    def handler(recorder: Recorder, function: Any, _args: Any, _kwargs: Any) -> Any:
        if not (but_python and is_of_stdlib(recorder.calling_frame().f_code.co_filename)):
            recorder.refuse(what, advice)
        return function

    return handler


BUILTINS: dict[Any, Handler] = {
    getattr: _getattr,
    hasattr: _getattr,
    setattr: _setattr,
    delattr: _setattr,
    object.__setattr__: _setattr,
    object.__delattr__: _setattr,
    type.__setattr__: _setattr,
    type.__delattr__: _setattr,
    object.__getattribute__: _find,
    type.__getattribute__: _getattr,
    len: simple_calls.length,
    min: _pick(torch.sym_min),
    max: _pick(torch.sym_max),
    vars: simple_calls.vars_,
    dir: simple_calls.dir_,
    globals: simple_calls.globals_,
    next: _next,
    **dict.fromkeys((enumerate, zip, reversed, iter, list, tuple), _walk),
    operator.is_: _is,
    operator.is_not: _is,
    id: _identity_of,
    hash: _identity_of,
    **dict.fromkeys((torch.from_numpy, torch.as_tensor, torch.asarray, torch.frombuffer), _for_real),
    torch.Tensor.__deepcopy__: simple_calls.copied,
    nn.Parameter.__deepcopy__: simple_calls.copied,
    nn.Module.train: simple_calls.train,
    nn.Module.eval: simple_calls.train,
    isinstance: _isinstance,
    importlib.import_module: simple_calls.imports,
    issubclass: simple_calls.is_subclass,
    callable: _quiet,
    torch.is_tensor: _quiet,
    super: _quiet,
    type: _type,
    locals: _quiet,
    open: _refused("opens a file", "Read and write files outside the step"),
    input: _refused("asks for input", "Ask outside the step"),
    eval: _refused("calls eval()", "Define the function outside the step", but_python=True),
    exec: _refused("calls exec()", "Define the function outside the step", but_python=True),
    builtins.compile: _refused("calls compile()", "Compile code outside the step"),
}
