"""Calls of functions of numbers: computed again, exchanged for torch's own kind of number, or settled."""

from __future__ import annotations

import bisect
import collections
import copy
import math
import operator
import sys
import types
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from wholestep.capture.record import numbers
from wholestep.capture.record.arrays import LateArray, LateObject

if TYPE_CHECKING:
    from wholestep.capture.record.recorder import Recorder

# What these make keeps numbers, or computes with them as Python does.
_HOLDING = frozenset(["builtins", "itertools", "functools", "_functools", "operator", "_operator"]) | {
    "collections",
    "_collections",
    "types",
    "weakref",
    "_weakref",
}
OF_NUMBERS = frozenset([*(f for f in vars(math).values() if isinstance(f, types.BuiltinFunctionType)), float, int])
"""What gives a number for a tensor as well: it asks for its value."""
_UFUNCS = (np.isfinite, np.isnan, np.isinf, np.minimum, np.maximum, np.power, np.sqrt, np.exp, np.log, np.cos, np.sin)
_OF_NUMPY: frozenset[Any] = frozenset([np.clip, np.round, np.around])
ON_NUMBERS = OF_NUMBERS | _OF_NUMPY | {abs, round, pow, *_UFUNCS}
_NUMPYS = tuple({*map(type, _OF_NUMPY)})


def _bisect_right(a: Any, x: Any, lo: int = 0, hi: int | None = None, *, key: Any = None) -> int:
    """What C does, but each comparison is one of a `Number`."""
    hi = len(a) if hi is None else hi
    while lo < hi:
        middle = (lo + hi) // 2
        if x < (a[middle] if key is None else key(a[middle])):
            hi = middle
        else:
            lo = middle + 1
    return lo


def _bisect_left(a: Any, x: Any, lo: int = 0, hi: int | None = None, *, key: Any = None) -> int:
    hi = len(a) if hi is None else hi
    while lo < hi:
        middle = (lo + hi) // 2
        if (a[middle] if key is None else key(a[middle])) < x:
            lo = middle + 1
        else:
            hi = middle
    return lo


COMPARING: dict[Any, Callable[..., int]] = {bisect.bisect_left: _bisect_left, bisect.bisect_right: _bisect_right}
"""C functions that only compare, in Python: each outcome is taken for granted, and not the very number."""


def is_on_numbers(function: Any) -> bool:
    """Whether a function of numbers gives a number, and can be computed again."""
    if isinstance(function, np.ufunc):
        return function.nout == 1
    return isinstance(function, (types.BuiltinFunctionType, type, *_NUMPYS)) and function in ON_NUMBERS


def refuse_arrays(given: Iterable[Any]) -> None:
    """Refuse arrays among some values and in lists and tuples of them."""
    for value in given:
        if type(value) in (LateArray, LateObject):
            value.refuse()
        elif type(value) in (list, tuple):
            refuse_arrays(value)


def is_torchs(function: Any) -> bool:
    """Whether a function is one of torch, or a method of a tensor."""
    root = str(getattr(function, "__module__", None) or type(getattr(function, "__self__", None)).__module__)
    is_torch = root.split(".")[0] == "torch" or isinstance(getattr(function, "__self__", None), torch.Tensor)
    return is_torch or isinstance(function, type(torch.ops.aten.add))


def takes_real_numbers(function: Any) -> bool:
    """Whether C code is called that would not take a number of ours for one, and say so to the step."""
    if isinstance(function, type):
        members = [vars(base).get(name) for base in function.__mro__ for name in ("__new__", "__init__")]
        is_c = not any(isinstance(member, types.FunctionType) for member in members)
    else:
        is_c = type(function) is types.BuiltinFunctionType and isinstance(
            function.__self__, (types.ModuleType, type(None))
        )
    root = str(getattr(function, "__module__", None) or "builtins").split(".")[0]
    return is_c and root not in _HOLDING and (root == "numpy" or root in sys.stdlib_module_names)


def with_settled(function: Any, *args: Any, **kwargs: Any) -> Any:
    return function(*map(numbers.settled, args), **{key: numbers.settled(arg) for key, arg in kwargs.items()})


def with_all_settled(function: Any, *args: Any, **kwargs: Any) -> Any:
    """A call of C code that takes numbers out of containers."""
    return function(*map(_all_settled, args), **{key: _all_settled(arg) for key, arg in kwargs.items()})


def _all_settled(value: Any) -> Any:
    """A value with plain numbers at all depths; a copy only if there have been others."""
    if isinstance(value, dict):
        items: dict[Any, Any] = {key: _all_settled(item) for key, item in value.items()}
        if all(item is value[key] for key, item in items.items()):
            return value
        copied: Any = copy.copy(value)
        copied.update(items)
        return copied
    if not isinstance(value, (list, tuple, collections.deque)):
        return numbers.settled(value)
    parts: list[Any] = [_all_settled(part) for part in value]
    if all(map(operator.is_, parts, value)):
        return value
    kind: Any = type(value)
    return kind._make(parts) if hasattr(kind, "_make") else kind(parts)


def of_tensor(recorder: Recorder, function: Any, tensor: torch.Tensor, **kwargs: Any) -> Any:
    """`float(loss)`, `math.exp(loss)`."""
    number = recorder.number_in(tensor)
    if type(number) is not numbers.Number:
        return function(tensor if number is None else number, **kwargs)
    return numbers.called(function, (number,), kwargs)


def compute(function: Any, *args: Any, **kwargs: Any) -> Any:
    return numbers.called(function, args, kwargs)


def with_symbols(recorder: Recorder, function: Any, *args: Any, **kwargs: Any) -> Any:
    exchange = recorder.ledger.symbol_of
    given = [exchange(arg) if type(arg) is numbers.Number else arg for arg in args]
    named = {key: exchange(arg) if type(arg) is numbers.Number else arg for key, arg in kwargs.items()}
    with recorder.symbolic([*args, *kwargs.values()]):
        return function(*given, **named)
