"""Arrays that Python draws, and what NumPy makes of them: known before the graph runs, and others at each call.

    r = np.random.rand(1)                   b_1 = c_rand(1)
    if r < 0.5: ...                         b_2 = c_lt(b_1, 0.5);  assumed: bool(b_2)
    rows = x[np.random.permutation(9)[:4]]  b_3 = c_permutation(9);  b_4 = b_3[slice(None, 4)];  an input of the graph

The trace is handed an `EarlyArray` in place of an array: it computes with the array of this call, and writes each
operation down in the ledger, as a `Number` does. Nothing is ever written to one, so that nobody can tell copies and
views apart. Its form (shape, dtype, strides) is taken for granted.
"""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from wholestep import _recording_torch
from wholestep.capture.record import drawing, numbers
from wholestep.capture.record.places import is_plain

if TYPE_CHECKING:
    from wholestep.capture.record.recorder import Recorder

_ADVICE = "Draw with torch, or outside the step"
_FORM = ("shape", "ndim", "dtype", "size", "strides", "itemsize", "nbytes")
_OF_ARRAYS = """
    all any argmax argmin argsort astype clip copy cumprod cumsum flatten item max mean min nonzero prod ravel repeat
    reshape round searchsorted squeeze std sum swapaxes take tolist transpose var
"""
_OF_NUMPY = """
    all allclose amax amin any append argmax argmin argsort argwhere around array_equal atleast_1d average bincount
    broadcast_to clip column_stack concatenate count_nonzero cumprod cumsum delete diff digitize dot expand_dims
    flatnonzero flip fliplr flipud full_like hstack interp isclose isin linspace matmul max mean median min moveaxis
    nan_to_num ndim nonzero norm ones_like outer pad percentile prod quantile ravel repeat reshape roll rot90 round
    searchsorted setdiff1d shape size sort split squeeze stack std sum swapaxes take tile transpose unique var vstack
    where zeros_like
"""
_METHODS, _FUNCTIONS = frozenset(_OF_ARRAYS.split()), frozenset(_OF_NUMPY.split())
"""What gives an array of its own, or a view, and writes to nothing."""
_ON_ONE = frozenset([float, int, bool, abs, round])
_CONSTRUCTORS: tuple[Any, ...] = (
    *(torch.tensor, torch.as_tensor, torch.Tensor, torch.FloatTensor, torch.DoubleTensor, torch.LongTensor),
    torch.BoolTensor,
)
_CREATORS = frozenset([np.arange, np.zeros, np.ones, np.full, np.array, np.linspace, np.eye, np.empty])
_SHARING = (torch.from_numpy, torch.as_tensor, torch.asarray, torch.frombuffer)
_INDICES = (np.dtype(np.int64), np.dtype(np.int32), np.dtype(bool))


def form_of(array: Any) -> Any:
    """What is taken for granted of an array."""
    return (array.shape, str(array.dtype), array.strides) if isinstance(array, np.ndarray) else type(array)


