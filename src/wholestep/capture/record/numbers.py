"""Python numbers that change from call to call: each is a `Number`, which remembers how it came about.

A step that reads a momentum, an epoch or a draw of `random` computes with it in Python. Captured once, that arithmetic
has to run again at each call, in the same order and with the same rounding. So the trace is handed a `Number` in place
of the value: it computes with real numbers (`value`), and writes down each operation in a `Ledger`, one line of Python
each:

    ema.n += 1                                  a_n = <ema.n>
    decay = min(0.99, (1 + n) / (10 + n))       b_1 = a_n + 1;  b_2 = 1 + b_1;  b_3 = 10 + b_1;  b_4 = b_2 / b_3
                                                assumed: not b_4 < 0.99

Names of numbers tell what they are (those that are computed: as a hash), not which came first: ranks compare graphs and
numbers by them, and one rank may have others besides.

Nobody can take the value out unseen: a comparison, a use as an index, `float()`, hashing or formatting leaves an
assumption, and a call that breaks one is captured again. So do an operation that raises, and one whose result may be
of another type (`2**n` is a float for a negative `n`). A `Number` is not a float for C code, which would read it
without asking, but `isinstance` says that it is one.

What the graph itself computes may be a number too (`loss.item()`): it stands in a ledger of its own (`late`), whose
lines run after the graph. Its value is found only if Python has to know it (`Later`).
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import itertools
import math
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from types import BuiltinFunctionType, FunctionType
from typing import Any, ClassVar

import numpy as np
import torch

_BINARY: dict[str, str] = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "truediv": "/",
    "floordiv": "//",
    "mod": "%",
    "pow": "**",
}
_BITS: dict[str, str] = {"and": "&", "or": "|", "xor": "^", "lshift": "<<", "rshift": ">>"}
_COMPARISONS: dict[str, str] = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
_OPERATORS: dict[str, Callable[..., Any]] = {
    **{symbol: getattr(operator, name) for name, symbol in _BINARY.items()},
    **{
        symbol: getattr(operator, name.rstrip("_") + "_" if name in ("and", "or") else name)
        for name, symbol in _BITS.items()
    },
    **{symbol: getattr(operator, name) for name, symbol in _COMPARISONS.items()},
}
_PLAIN_NUMBERS = (int, float, bool)
_TOTAL: tuple[Any, ...] = (
    *(operator.add, operator.sub, operator.mul, operator.neg, operator.pos, abs, float, max, min),
    *(math.isfinite, math.isnan, math.isinf, np.isfinite, np.isnan, np.isinf),
    *(operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne),
)
"""What never raises."""
_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclass
class Ledger:
    """The arithmetic of one trace, as lines of Python in the order in which it happened.

    `leaf` is told where a number comes from and gives it a name; `lines` compute all others from those. `assumptions`
    are lines too: `assume(...)` stops a call for which something else would have come out. `constants` are objects that
    lines name.
    """

    lines: list[str] = field(default_factory=list[str])
    constants: dict[str, Any] = field(default_factory=dict[str, Any])
    leaves: dict[str, Any] = field(default_factory=dict[str, Any])
    """Name of each number that is read, not computed, and the path to where it is read."""
    drawn: dict[str, int] = field(default_factory=dict[str, int])
    """Name of each value that is drawn, and which of the step's draws it is."""
    symbol_of: Callable[[Number], Any] = lambda number: float(number)
    """The trace's own symbol for a number, for arithmetic with other symbols (learning rates, step counts)."""
    text_later: Callable[..., str] | None = None
    """Makes text of a number that is put in after the graph has run; None if its value is taken for granted."""
    is_late: ClassVar[bool] = False
    _taken: set[str] = field(default_factory=set[str])

    def leaf(self, value: int | float, path: tuple[Any, ...]) -> Number:
        """The number that stands at the end of a path."""
        parts = [step.value if key is None else _word(key) for step, key in path[1:]]
        name = self._new_name("_".join(["a", *parts]))
        self.leaves[name] = path
        return Number(self, name, value, frozenset([name]))

    def steady_leaf(self, value: int | float, path: tuple[Any, ...]) -> Number:
        """The same of a place that nothing else expects a number at: one of this type."""
        number = self.leaf(value, path)
        self.assume(f"type({name_of(number)}) is {self.constant(type(value))}")
        return number

    def object_leaf(self, path: tuple[Any, ...]) -> str:
        """The name of an object that stands at the end of a path."""
        known = next((name for name, other in self.leaves.items() if other == path), None)
        return name_of(self.leaf(0, path)) if known is None else known

    def require_known(self, *_: Any) -> None:
        """Python is about to take the values of some numbers, and to go on by what they are: here it may."""

    def text(self, function: Callable[..., str], number: Number, *spec: str) -> str:
        """What a function makes of a number: put in later, or of its value, which is taken for granted then."""
        if self.text_later is not None:
            return self.text_later(function, number, *spec)
        return function(settled(number), *spec)

    def require_unhandled(self, *_: Any) -> None:
        """Python is about to compute something of some numbers that may raise."""

    def note_raising(self, number: Number) -> None:
        """Python may have raised in computing a number."""

    def named(self, number: Number) -> str:
        """How a line spells a number, which may stand in another ledger."""
        return name_of(number)

    def attribute_of(self, number: Number, name: str) -> Any:
        """An attribute of a number."""
        return getattr(settled(number), name)

    def noted(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a function gives for arguments, some of them not numbers: computed later, or of settled ones."""
        return function(*map(settled, args), **{key: settled(value) for key, value in kwargs.items()})

    def constant(self, value: Any) -> str:
        """How a line spells a value: numbers as they are, other objects by a name."""
        assert type(value) is not Number, "a number that changes is no constant"
        if type(value) in (bool, int, type(None)) or (type(value) is float and math.isfinite(value)):
            return f"({value!r})"
        name = self._new_name(f"c_{_word(value)}")
        self.constants[name] = value
        return name

    def computed(self, text: str, value: int | float | Later, origins: frozenset[str] = frozenset()) -> Number:
        """The result of one operation on numbers that come from some leaves."""
        name = self._new_name(f"b_{hashlib.sha256(text.encode()).hexdigest()[:8]}")
        self.lines.append(f"{name} = {text}")
        return Number(self, name, value, origins)

    def computed_alike(self, text: str, value: int | float, origins: frozenset[str] = frozenset()) -> Number:
        """The result of an operation that may give another type for other numbers: the trace went on with this one."""
        number = self.computed(text, value, origins)
        self.assume(f"type({name_of(number)}) is {self.constant(type(value))}")
        return number

    def assume(self, text: str, *_: Any, outcome: bool | None = None) -> None:
        """The trace goes on with one outcome of a question: a call that answers otherwise needs another trace."""
        line = f"assume({text})"
        if line not in self.lines[-8:]:
            self.lines.append(line)

    def _new_name(self, wanted: str) -> str:
        candidates = itertools.chain([wanted], (f"{wanted}_{number}" for number in itertools.count(2)))
        name = next(candidate for candidate in candidates if candidate not in self._taken)
        self._taken.add(name)
        return name


def _word(value: Any) -> str:
    """A value as a part of an identifier: keys of places, named objects; of others, what they are."""
    is_named = isinstance(value, (type, FunctionType, BuiltinFunctionType, np.ufunc))
    word = str(value) if type(value) in (str, int) else value.__name__ if is_named else type(value).__name__
    return re.sub(r"\W+", "_", word, flags=re.ASCII)[:40]


@dataclass(frozen=True)
class Later:
    """The value of a number that nobody has had to know so far: its type, and how to find it.

    The type may depend on the value (`2**n`, `max(0, loss)`): then it is one of several.
    """

    kinds: tuple[type, ...]
    find: Callable[[], Any]
    is_certain: bool = True
    """Whether it is of one of these types at each call, and not only in this one."""

    @property
    def kind(self) -> type:
        return self.kinds[0]


class Number:
    """A number of this call that may be another one in the next; computes like an int or a float."""

    __slots__ = ("_ledger", "_name", "_origins", "_value")

    def __init__(self, ledger: Ledger, name: str, value: int | float | Later, origins: frozenset[str]) -> None:
        self._ledger = ledger
        self._name = name
        self._value = value
        self._origins = origins

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride, reportIncompatibleVariableOverride]
        """What `isinstance` looks at besides the type."""
        return kind_of(self)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Torch lets arguments of unknown types pass if they have this; the trace's mode has exchanged it by then."""
        return func(*map(settled, args), **{key: settled(value) for key, value in (kwargs or {}).items()})

    __array_ufunc__ = None
    """Arrays leave operators to the number, which is then taken for granted."""

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return np.array(settled(self), *args, **kwargs)

    def __float__(self) -> float:
        return float(settled(self))

    def __int__(self) -> int:
        return int(settled(self))

    def __index__(self) -> int:
        return operator.index(settled(self))

    def __complex__(self) -> complex:
        return complex(settled(self))

    def __bool__(self) -> bool:
        if self._ledger.is_late:
            return _truth_of_comparison(self) if function_behind(self) in _COMPARING else _truth(self)
        return bool(_compared(self, "!=", 0))

    def __hash__(self) -> int:
        return hash(settled(self))

    def __format__(self, spec: str) -> str:
        return self._ledger.text(format, self, spec)

    def __repr__(self) -> str:
        return self._ledger.text(repr, self)

    def __str__(self) -> str:
        return self._ledger.text(str, self)

    def __neg__(self) -> Any:
        return called(operator.neg, (self,), {})

    def __pos__(self) -> Any:
        return called(operator.pos, (self,), {})

    def __abs__(self) -> Any:
        return called(abs, (self,), {})

    def __invert__(self) -> Any:
        return called(operator.invert, (self,), {})

    def __round__(self, digits: int | None = None) -> Any:
        return called(round, (self,) if digits is None else (self, digits), {})

    def __trunc__(self) -> Any:
        return called(math.trunc, (self,), {})

    def __floor__(self) -> Any:
        return called(math.floor, (self,), {})

    def __ceil__(self) -> Any:
        return called(math.ceil, (self,), {})

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> Any:
        return other // self, other % self

    def __getattr__(self, name: str) -> Any:
        """Whatever else a number has (`is_integer`, `bit_length`): asked of the value, which is taken for granted."""
        if self._ledger.is_late:
            return self._ledger.attribute_of(self, name)
        if name == "item" and issubclass(kind_of(self), np.generic):
            return lambda: called(_item_of, (self,), {})
        return getattr(settled(self), name)

    def __copy__(self) -> Number:
        return self

    def __deepcopy__(self, _memo: Any) -> Number:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return settled(self).__reduce_ex__(protocol)


def _item_of(number: Any) -> Any:
    """The number of Python that one of NumPy is."""
    return number.item()


def _arithmetic(symbol: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    def forward(self: Number, other: Any, modulo: Any = None) -> Any:
        return NotImplemented if modulo is not None else _binary(self, symbol, other)

    def reflected(self: Number, other: Any, _modulo: Any = None) -> Any:
        return _binary(other, symbol, self)

    return forward, reflected


def _comparison(symbol: str) -> Callable[..., Any]:
    return lambda self, other: _compared(self, symbol, other)


for _name, _symbol in {**_BINARY, **_BITS}.items():
    _forward, _reflected = _arithmetic(_symbol)
    setattr(Number, f"__{_name}__", _forward)
    setattr(Number, f"__r{_name}__", _reflected)
for _name, _symbol in _COMPARISONS.items():
    setattr(Number, f"__{_name}__", _comparison(_symbol))


class Table:
    """A list or array from which a number is taken by a changing index (`schedule[step]`)."""

    def __init__(self, ledger: Ledger, content: Any) -> None:
        self._ledger = ledger
        self._content = content

    def __getitem__(self, index: Number) -> Any:
        content = self._content
        if is_late(index):
            return content[settled(index)]
        value = value_of(_tried(lambda: content[value_of(index)], (index,)))
        is_mixed = not isinstance(content, np.ndarray) and any(type(item) is Number for item in content)
        if not is_real(value) or (is_mixed and not all(is_real(value_of(item)) for item in content)):
            return content[settled(index)]
        if is_mixed:
            text, origins = f"({', '.join(_text(self._ledger, item) for item in content)},)", origins_of(*content)
        else:  # what is in it is guarded, so that a copy will do
            text, origins = self._ledger.constant(copy.copy(content)), frozenset[str]()
        return self._ledger.computed_alike(f"{text}[{name_of(index)}]", value, origins | origins_of(index))


def is_number(value: object) -> bool:
    """Whether a value is a `Number`; `isinstance` would not tell."""
    return type(value) is Number


def is_real(value: object) -> bool:
    """Whether a value is a number that can be computed again: an int or float of Python or NumPy, but no bool."""
    return _is_real_kind(type(value))


def _is_real_kind(kind: type) -> bool:
    if kind in (int, float):
        return True
    return issubclass(kind, (np.integer, np.floating)) and not issubclass(kind, np.timedelta64)


def value_of(value: Any) -> Any:
    """The value that a number has in this call, for looking only: what depends on it is not noted."""
    if type(value) is not Number:
        return value
    if type(value._value) is Later:  # pyright: ignore[reportPrivateUsage]
        value._value = value._value.find()  # pyright: ignore[reportPrivateUsage]
    return value._value  # pyright: ignore[reportPrivateUsage]


def kind_of(value: Any) -> type:
    """The type of a value, or of the one that a number has."""
    inner = value._value if type(value) is Number else value  # pyright: ignore[reportPrivateUsage]
    return inner.kind if type(inner) is Later else type(inner)


def kinds_of(value: Any) -> tuple[type, ...]:
    """The types that a value may have; more than one only for a number that the graph computes."""
    inner = value._value if type(value) is Number else value  # pyright: ignore[reportPrivateUsage]
    return inner.kinds if type(inner) is Later else (type(inner),)


def is_late(value: Any) -> bool:
    """Whether a value is a number that only the graph computes."""
    return type(value) is Number and ledger_of(value).is_late


def name_of(number: Number) -> str:
    """The name of a number in its ledger."""
    return number._name  # pyright: ignore[reportPrivateUsage]


def ledger_of(number: Number) -> Ledger:
    """The ledger that a number stands in."""
    return number._ledger  # pyright: ignore[reportPrivateUsage]


def origins_of(*values: Any) -> frozenset[str]:
    """The leaves and draws that some numbers come from."""
    return frozenset[str]().union(*(v._origins for v in values if type(v) is Number))  # pyright: ignore[reportPrivateUsage]


def settled(value: Any) -> Any:
    """The plain number behind a `Number`, which is assumed to be the same at later calls; others as they are."""
    if type(value) is not Number:
        return value
    ledger = ledger_of(value)
    ledger.require_known(value)
    plain = value_of(value)
    ledger.assume(f"same({name_of(value)}, {ledger.constant(plain)})", value)
    return plain


def settled_key(key: Any) -> Any:
    """A key that a dict or set is asked for: what it hashes is taken for granted."""
    if not isinstance(key, (tuple, frozenset)):
        return settled(key)
    parts: list[Any] = [settled_key(part) for part in key]
    if all(map(operator.is_, parts, key)):
        return key
    kind: Any = type(key)
    return kind._make(parts) if hasattr(kind, "_make") else kind(parts)


def called(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call of a function of plain numbers (`math.cos`, `round`, `float`) with some `Number` among its arguments."""
    given = (*args, *kwargs.values())
    ledger = _common_ledger(*given)
    if ledger.is_late:
        return _called_late(ledger, function, args, kwargs)
    named = {key: value_of(value) for key, value in kwargs.items()}
    result = _tried(lambda: function(*map(value_of, args), **named), given)
    text = _call_text(ledger, function, args, kwargs)
    if is_real(result):
        return ledger.computed_alike(text, result, origins_of(*given))
    ledger.assume(f"same({text}, {ledger.constant(result)})")
    return result


def _call_text(ledger: Ledger, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    texts = [_text(ledger, arg) for arg in args]
    texts += [f"{key}={_text(ledger, value)}" for key, value in kwargs.items()]
    return f"{ledger.constant(function)}({', '.join(texts)})"


def _called_late(ledger: Ledger, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call that is made after the graph has run, and now only for the type of its result."""
    given = (*args, *kwargs.values())
    may_raise = not _cannot_raise(function, args)
    if may_raise:
        ledger.require_unhandled(*given)

    def call(of: Callable[[Any], Any]) -> Any:
        return function(*map(of, args), **{key: of(value) for key, value in kwargs.items()})

    is_choice = function in (max, min)
    if is_choice:
        kinds = tuple(dict.fromkeys(k for v in given for k in kinds_of(v)))
    else:
        with np.errstate(all="ignore"):  # what is tried are no values of the step
            kinds = _kinds_of_result(call, given)
    if not all(map(_is_kept_kind, kinds)):  # several numbers
        return call(settled)
    result = Later(kinds, lambda: call(value_of))
    made = ledger.computed(_call_text(ledger, function, args, kwargs), result, origins_of(*given))
    if may_raise:
        ledger.note_raising(made)
    return made


def _is_kept_kind(kind: type) -> bool:
    """Whether a number of a kind can be computed after the graph has run."""
    return kind in (*_PLAIN_NUMBERS, np.bool_) or _is_real_kind(kind)


def function_behind(number: Number) -> Any:
    """The function whose call has given a number; None if it comes from elsewhere."""
    ledger = ledger_of(number)
    line = next((line for line in reversed(ledger.lines) if line.startswith(f"{name_of(number)} = ")), "")
    return ledger.constants.get(line.partition(" = ")[2].partition("(")[0])


def _cannot_raise(function: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Whether a call goes well whatever its numbers are."""
    if function is operator.truediv and type(args[1]) in (int, float):
        return args[1] != 0
    return function in _TOTAL


def _kinds_of_result(operation: Callable[[Callable[[Any], Any]], Any], operands: tuple[Any, ...]) -> tuple[type, ...]:
    """The types of what an operation gives, tried out with made-up numbers; with real ones where it takes others."""
    late = {id(operand): operand for operand in operands if is_late(operand)}
    found: dict[type, None] = {}
    for samples in itertools.product(*map(_samples, late.values())):
        made = dict(zip(late, samples))

        def sampled(value: Any, made: dict[int, Any] = made) -> Any:
            return made[id(value)] if is_late(value) else value_of(value)

        with contextlib.suppress(Exception):
            found[type(operation(sampled))] = None
    if found:
        return tuple(found)
    for operand in late.values():
        ledger_of(operand).require_known(operand)
    return (type(operation(value_of)),)


def _samples(number: Number) -> list[Any]:
    """Numbers of the same type, or of all types that it may have, such that powers of them have all of theirs."""
    return [kind(sample) for kind in kinds_of(number) for sample in (1, *((-1, 0.5) if kind in (int, float) else (0,)))]


def _common_ledger(*values: Any) -> Ledger:
    """Where what is computed of some numbers is written down: after the graph, if one of them is known only then."""
    ledgers = [ledger_of(value) for value in values if type(value) is Number]
    return next((ledger for ledger in ledgers if ledger.is_late), ledgers[0])


def _tried(operation: Callable[[], Any], operands: tuple[Any, ...]) -> Any:
    """What an operation gives; one that raises does so for these very numbers, and the step may handle that."""
    try:
        return operation()
    except Exception:
        for operand in operands:
            settled(operand)
        raise


def _text(ledger: Ledger, value: Any) -> str:
    return ledger.named(value) if type(value) is Number else ledger.constant(value)


def _binary(left: Any, symbol: str, right: Any) -> Any:
    ledger = _common_ledger(left, right)
    if not are_numbers(left, right):
        if isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor):
            return NotImplemented  # the tensor's own operator takes it as an input of the graph
        if isinstance(left, _SYMBOLS) or isinstance(right, _SYMBOLS):
            return _OPERATORS[symbol](_as_symbol(ledger, left), _as_symbol(ledger, right))
        return ledger.noted(_OPERATORS[symbol], (left, right), {})
    if ledger.is_late:
        return called(_OPERATORS[symbol], (left, right), {})
    result = _tried(lambda: _OPERATORS[symbol](value_of(left), value_of(right)), (left, right))
    text = f"{_text(ledger, left)} {symbol} {_text(ledger, right)}"
    if not is_real(result):
        ledger.assume(f"same({text}, {ledger.constant(result)})")  # a power that is complex
        return result
    # Python's own numbers give the same type whatever they are, but for powers.
    is_steady = symbol != "**" and all(type(value_of(side)) in _PLAIN_NUMBERS for side in (left, right))
    compute = ledger.computed if is_steady else ledger.computed_alike
    return compute(text, result, origins_of(left, right))


def are_numbers(*values: Any) -> bool:
    """Whether values are numbers of Python or NumPy, changing or not."""
    return all(map(_is_kept_kind, map(kind_of, values)))


def _as_symbol(ledger: Ledger, value: Any) -> Any:
    return ledger.symbol_of(value) if type(value) is Number else value


def _compared(left: Any, symbol: str, right: Any) -> Any:
    ledger = _common_ledger(left, right)
    if isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor):
        return NotImplemented
    if not are_numbers(left, right):
        return ledger.noted(_OPERATORS[symbol], (left, right), {})
    if ledger.is_late:
        return called(_OPERATORS[symbol], (left, right), {})
    outcome = _OPERATORS[symbol](value_of(left), value_of(right))
    text = f"{_text(ledger, left)} {symbol} {_text(ledger, right)}"
    ledger.assume(text if outcome else f"not {text}")
    return outcome


_COMPARING = frozenset(_OPERATORS[symbol] for symbol in _COMPARISONS.values())


def _truth(number: Number) -> bool:
    """Whether a number that the graph computes is not zero: Python goes on by it."""
    ledger = ledger_of(number)
    ledger.require_known(number)
    outcome = bool(value_of(number))
    ledger.assume(name_of(number) if outcome else f"not {name_of(number)}", number, outcome=outcome)
    return outcome


def _truth_of_comparison(number: Number) -> bool:
    return _truth(number)
