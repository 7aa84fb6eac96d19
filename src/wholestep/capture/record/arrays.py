"""Arrays that Python has after the graph has run, and what it computes with them by NumPy.

    accuracy = np.mean(np.argmax(out.detach().numpy(), axis=1) == labels)
    late_array = <the graph's out>;  b_1 = c_argmax(late_array, axis=(1));  b_2 = c_eq(b_1, ...);  b_3 = c_mean(b_2)

While the step is traced nobody knows what is in one. Its form is known wherever that depends on forms alone: each
function is tried out on samples, arrays of the same form (`forms`). What asks for a value to go on by is refused.

An array of a tensor is the tensor's memory: it is read anew at each use, and a view of it is of no use any more once
somebody has written to the tensor (`Memory`).
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch

if TYPE_CHECKING:
    from wholestep.capture.record.late_values import ValueLedger


@dataclass(eq=False)
class Memory:
    """What arrays lie in: that of a traced tensor, or of its own; `version` counts what was written to the latter."""

    tensor: torch.Tensor | None = None
    version: int = 0


@dataclass(eq=False)
class About:
    """What is known of a value that only the graph decides.

    `name` is that of its line, None for an array of a tensor; `samples` are values of the same form; `find` gives the
    value that it has in this call. `seen` is the memory that it shares, as it was when the value was made.
    """

    ledger: ValueLedger
    name: str | None
    samples: Callable[[], list[Any]]
    find: Callable[[], Any]
    origins: frozenset[str]
    is_certain: bool
    """Whether it has this form at each call, and not only in this one."""
    tensor: torch.Tensor | None = None
    seen: dict[Memory, Any] = field(default_factory=dict[Memory, Any])

    @property
    def sample(self) -> Any:
        return self.samples()[0]


class LateObject:
    """Stands in for something of Python that nobody can look into while the step is traced: to return, keep or pass."""

    __slots__ = ("late",)

    def __init__(self, about: About) -> None:
        self.late = about

    def refuse(self) -> NoReturn:
        self.late.ledger.looked(
            "looks into something that it has made of values which are only known when the step runs",
            "Return it, or keep it, and look into it after the call",
        )
        raise AssertionError("refused")

    def __getattr__(self, name: str) -> Any:
        return self.refuse()

    def __len__(self) -> int:
        return len(self._parts())

    def __iter__(self) -> Iterator[Any]:
        return iter(self._parts())

    def __getitem__(self, key: Any) -> Any:
        return self._parts()[key]

    def _parts(self) -> Any:
        """What a list, tuple or dict holds, which is then expected to have this form at each call."""
        return self.late.ledger.parts_of(self)


class LateArray:
    """Stands in for an array; whoever asks is told it is one."""

    __slots__ = ("late",)

    def __init__(self, about: About) -> None:
        self.late = about

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        return np.ndarray

    @__class__.setter
    def __class__(self, kind: type) -> None:
        self.refuse()

    def refuse(self) -> NoReturn:
        self.late.ledger.looked(
            "looks into an array of a tensor (.numpy()), which is only known when the step runs",
            "Return the array, or keep it, and look into it after the call",
        )
        raise AssertionError("refused")

    def __getattr__(self, name: str) -> Any:
        about = self.late
        if name in _OF_FORM:
            about.ledger.require_form(self)
            if name == "shape" and about.tensor is not None:
                return tuple(about.tensor.shape)
            return getattr(about.sample, name)
        if name in ("T", "real", "imag"):
            return about.ledger.noted(getattr, (self, name), {})
        found = getattr(np.ndarray, name, None)
        if name.startswith("__") or not callable(found):
            return self.refuse() if found is not None else _missing(name)
        return LateMethod(self, name)

    def __len__(self) -> int:
        self.late.ledger.require_form(self)
        return len(self.late.sample)

    def __iter__(self) -> Iterator[Any]:
        return iter([self[index] for index in range(len(self))])

    def __bool__(self) -> bool:
        return bool(self.late.ledger.noted(bool, (self,), {}))

    def __contains__(self, value: Any) -> bool:
        return bool(self.late.ledger.noted(operator.contains, (self, value), {}))

    def __getitem__(self, key: Any) -> Any:
        return self.late.ledger.noted(operator.getitem, (self, key), {})

    def __setitem__(self, key: Any, value: Any) -> None:
        self.late.ledger.written(self, operator.setitem, key, value)

    def __hash__(self) -> int:
        raise TypeError("unhashable type: 'numpy.ndarray'")

    def __str__(self) -> str:
        return self.late.ledger.text_of(str, self)

    def __repr__(self) -> str:
        return self.late.ledger.text_of(repr, self)

    def __format__(self, spec: str) -> str:
        return self.late.ledger.text_of(format, self, spec)

    def __round__(self, digits: int | None = None) -> Any:
        return self.late.ledger.noted(round, (self,) if digits is None else (self, digits), {})

    def __copy__(self) -> Any:
        return self.late.ledger.noted(copy.copy, (self,), {})

    def __deepcopy__(self, _memo: Any) -> Any:
        return self.late.ledger.noted(copy.deepcopy, (self,), {})

    def __array_ufunc__(self, function: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        return self.late.ledger.noted_of_numpy(
            function if method == "__call__" else getattr(function, method), inputs, kwargs
        )

    def __array_function__(self, function: Any, _types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.late.ledger.noted_of_numpy(function, args, kwargs)


_OF_FORM = ("shape", "ndim", "size", "dtype", "itemsize", "nbytes")


def _missing(name: str) -> NoReturn:
    raise AttributeError(f"'numpy.ndarray' object has no attribute '{name}'")


class LateMethod:
    """A method of an array, or of a number: called, it is noted."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name = owner, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.owner.late.ledger.method_called(self.owner, self.name, args, kwargs)