class EarlyArray:
    """Stands in for an array that is known before the graph runs; whoever asks is told it is an array."""

    __slots__ = ("array", "is_frozen", "name", "origins", "recorder")
    __array_priority__ = 1000

    def __init__(
        self, recorder: Recorder, array: Any, name: str, origins: frozenset[str], *, is_frozen: bool = False
    ) -> None:
        """One that `is_frozen` lies in memory of the user's, or of a tensor, and must not be written to."""
        self.recorder = recorder
        self.array = array
        self.name = name
        self.origins = origins
        self.is_frozen = is_frozen

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        return np.ndarray

    @__class__.setter
    def __class__(self, kind: type) -> None:
        self.deny("sets the class of")

    def deny(self, what: str) -> Any:
        self.recorder.refuse(f"{what} an array that it has drawn", _ADVICE)

    def __array_function__(self, func: Any, _types: Any, args: Any, kwargs: Any) -> Any:
        is_known = func.__name__ in _FUNCTIONS and func.__module__ in ("numpy", "numpy.linalg")
        if not is_known or kwargs.get("out") is not None:
            return self.deny("computes with")
        return applied(self.recorder, func, args, kwargs)

    def __array_ufunc__(self, ufunc: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        if method != "__call__" or kwargs.get("out") is not None:
            return self.deny("computes with")
        return applied(self.recorder, ufunc, args, kwargs)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Torch lets arguments of unknown types pass if they have this; the trace's mode has exchanged it by then."""
        for value in (*args, *(kwargs or {}).values()):
            if type(value) is EarlyArray:
                value.deny("gives to torch")
        raise TypeError("arrays that are drawn are no arguments of torch")

    def __array__(self, *_: Any, **__: Any) -> Any:
        return self.deny("computes with")

    def __getitem__(self, key: Any) -> Any:
        return applied(self.recorder, operator.getitem, (self, key), {})

    def __setitem__(self, key: Any, value: Any) -> None:
        self.change(operator.setitem, key, value)

    def change(self, function: Callable[..., Any], *args: Any) -> None:
        """Write to the array, as will be done at each call."""
        self._require_own()
        recorder, ledger = self.recorder, self.recorder.ledger
        self.origins |= frozenset[str]().union(*map(_origins, args))
        applied(recorder, function, (self, *args), {})
        if not self.origins.isdisjoint(ledger.drawn):
            self.depends_on(ledger.lines[-1].partition(" = ")[0])

    def _require_own(self) -> None:
        """Nobody else may have the memory, or show it later."""
        said = _leaves([[output.args, [*output.kwargs.values()]] for output in self.recorder.outputs])
        shown = [value.array for value in said if type(value) is EarlyArray]
        lent = [*self.recorder.lent_arrays, *shown]
        if self.is_frozen or any(np.may_share_memory(self.array, other) for other in lent):
            self.deny("writes to the memory of a tensor, of its user, or of what was printed, by")

    def depends_on(self, name: str) -> None:
        """What a line has written to the array may be something else at each call."""
        ledger = self.recorder.ledger
        ledger.lines.append(f"{self.name} = {ledger.constant(_second)}({name}, {self.name})")

    def shuffled(self, function: Any) -> None:
        """`np.random.shuffle(array)`."""
        self._require_own()
        ledger = self.recorder.ledger
        function(self.array)
        number, _ = drawing.named(self.recorder, f"{ledger.constant(function)}({self.name})", 0)
        self.origins |= {numbers.name_of(number)}
        self.depends_on(numbers.name_of(number))

    def __iter__(self) -> Iterator[Any]:
        return iter([self[index] for index in range(len(self))])

    def __len__(self) -> int:
        return len(self.array)

    def __bool__(self) -> bool:
        return applied(self.recorder, bool, (self,), {})

    def __float__(self) -> float:
        return float(numbers.settled(applied(self.recorder, float, (self,), {})))

    def __int__(self) -> int:
        return int(numbers.settled(applied(self.recorder, int, (self,), {})))

    def __index__(self) -> int:
        return operator.index(numbers.settled(applied(self.recorder, operator.index, (self,), {})))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # C code asks for such before it asks for others, which are refused
            raise AttributeError(name)
        if name in _FORM:
            return getattr(self.array, name)
        if name == "T":
            return applied(self.recorder, _transposed, (self,), {})
        if name in ("fill", "sort"):
            return functools.partial(self.change, getattr(np.ndarray, name))
        if name not in _METHODS:
            return self.deny("looks into")
        method = getattr(np.ndarray, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("out") is not None:
                return self.deny("writes to")
            return applied(self.recorder, method, (self, *args), kwargs)

        return call


class Rows:
    """An array that is not drawn, of which the step takes what is drawn."""

    def __init__(self, recorder: Recorder, array: Any) -> None:
        self._recorder = recorder
        self._array = array

    def __getitem__(self, key: Any) -> Any:
        return applied(self._recorder, operator.getitem, (self._array, key), {})


def is_row(recorder: Recorder, value: Any) -> bool:
    """Whether a value is a list of numbers and arrays, some of which are drawn."""
    if type(value) not in (list, tuple):
        return False
    drawn = recorder.ledger.drawn.keys()

    def is_drawn(part: Any) -> bool:
        is_early_number = type(part) is numbers.Number and not numbers.is_late(part)
        return type(part) is EarlyArray or (is_early_number and not drawn.isdisjoint(numbers.origins_of(part)))

    parts = [*_leaves(value)]
    return any(map(is_drawn, parts)) and all(is_drawn(one) or type(one) in (bool, int, float) for one in parts)


def _leaves(value: Any) -> Iterator[Any]:
    for part in value:
        if type(part) in (list, tuple):
            yield from _leaves(part)
        elif type(part) is dict:
            yield from _leaves(part.values())
        else:
            yield part


def takes_rows(recorder: Recorder, owner: Any, key: Any) -> bool:
    """Whether rows of an array are taken, or items, by what is drawn."""
    if type(owner) is not np.ndarray or owner.dtype == object:
        return False
    drawn = recorder.ledger.drawn.keys()
    parts = key if type(key) is tuple else (key,)
    is_row_by_number = owner.ndim > len(parts) and not drawn.isdisjoint(_origins(key))
    return any(map(is_early, parts)) or is_row_by_number


def is_written_by_draws(recorder: Recorder, owner: Any, key: Any, value: Any) -> bool:
    """Whether what is drawn goes into an array that the step has made, or decides where something goes."""
    if type(owner) is not np.ndarray or recorder.place_of(owner) is not None:
        return False
    drawn, parts = recorder.ledger.drawn.keys(), (*(key if type(key) is tuple else (key,)), value)
    return any(map(is_early, parts)) or any(not drawn.isdisjoint(_origins(part)) for part in parts)


def is_early(value: Any) -> bool:
    """Whether a value is such an array, or has one in it where NumPy looks for one."""
    return type(value) is EarlyArray or (type(value) in (list, tuple) and any(map(is_early, value)))


def _second(_first: Any, second: Any) -> Any:
    return second


def _transposed(array: Any) -> Any:
    return array.T


def _operation(function: Callable[..., Any], *, is_reflected: bool = False) -> Callable[..., Any]:
    def operate(self: EarlyArray, *others: Any) -> Any:
        if any(isinstance(other, torch.Tensor) for other in others):
            return self.deny("computes with a tensor and")
        return applied(self.recorder, function, (*others, self) if is_reflected else (self, *others), {})

    return operate


def _in_place(function: Callable[..., Any]) -> Callable[..., Any]:
    def operate(self: EarlyArray, other: Any) -> EarlyArray:
        if isinstance(other, torch.Tensor):
            self.deny("computes with a tensor and")
        self.change(function, other)
        return self

    return operate


def _refused(self: EarlyArray, *_args: Any, **_kwargs: Any) -> Any:
    return self.deny("writes to, or shows,")


_BOTH = "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift"
for _name in _BOTH.split():
    _function = getattr(operator, f"{_name}_" if _name in ("and", "or") else _name)
    setattr(EarlyArray, f"__{_name}__", _operation(_function))
    setattr(EarlyArray, f"__r{_name}__", _operation(_function, is_reflected=True))
    setattr(EarlyArray, f"__i{_name}__", _in_place(getattr(operator, f"i{_name}")))
for _name in ("eq", "ne", "lt", "le", "gt", "ge", "neg", "pos", "abs", "invert"):
    setattr(EarlyArray, f"__{_name}__", _operation(getattr(operator, _name)))
_SHOWING = ("hash", "repr", "str", "format", "copy", "deepcopy", "reduce", "reduce_ex")
for _name in ("delitem", "contains", "complex", *_SHOWING):
    setattr(EarlyArray, f"__{_name}__", _refused)


def applied(recorder: Recorder, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a function gives, of arrays, numbers and plain values: computed again at each call."""
    ledger = recorder.ledger
    given = (*args, *kwargs.values())
    origins = frozenset[str]().union(*map(_origins, given))
    texts = [_text(recorder, arg) for arg in args] + [f"{key}={_text(recorder, arg)}" for key, arg in kwargs.items()]
    try:
        result = function(*map(_plain, args), **{key: _plain(arg) for key, arg in kwargs.items()})
    except Exception as error:  # the step may handle it: only its own code can tell
        recorder.refuse(f"computes with an array that it has drawn, which raises {type(error).__name__}", _ADVICE)
        raise
    frozen = [arg.array for arg in _leaves(given) if type(arg) is EarlyArray and arg.is_frozen]
    frozen += [arg for arg in _leaves(given) if type(arg) is np.ndarray]
    return _given(recorder, f"{ledger.constant(function)}({', '.join(texts)})", result, origins, frozen)


def _given(recorder: Recorder, text: str, result: Any, origins: frozenset[str], frozen: Sequence[Any]) -> Any:
    ledger = recorder.ledger
    name = numbers.name_of(ledger.computed(text, result))  # a line of its own each time: arrays change in between
    if result is None:
        return None
    if numbers.is_real(result):
        ledger.assume(f"type({name}) is {ledger.constant(type(result))}")
        return numbers.Number(ledger, name, result, origins)
    if isinstance(result, (bool, np.bool_)):  # one of two ways
        ledger.assume(f"bool({name}) is {bool(result)}")
        return result
    if is_plain(result):
        ledger.assume(f"same({name}, {ledger.constant(result)})")
        return result
    if isinstance(result, np.ndarray):
        is_frozen = any(np.may_share_memory(result, other) for other in frozen)
        return early(recorder, result, name, origins, is_frozen=is_frozen)
    if not isinstance(result, (list, tuple)):
        recorder.refuse(f"makes a {type(result).__name__} of an array that it has drawn", _ADVICE)
    ledger.assume(f"len({name}) == {len(result)}")
    items = [_given(recorder, f"{name}[{index}]", item, origins, frozen) for index, item in enumerate(result)]
    if type(result) in (list, tuple):
        return type(result)(items)
    kind: Any = type(result)
    return kind._make(items)


def early(recorder: Recorder, array: Any, name: str, origins: frozenset[str], *, is_frozen: bool = False) -> EarlyArray:
    """The stand-in for an array that has a name in the ledger."""
    if array.dtype == object or type(array) is not np.ndarray:
        recorder.refuse(f"draws an array of {array.dtype}", _ADVICE)
    ledger = recorder.ledger
    ledger.assume(f"{ledger.constant(form_of)}({name}) == {ledger.constant(form_of(array))}")
    return EarlyArray(recorder, array, name, origins, is_frozen=is_frozen)


def choose(
    recorder: Recorder, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[..., Any] | None:
    """What to call in place of a function that is given arrays, or rows of what is drawn; None to call it as it is."""
    if recorder.whole_draws and _is_made(recorder, function, args, kwargs):
        return lambda *args, **kwargs: applied(recorder, function, args, kwargs)
    if len(args) == 0:
        return None
    if function in _ON_ONE and type(args[0]) is EarlyArray:
        return lambda *args, **kwargs: applied(recorder, function, args, kwargs)
    if function in (np.array, np.asarray) and (is_early(args[0]) or is_row(recorder, args[0])):
        return lambda *args, **kwargs: applied(recorder, function, args, kwargs)
    if not all(map(is_plain, (*args[1:], *kwargs.values()))):
        return None
    root = str(getattr(function, "__module__", None) or "").split(".")[0]
    if root == "numpy" and getattr(function, "__name__", "") in _FUNCTIONS and is_row(recorder, args[0]):
        return lambda *args, **kwargs: applied(recorder, function, args, kwargs)
    is_array = type(args[0]) is EarlyArray and root == "torch"
    if not is_array and (function not in _CONSTRUCTORS or not is_row(recorder, args[0])):
        return None
    if function in _CONSTRUCTORS[:2] and len(args) < 3:
        kwargs = {"device": torch.get_default_device(), **kwargs}  # which is a mode, too
    row = args[0] if is_array else row_of(recorder, args[0])
    shares = is_array and function in _SHARING

    def make(_: Any, *rest: Any, **_kwargs: Any) -> torch.Tensor:
        build: Any = function
        return _tensor(row, lambda array: build(array, *rest, **kwargs), shares=shares)

    return make


def _is_made(recorder: Recorder, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call makes an array in a function that draws, and may write to it what it has drawn."""
    if recorder.is_drawing or function not in _CREATORS:
        return False
    if drawing.key_of(recorder.calling_frame().f_code) not in recorder.whole_draws:
        return False
    return all(is_plain(arg) or isinstance(arg, (type, list)) for arg in (*args, *kwargs.values()))


def row_of(recorder: Recorder, row: Any) -> EarlyArray:
    """A list of numbers that are drawn, as something that a tensor is made of."""
    name = numbers.name_of(recorder.ledger.computed(_text(recorder, row), 0))
    return EarlyArray(recorder, _plain(row), name, _origins(row))


def index_of(recorder: Recorder, part: Any) -> Any:
    """The tensor that torch takes an array or a list for, as an index; other parts of an index as they are."""
    if type(part) is list and is_row(recorder, part) and not is_early(part):
        return _tensor(row_of(recorder, part), torch.tensor)
    if type(part) is not EarlyArray:
        return part
    array = part
    if array.dtype not in _INDICES or array.ndim == 0:
        array.deny("looks into a tensor by")
    return _tensor(array, torch.from_numpy)


def _tensor(array: EarlyArray, make: Callable[[Any], torch.Tensor], *, shares: bool = False) -> torch.Tensor:
    """A tensor that is made of the array of each call: as it is now, unless it `shares` its memory."""
    recorder, ledger, name = array.recorder, array.recorder.ledger, array.name
    if shares:
        recorder.lent_arrays.append(array.array)
    else:
        name = numbers.name_of(ledger.computed(f"{ledger.constant(copy.deepcopy)}({name})", 0))
    with _recording_torch.untraced():
        tensor = make(copy.deepcopy(array.array))
    recorder.drawn_tensors[id(tensor)] = tensor, name, make
    if shares:
        recorder.lent_tensors.add(id(tensor))
    return tensor


def _plain(value: Any) -> Any:
    """A value as this call has it."""
    if type(value) is EarlyArray:
        return value.array
    if type(value) is slice:
        return slice(*map(_plain, (value.start, value.stop, value.step)))
    if type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    return numbers.value_of(value)


def _origins(value: Any) -> frozenset[str]:
    if type(value) is EarlyArray:
        return value.origins
    if type(value) in (list, tuple):
        return frozenset[str]().union(*map(_origins, value))
    if type(value) is slice:
        return _origins((value.start, value.stop, value.step))
    return numbers.origins_of(value)


def _text(recorder: Recorder, value: Any) -> str:
    """How a line spells a value."""
    if type(value) is EarlyArray:
        return value.name
    if type(value) is numbers.Number:
        return recorder.ledger.constant(numbers.settled(value)) if numbers.is_late(value) else numbers.name_of(value)
    if type(value) is slice:
        return f"slice({', '.join(_text(recorder, part) for part in (value.start, value.stop, value.step))})"
    if type(value) in (list, tuple):
        parts = "".join(f"{_text(recorder, part)}, " for part in value)
        return f"[{parts}]" if type(value) is list else f"({parts})"
    if type(value) is np.ndarray and value.dtype != object:
        recorder.expect_content(value)
        return recorder.ledger.constant(value.copy())
    if not is_plain(value) and not isinstance(value, type):
        recorder.refuse(f"computes with an array that it has drawn and a {type(value).__name__}", _ADVICE)
    return recorder.ledger.constant(value)
