"""Calls and look-ups with values that only the graph decides among what they are given: noted, to be made later."""

from __future__ import annotations

import collections
import functools
import math
import operator
import types
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch

from wholestep.capture.record import forms, number_calls, whole
from wholestep.capture.record.arrays import LateArray, LateMethod, LateObject
from wholestep.capture.record.late_values import has_late, is_late_value, late_parts
from wholestep.capture.record.numbers import Number, are_numbers, kinds_of
from wholestep.capture.record.places import is_plain

if TYPE_CHECKING:
    from wholestep.capture.record.recorder import Recorder

_OF_ARRAYS: frozenset[Any] = frozenset(
    [*(f for f in vars(math).values() if isinstance(f, types.BuiltinFunctionType)), float, int, bool, complex, divmod]
)
_OF_MANY = (max, min, sum)
_TABLES = (list, tuple, dict, collections.OrderedDict)


def chosen(recorder: Recorder, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What to call in place of a function that is given such values; None if it may be called like any other."""
    given = (*args, *kwargs.values())
    if isinstance(function, LateMethod):
        whole.read_reached(recorder, *given)
        return function
    if isinstance(getattr(function, "__self__", None), torch.Tensor) and function.__name__ == "__getitem__":
        return lambda key: function(as_index(recorder, key))
    if is_made(function, args):
        return functools.partial(recorder.make_tensor, function)
    if number_calls.is_torchs(function):
        number_calls.refuse_arrays(given)  # which C code would look into, where nobody asks them
        return None
    if forms.is_numpys(function) or isinstance(getattr(function, "__self__", None), np.ufunc):
        return functools.partial(_of_numpy, recorder, function) if has_late(given) else None
    owner = getattr(function, "__self__", None)
    if issubclass(type(owner), np.ndarray) and has_late(given):
        return functools.partial(_method_of_array, recorder, function)
    try:
        is_of_arrays, is_of_many = function in _OF_ARRAYS, function in _OF_MANY
    except TypeError:  # bound to something that has no hash
        return None
    if is_of_arrays or function in (abs, round, pow):
        is_one = any(type(value) is LateArray or (function is bool and is_late_value(value)) for value in given)
        return functools.partial(recorder.late.noted_call, function) if is_one else None
    if is_of_many and _is_computed(function, args, kwargs):
        for arg in args:
            whole.read_reached(recorder, arg)
        return functools.partial(recorder.late.noted_call, function)
    if function is len and type(args[0]) is LateArray and not args[0].late.is_certain:
        return functools.partial(recorder.late.noted_call, function)
    return None


def _is_computed(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether `max(losses)` or `sum(losses, 0.0)` can be computed later: of numbers and arrays, some of them late."""
    if kwargs or not args or not has_late(args):
        return False
    first, *others = args
    if others and function is not sum:
        return _are_values(args) and any(type(arg) is LateArray for arg in args)  # numbers have a way of their own
    if type(first) is LateArray:
        return first.late.is_certain
    return isinstance(first, (list, tuple, collections.deque)) and _are_values([*first, *others])


def _are_values(values: Sequence[Any]) -> bool:
    return all(type(value) is LateArray or isinstance(value, np.ndarray) or are_numbers(value) for value in values)


def _of_numpy(recorder: Recorder, function: Any, *args: Any, **kwargs: Any) -> Any:
    _read(recorder, args, kwargs)
    return recorder.late.noted_of_numpy(function, args, kwargs)


def _method_of_array(recorder: Recorder, method: Any, *args: Any, **kwargs: Any) -> Any:
    """`weights.dot(array)`: a method of an array that is there, with one that is not."""
    name = method.__name__
    if forms.is_in_place(name) or not forms.is_known(name) or kwargs.get("out") is not None:
        next(late_parts((args, kwargs))).refuse()
    _read(recorder, (method.__self__, *args), kwargs)
    return recorder.late.method_called(method.__self__, name, args, kwargs)


def _read(recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    with recorder.deaf():
        whole.read_reached(recorder, *args, *kwargs.values())


def pick(recorder: Recorder, function: Any, *args: Any) -> Any:
    """`max(eps, rms)` of tensors and numbers: the very one that Python takes, which the graph looks at again."""
    is_max = function is max
    found, *others = args
    for other in others:
        is_taken = other > found if is_max else other < found
        if isinstance(is_taken, torch.Tensor):
            number = recorder.number_in(is_taken)
            is_taken = recorder.late.outcome_of(number) if type(number) is Number else bool(is_taken)
        found = other if is_taken else found
    return found


# Tensors of arrays

FROM_DATA = (torch.tensor, torch.from_numpy, torch.as_tensor, torch.asarray)


def is_made(function: Any, args: tuple[Any, ...]) -> bool:
    """Whether torch makes a tensor of data with arrays, or NumPy's numbers, that are only known later."""
    if not args or isinstance(args[0], torch.Tensor):
        return False
    is_maker = function in FROM_DATA or (isinstance(function, type) and issubclass(function, torch.Tensor))
    is_maker |= type(function).__name__ == "tensortype"
    is_maker |= getattr(function, "__name__", "") == "new_tensor"
    return is_maker and any(type(one) is not Number or not _is_pythons(one) for one in late_parts(args[0]))


def _is_pythons(number: Number) -> bool:
    return all(kind in (int, float, bool) for kind in kinds_of(number))


# Look-ups


def is_table(owner: Any, key: Any) -> bool:
    """Whether something known is asked for what stands at a place that is not."""
    if isinstance(owner, torch.Tensor):
        return any(type(part) is LateArray for part in (key if type(key) is tuple else (key,)))
    if issubclass(type(owner), np.ndarray):
        return has_late(key)
    if type(owner) not in _TABLES or not (type(key) is LateArray or (type(key) is Number and has_late(key))):
        return False
    parts = owner.values() if isinstance(owner, dict) else owner
    return all(is_plain(part) or is_late_value(part) for part in parts)


def refuse_in_item(recorder: Recorder, value: Any, owner: Any, key: Any) -> None:
    """Refuse `owner[key] = value` where C code would look into an array that is not there yet."""
    if isinstance(owner, torch.Tensor) and (is_table(owner, key) or type(value) in (LateArray, LateObject)):
        recorder.refuse(
            "writes to a tensor with an array that is only known when the step runs",
            "Make a tensor of it first (torch.from_numpy)",
        )


class LateTable:
    """Stands in for such an owner at its look-up."""

    def __init__(self, recorder: Recorder, content: Any) -> None:
        self._recorder, self._content = recorder, content

    def __getitem__(self, key: Any) -> Any:
        if isinstance(self._content, torch.Tensor):
            return self._content[as_index(self._recorder, key)]
        is_array = isinstance(self._content, np.ndarray)
        return self._recorder.late.noted(operator.getitem, (self._content, key), {}, of_forms=is_array)


def as_index(recorder: Recorder, key: Any) -> Any:
    """An index of a tensor, with tensors in place of arrays."""
    if type(key) is tuple:
        return tuple(as_index(recorder, part) for part in key)
    return recorder.make_tensor(torch.tensor, key) if type(key) is LateArray else key


def table(recorder: Recorder, owner: Any) -> LateTable:
    if isinstance(owner, torch.Tensor):
        return LateTable(recorder, owner)
    with recorder.deaf():
        if isinstance(owner, np.ndarray):
            recorder.expect_content(owner)
        else:
            recorder.read_all(owner)
    return LateTable(recorder, owner)


# What an object is


def is_instance(recorder: Recorder, value: LateObject, kinds: Any) -> bool:
    """`isinstance(value, kinds)`; the type is looked at again at each call."""
    recorder.late.require_form(value)
    return isinstance(value.late.find(), kinds)


def snapshot(value: Any) -> Any:
    """What is to be printed of arrays: they may be written to before it is printed."""
    if type(value) is LateArray:
        return value.late.ledger.noted(np.copy, (value,), {"order": "K"})
    if type(value) is dict:
        return {key: snapshot(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(snapshot(item) for item in value)
    is_shown = isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter)
    return value.detach().clone() if is_shown else value


def refuser(recorder: Recorder) -> Callable[[str, str], NoReturn]:
    """Refuses what Python asks of a value that nobody knows before the graph has run."""

    def refuse(what: str, advice: str) -> NoReturn:
        recorder.escalate()
        recorder.refuse(what, advice)

    return refuse