class MethodOfNumber(LateMethod):
    """A method of a number."""

    def __init__(self, ledger: ValueLedger, owner: Any, name: str) -> None:
        super().__init__(owner, name)
        self._ledger = ledger

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._ledger.method_called(self.owner, self.name, args, kwargs)


def _operator(name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    function = getattr(operator, f"__{name}__")

    def forward(self: LateArray, other: Any) -> Any:
        if isinstance(other, torch.Tensor):
            return NotImplemented
        return self.late.ledger.noted(function, (self, other), {})

    def reflected(self: LateArray, other: Any) -> Any:
        return self.late.ledger.noted(function, (other, self), {})

    return forward, reflected


def _in_place(name: str) -> Callable[..., Any]:
    function = getattr(operator, f"__i{name}__")

    def write(self: LateArray, other: Any) -> Any:
        self.late.ledger.written(self, function, other)
        return self

    return write


def _unary(name: str) -> Callable[..., Any]:
    function = getattr(operator, f"__{name}__")
    return lambda self: self.late.ledger.noted(function, (self,), {})


def _refused(self: LateArray, *_args: Any, **_kwargs: Any) -> Any:
    return self.refuse()


_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift")
for _name in _BINARY:
    _forward, _reflected = _operator(_name)
    setattr(LateArray, f"__{_name}__", _forward)
    setattr(LateArray, f"__r{_name}__", _reflected)
    setattr(LateArray, f"__i{_name}__", _in_place(_name))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(LateArray, f"__{_name}__", _operator(_name)[0])
for _name in ("neg", "pos", "abs", "invert"):
    setattr(LateArray, f"__{_name}__", _unary(_name))
for _name in ("float", "int", "complex", "index", "delitem", "reduce", "reduce_ex", "array", "buffer"):
    setattr(LateArray, f"__{_name}__", _refused)
for _name in ("array_interface", "array_struct"):
    setattr(LateArray, f"__{_name}__", property(_refused))
_ASKED = """
    add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow and rand or ror xor rxor
    eq ne lt le gt ge bool int float complex index setitem delitem contains hash repr str format
    neg pos abs invert round call enter exit array reduce reduce_ex
"""
for _name in _ASKED.split():
    setattr(LateObject, f"__{_name}__", lambda self, *_args, **_kwargs: self.refuse())


def array_of(tensor: torch.Tensor) -> Any:
    return tensor.detach().numpy()
