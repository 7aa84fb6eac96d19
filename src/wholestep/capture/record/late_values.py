"""What Python computes after the graph has run with values that only that decides, noted as lines.

    noted(np.stack, ([a, b],), {"axis": 1})         b_3 = c_stack([b_1, b_2], axis=(1))

The function is called now as well: with samples, for the form of its result, or with this call's values (`forms`).
"""

from __future__ import annotations

import collections
import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch

from wholestep.capture.record import forms
from wholestep.capture.record.arrays import About, LateArray, LateObject, Memory, MethodOfNumber
from wholestep.capture.record.numbers import Later, Ledger, Number, is_late, kinds_of, name_of, origins_of, value_of
from wholestep.capture.record.places import is_plain

if TYPE_CHECKING:
    from wholestep.capture.record.late import Code

_CONTAINERS = (list, tuple, dict, collections.deque, slice)
_TOTAL = frozenset(
    [
        getattr(operator, f"__{name}__")
        for name in ["add", "sub", "mul", "truediv", "eq", "ne", "lt", "le", "gt", "ge", "neg", "pos", "abs"]
    ]
)
_OF_INDICES = (operator.getitem, np.take)
_MOST_PARTS = 10_000
_MOST_LOOKED_AT = 64


def is_late_value(value: Any) -> bool:
    """Whether a value is one that only the graph decides: a number, an array, or what was made of some."""
    return type(value) in (LateArray, LateObject) or is_late(value)


def late_parts(value: Any, depth: int = 4) -> Iterator[Any]:
    """The late values among a value and what it holds."""
    if is_late_value(value):
        yield value
    elif depth and isinstance(value, _CONTAINERS):
        parts = _parts(value)
        for part in parts if len(parts) <= _MOST_PARTS else ():
            yield from late_parts(part, depth - 1)


def has_late(*values: Any) -> bool:
    """Whether there is a late value among some values and what they hold."""
    return next(late_parts(values), None) is not None


def _parts(value: Any) -> list[Any]:
    if isinstance(value, slice):
        return [value.start, value.stop, value.step]
    return [*value.values()] if isinstance(value, dict) else [*value]


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """A value with all late values in it, and numbers known before, exchanged."""
    if type(value) in (Number, _Bound) or is_late_value(value):
        return change(value)
    if isinstance(value, np.ndarray):
        return value.copy()
    if not isinstance(value, _CONTAINERS) or (is_plain(value) and not isinstance(value, slice)):
        return value
    if isinstance(value, slice):
        return slice(*(mapped(part, change) for part in _parts(value)))
    if isinstance(value, dict):
        return {key: mapped(part, change) for key, part in value.items()}
    parts = [mapped(part, change) for part in value]
    kind: Any = type(value)
    if isinstance(value, collections.deque):
        return collections.deque(parts, value.maxlen)
    return kind._make(parts) if hasattr(kind, "_make") else (tuple if isinstance(value, tuple) else list)(parts)


@dataclass(frozen=True)
class _Bound:
    """In place of a late value: how to find what it is now, whatever becomes of it."""

    find: Callable[[], Any]


def finder(value: Any) -> Callable[[], Any]:
    """How to find a value as it is in this call, and at this place of the step."""

    def bind(one: Any) -> Any:
        if type(one) is Number:
            return _Bound(lambda: value_of(one))
        about = one.late
        return _Bound(about.find if about.tensor is None else about.ledger.leaf_of(about.tensor)[1])

    bound = mapped(value, bind)
    return lambda: mapped(bound, lambda one: one.find())


def samples(value: Any, index: int, *, is_index: bool = False) -> Any:
    """A value with samples for what is late; as an index, samples point at what is there."""

    def sample(one: Any) -> Any:
        if type(one) is not Number:
            found = one.late.samples()[index % len(one.late.samples())]
            is_whole = is_index and isinstance(found, np.ndarray) and found.dtype.kind in "iu"
            return np.zeros_like(found) if is_whole else found
        if not is_late(one):
            return value_of(one)
        kind = kinds_of(one)[0]
        return kind(0 if is_index else 1 - index)

    return mapped(value, sample)


@dataclass
class ValueLedger(Ledger):
    """Lines of calls of all kinds, besides arithmetic of numbers."""

    looked: Callable[[str, str], NoReturn] = field(default=lambda what, advice: _is_over())
    """Refuses what Python asks of a value."""
    leaf_of: Callable[[torch.Tensor], tuple[str, Callable[[], Any]]] = field(default=lambda tensor: _is_over())
    """The name of an array of what a traced tensor holds now, and how to find it."""
    node_of: Callable[[torch.Tensor], Any] = field(default=lambda tensor: _is_over())
    can_find: Callable[[], bool] = field(default=lambda: False)
    """Whether this call's values can be had."""
    has_arrays: bool = False
    may_raise_handled: Callable[[], bool] = field(default=lambda: False)

    # What subclasses do

    def slice_of(self, wanted: Iterable[str], assumptions: Iterable[str] = ()) -> Code:
        raise NotImplementedError

    def assume_form(self, name: str, form: Any) -> None:
        raise NotImplementedError

    def text_of_line(self, line: str, values: Iterable[Number]) -> str:
        raise NotImplementedError

    # Arrays of tensors

    def array(self, tensor: torch.Tensor, make_samples: Callable[[], list[Any]], *, is_fixed: bool) -> LateArray:
        """The array that shares the memory of a traced tensor."""
        self.has_arrays = True
        find = lambda: self.leaf_of(tensor)[1]()  # noqa: E731
        return LateArray(
            About(self, None, _once(make_samples), find, frozenset(), is_fixed, tensor, {Memory(tensor): None})
        )

    def name(self, value: Any) -> str:
        """How a line names a late value as it is now."""
        if type(value) is Number:
            return self.named(value)
        about = value.late
        if about.tensor is not None:
            return self.leaf_of(about.tensor)[0]
        for memory, seen in about.seen.items():
            if (self.node_of(memory.tensor) if memory.tensor is not None else memory.version) != seen:
                self.looked(
                    "uses a view of an array that was written to since",
                    "Take it where it is used, or copy it (.copy())",
                )
        assert about.name is not None
        return about.name

    def require_form(self, value: Any) -> None:
        """Python goes on by a value's form, which may be another one at another call: that is looked at then."""
        about = value.late
        if not about.is_certain:
            if about.name is None or not self.can_find():
                value.refuse()
            self.assume_form(self.name(value), forms.form_of(about.find()))
            about.is_certain = True

    # Calls

    def noted(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, of_forms: bool = True
    ) -> Any:
        """A call that is made after the graph has run; `of_forms` if the form of its result depends on forms alone."""
        given = [*late_parts((args, kwargs))]
        for value in given:
            if type(value) is LateObject:
                value.refuse()
        if _has_tensors((args, kwargs)):
            self.looked("computes with an array and a tensor", "Make a tensor of the array first (torch.from_numpy)")
        if function not in _TOTAL and not forms.never_raises(getattr(function, "__name__", "?")):
            self._require_unhandled(given)
        text = self.call_text(function, args, kwargs)
        found = finder((args, kwargs))
        find = _once(lambda: _called(function, *found()))
        is_index = function in _OF_INDICES
        of_forms = of_forms and not (is_index and _chooses(args[1])) and not _has_late_sizes(function, args, kwargs)
        is_certain = of_forms and all(map(_is_certain, given))

        def call(index: int) -> Any:
            first = samples(args[:1], index)
            rest = samples(args[1:], index, is_index=is_index)
            return function(*first, *rest, **samples(kwargs, index))

        results = forms.tried(call, 2) if is_certain else []
        is_certain = len({repr(forms.form_of(result)) for result in results}) == 1
        if not is_certain:
            if not self.can_find():
                given[0].refuse() if type(given[0]) is not Number else self.looked(*_ABOUT_NUMBERS)
            results = [find()]
        seen = self._shared(results, args, kwargs, given, is_certain=is_certain)
        origins = frozenset[str]().union(*map(_origins, given)) | self._origins_of_tensors(given)
        return self._wrapped(text, results, find, origins, is_certain=is_certain, seen=seen)

    @property
    def is_used(self) -> bool:
        """Whether there are values that lines compute, or will."""
        return self.has_arrays

    def noted_call(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """A call of one of Python's own functions of numbers."""
        return self.noted(function, args, kwargs)

    def noted_whole(self, text: str, result: Any, given: Any) -> Any:
        """The call of a function that runs after the graph as it is; `result` is what it gives in this call."""
        origins = frozenset[str]().union(*map(_origins, late_parts(given))) | self._origins_of_tensors(
            late_parts(given)
        )
        if result is not None and (type(result) not in (tuple, dict) or len(result) > _MOST_LOOKED_AT):
            return self._wrapped(text, [result], lambda: result, origins, is_certain=False, seen={Memory(): 0})
        name = self.line(text)
        self.assume_form(name, forms.form_of(result))
        return None if result is None else self._parts(name, result, origins)

    def parts_of(self, value: LateObject) -> Any:
        """What stands in for a list, a tuple or a dict, once it is certain what it holds."""
        about = value.late
        found = about.find()
        if type(found) not in (list, tuple, dict) or len(found) > _MOST_LOOKED_AT:
            value.refuse()
        self.require_form(value)
        return self._parts(self.name(value), found, about.origins)

    def _parts(self, name: str, found: Any, origins: frozenset[str]) -> Any:
        told = [
            (self.constant(key), part) for key, part in (found.items() if type(found) is dict else enumerate(found))
        ]
        made = [
            self._wrapped(
                f"{name}[{key}]", [part], lambda part=part: part, origins, is_certain=True, seen={Memory(): 0}
            )
            for key, part in told
        ]
        return dict(zip(found, made, strict=True)) if type(found) is dict else type(found)(made)

    def require_kind(self, number: Number) -> None:
        """Python goes on by the type of a number, which may be another one at another call."""
        later: Any = number._value  # pyright: ignore[reportPrivateUsage]
        if type(later) is Later and not later.is_certain and name_of(number) not in self._looked_at:
            if not self.can_find():
                self.looked(*_ABOUT_NUMBERS)
            self._looked_at.add(name_of(number))
            self.assume_form(name_of(number), forms.form_of(value_of(number)))

    _looked_at: set[str] = field(default_factory=set[str])

    def noted_of_numpy(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of one of NumPy's functions."""
        name = forms.name_of_numpys(function)
        if name is None or kwargs.get("out") is not None:
            self.looked(
                f"calls {getattr(function, '__name__', 'NumPy')} with an array that is only known when the step runs",
                "Call it after the step, with what that returns",
            )
        of_forms = forms.is_of_forms(str(name)) and (name != "where" or len(args) + len(kwargs) > 1)
        return self.noted(function, args, kwargs, of_forms=of_forms)

    def method_called(self, owner: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`array.mean(axis=1)`, `number.round(2)`."""
        is_array = type(owner) is LateArray
        if is_array and owner.late.tensor is not None and not args and not kwargs and name in ("item", "tolist"):
            return getattr(owner.late.tensor, name)()
        if is_array and forms.is_in_place(name):
            return self.written(owner, _Method(name), *args, **kwargs)
        if (is_array and not forms.is_known(name)) or kwargs.get("out") is not None:
            owner.refuse()
        return self.noted(_Method(name), (owner, *args), kwargs, of_forms=forms.is_of_forms(name))

    def attribute_of(self, number: Number, name: str) -> Any:
        kinds = kinds_of(number)
        found = getattr(kinds[0], name)
        if name in ("shape", "ndim", "size", "dtype", "itemsize", "nbytes") and len(kinds) == 1:
            return getattr(kinds[0](0), name)
        if callable(found):
            return MethodOfNumber(self, number, name)
        return self.noted(getattr, (number, name), {})

    def written(self, array: LateArray, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Something is written to an array, in place."""
        about = array.late
        if any(memory.tensor is not None for memory in about.seen) or about.name is None:
            self.looked(
                "writes to an array that shares its memory with a tensor", "Copy the array first (array.copy())"
            )
        if kwargs.get("out") is not None or _has_tensors((args, kwargs)):
            array.refuse()
        self._require_unhandled([array])
        self.name(array)
        given = [*late_parts((args, kwargs))]
        writing = _Writing(function)
        text = self.call_text(writing, (array, *args), kwargs)
        before, find, found = about.samples(), about.find, finder((args, kwargs))
        is_certain = all(map(_is_certain, given))

        def call(index: int) -> Any:
            array = before[index % len(before)].copy()
            if not is_certain:
                return _called(writing, (array, *found()[0]), found()[1])
            told = samples(args, index, is_index=function is operator.setitem)
            return writing(array, *told, **samples(kwargs, index))

        made = forms.tried(call, 2)
        about.find = _once(lambda: _called(writing, (find().copy(), *found()[0]), found()[1]))
        about.samples = lambda: made
        about.name = self.line(text)
        about.origins |= frozenset[str]().union(*map(_origins, given)) | self._origins_of_tensors(given)
        for memory in about.seen:
            memory.version += 1
            about.seen[memory] = memory.version

    def text_of(self, function: Callable[..., str], value: Any, *spec: str) -> str:
        """What a function makes of an array: text in which a mark stands for what is missing."""
        arguments = ", ".join([self.name(value), *map(repr, spec)])
        return self.text_of_line(f"{self.constant(function)}({arguments})", [])

    def call_text(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        told = [self.spelled(arg) for arg in args] + [f"{key}={self.spelled(arg)}" for key, arg in kwargs.items()]
        return f"{self.constant(function)}({', '.join(told)})"

    def spelled(self, value: Any) -> str:
        """How a line spells an argument."""
        if type(value) is Number or is_late_value(value):
            return self.name(value)
        if type(value) in (torch.SymInt, torch.SymFloat):
            return self.constant(int(value) if type(value) is torch.SymInt else float(value))
        if isinstance(value, np.ndarray):
            return self.constant(value.copy())
        if isinstance(value, slice):
            return f"slice({', '.join(map(self.spelled, _parts(value)))})"
        if not isinstance(value, _CONTAINERS) or (is_plain(value) and not has_late(value)):
            return self.constant(value)
        if isinstance(value, dict):
            return f"{{{', '.join(f'{self.constant(key)}: {self.spelled(part)}' for key, part in value.items())}}}"
        parts = "".join(f"{self.spelled(part)}, " for part in _parts(value))
        if isinstance(value, collections.deque):
            return f"{self.constant(collections.deque)}([{parts}], {value.maxlen})"
        if isinstance(value, list):
            return f"[{parts}]"
        if hasattr(value, "_make"):
            return f"{self.constant(type(value)._make)}([{parts}])"  # pyright: ignore[reportAttributeAccessIssue]
        return f"({parts})"

    def line(self, text: str) -> str:
        """The name of what a line computes."""
        made = self.computed(text, 0)
        return name_of(made)

    def _require_unhandled(self, given: Iterable[Any]) -> None:
        if self.may_raise_handled():
            for value in given:
                value.refuse() if type(value) is not Number else self.require_known(value)

    def _origins_of_tensors(self, given: Iterable[Any]) -> frozenset[str]:
        return frozenset(
            self.name(value) for value in given if type(value) is LateArray and value.late.tensor is not None
        )

    def _shared(
        self, results: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Any], *, is_certain: bool
    ) -> dict[Memory, Any]:
        """The memory that arrays of a result share with what the call was given."""
        seen: dict[Memory, Any] = {}
        made = [*forms.arrays_in(results)]
        for value in given if made else ():
            if type(value) is LateArray:
                before = value.late.samples() if is_certain else [value.late.find()]
                if any(np.may_share_memory(one, other) for one in before for other in made):
                    for memory, then in value.late.seen.items():
                        tensor = memory.tensor if then is None else None
                        seen[memory] = then if tensor is None else self.node_of(tensor)
        for array in forms.arrays_in([*args, *kwargs.values()]):
            if any(np.may_share_memory(array, one) for one in made):
                self.looked("makes a view of an array by one that is only known when the step runs", "Copy it first")
        return seen or ({Memory(): 0} if made else {})

    def _wrapped(
        self,
        text: str,
        results: list[Any],
        find: Callable[[], Any],
        origins: frozenset[str],
        *,
        is_certain: bool,
        seen: dict[Memory, Any],
    ) -> Any:
        """What stands in for a result; `text` is a line that makes it."""
        first = results[0]
        is_group = type(first) in (list, tuple) or (isinstance(first, tuple) and hasattr(first, "_make"))
        if is_group and (is_certain or isinstance(first, tuple)):  # as `np.nonzero` gives one for each dimension
            name = self.line(text)
            parts = [
                self._wrapped(
                    f"{name}[{index}]",
                    [one[index] for one in results],
                    lambda index=index: find()[index],
                    origins,
                    is_certain=is_certain,
                    seen=seen,
                )
                for index in range(len(first))
            ]
            kind: Any = type(first)
            return kind._make(parts) if hasattr(kind, "_make") else kind(parts)
        if isinstance(first, np.ndarray) and first.dtype != object:
            self.has_arrays = True
            return LateArray(About(self, self.line(text), lambda: results, find, origins, is_certain, None, seen))
        kinds = tuple(dict.fromkeys(map(type, results)))
        if all(issubclass(kind, (int, float, np.number, np.bool_)) for kind in kinds) and not isinstance(
            first, np.complexfloating
        ):
            return self.computed(text, Later(kinds, find, is_certain), origins)
        if type(first) is str:
            return self.text_of_line(text, [])
        return LateObject(About(self, self.line(text), lambda: results, find, origins, is_certain=False))


_ABOUT_NUMBERS = ("computes with a number that is only known when the step runs", "Compute with it after the call")


class _Method:
    """A method by its name, to be called on whatever has it."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, owner: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(owner, self.__name__)(*args, **kwargs)


class _Writing:
    """A function that writes to its first argument, which is the result."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.__name__ = getattr(function, "__name__", "write")

    def __call__(self, array: Any, *args: Any, **kwargs: Any) -> Any:
        self._function(array, *args, **kwargs)
        return array


def _once(find: Callable[[], Any]) -> Callable[[], Any]:
    found: list[Any] = []

    def get() -> Any:
        if not found:
            found.append(find())
        return found[0]

    return get


def _called(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return function(*args, **kwargs)


def _is_certain(value: Any) -> bool:
    if type(value) is Number:
        inner: Any = value._value  # pyright: ignore[reportPrivateUsage]
        return type(inner) is not Later or (inner.is_certain and len(inner.kinds) == 1)
    return value.late.is_certain


def _origins(value: Any) -> frozenset[str]:
    return origins_of(value) if type(value) is Number else value.late.origins


def _has_tensors(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    return isinstance(value, _CONTAINERS) and not is_plain(value) and any(map(_has_tensors, _parts(value)))


def _chooses(key: Any) -> bool:
    """Whether an index takes as much as values say: a mask, a slice to a late number."""
    keys = key if type(key) is tuple else (key,)
    for part in keys:
        if isinstance(part, slice) and has_late(part):
            return True
        if type(part) is LateArray and (not part.late.is_certain or part.late.sample.dtype.kind == "b"):
            return True
        if type(part) in (list, tuple) and has_late(part) and any(_is_truth(one) for one in late_parts(part)):
            return True
    return False


def _is_truth(value: Any) -> bool:
    return type(value) is not Number or any(kind in (bool, np.bool_) for kind in kinds_of(value))


def _has_late_sizes(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a late number may stand for a size, an axis or a count, and not for one to compute with."""
    name = forms.name_of_numpys(function) if not isinstance(function, _Method) else function.__name__
    if name is None or name in ("", "clip", "isclose", "allclose", "full_like", "where", "item"):
        return False
    return has_late(*[part for part in (*args[1:], *kwargs.values()) if not _is_data(part)])


def _is_data(value: Any) -> bool:
    return type(value) is LateArray


def _is_over() -> NoReturn:
    raise AssertionError("the trace is over")
