"""Places: where a step has read something, and what must stand there for the captured graph to be right.

A place is a way from a root to a value: `self`, its `__dict__`, the item "cfg" of that, its `__dict__`, item "beta".
Roots are the arguments of the call and objects that are always the same (a module's globals, a class, a closure's
cell). Owners are guarded by the way to them, not by identity: an argument may be made anew for each call.

What is expected at a place depends on what was found there (`expectation`):

    VALUE     a plain value (numbers, text, None, tuples of those): the same type and value
    NUMBER    a number that has changed before: any number of that type (see `numbers`)
    SAME      a function, class, module or model: the very same object
    OPEN      an object whose parts are places themselves: the same type
    TENSOR    a tensor, which is an input of the graph: the same shape, strides, dtype, device
    ARRAY     a NumPy array: the same content
    PRESENT   anything: the key was asked for, not the value
    ABSENT    nothing: no such key
"""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import functools
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from wholestep.capture.record.numbers import is_number, kind_of


class Step(enum.Enum):
    """How one gets from an owner to a part of it."""

    ITEM = "item"
    ATTRIBUTE = "attribute"
    """`getattr`: slots, `__dict__`, parts of functions and bound methods."""
    CLASS = "class"
    """An attribute of a class's own."""
    CALL = "call"
    """What a function with a cache returns for some arguments: `(args, kwargs)`."""
    CELL = "cell"
    """What a closure's cell or a `ContextVar` holds."""
    LENGTH = "length"
    KEYS = "keys"
    """All keys of a dict, all members of a set, all that a class defines, in order."""
    TRUTH = "truth"
    """Whether a container has anything in it."""


class Expectation(enum.Enum):
    """What must stand at a place; see the top of this file."""

    VALUE = "value"
    NUMBER = "number"
    SAME = "same"
    OPEN = "open"
    TENSOR = "tensor"
    ARRAY = "array"
    PRESENT = "present"
    ABSENT = "absent"


ABSENT = type("Absent", (), {"__repr__": lambda _: "nothing"})()
"""What is read where there is nothing."""

ARGUMENTS = type("Arguments", (), {"__repr__": lambda _: "the arguments"})()
"""The root of all that a call is given: `(args, kwargs)`."""

_PLAIN = (
    int,
    float,
    bool,
    str,
    bytes,
    complex,
    type(None),
    type(Ellipsis),
    type(NotImplemented),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    range,
)
PLAIN_TYPES: frozenset[type] = frozenset(_PLAIN)
_WITHOUT = PLAIN_TYPES | {torch.Size}
_PINNED = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.ModuleType,
    types.CodeType,
    type,
    nn.Module,
    Optimizer,
    enum.Enum,
    torch.Generator,
    property,
    staticmethod,
    classmethod,
)
_WEAK = (weakref.WeakValueDictionary, weakref.WeakKeyDictionary, weakref.WeakSet)
CONTAINERS = (list, dict, tuple, set, frozenset, collections.deque)
_LARGEST_ARRAY_BYTES = 2**20


@dataclass(eq=False)
class Place:
    """A part of an owner, reached by `step` with `key`; a root has no parent, and is `key` itself."""

    parent: Place | None
    step: Step
    key: Any
    value: Any
    expectation: Expectation
    label: str = ""
    """What a root is called: the name of a closure's variable, of an argument."""
    children: dict[tuple[Step, Any], Place] = field(default_factory=dict[tuple[Step, Any], "Place"])
    twin: Place | None = None
    """Another place that the same object was found at; both must hold one object."""
    is_written: bool = False
    """Whether the step writes to what was found."""
    is_told_apart: bool = False
    """Whether the step has asked if it is another tensor, and it is."""
    is_given: bool = False
    """Whether it is a container among the arguments, of which the trace has a copy."""
    is_forgotten: bool = False
    """Whether `value` was let go of."""
    kind: type = field(init=False)
    """The type of what was found."""

    maxlen: int | None = field(init=False)
    """How long it may become, if it is a deque."""

    def __post_init__(self) -> None:
        self.kind = kind_of(self.value)
        self.maxlen = self.value.maxlen if isinstance(self.value, collections.deque) else None

    def look_again(self) -> None:
        """Note what is open here and further on as it really stands there: while a step is traced, stand-ins may."""
        for child in self.children.values():
            if child.expectation is Expectation.OPEN:
                child.value = take(self.value, child.step, child.key)
                child.look_again()

    def forget_objects(self) -> None:
        """Let go of objects here and further on: those of one call's arguments, some of them the trace's own."""
        if self.expectation is Expectation.OPEN or self.is_given:
            self.value, self.is_forgotten = None, True
        for child in self.children.values():
            child.forget_objects()

    @property
    def path(self) -> tuple[Any, ...]:
        """The way here, comparable between captures: the root, then pairs of a step and a key."""
        above = () if self.parent is None else self.parent.path
        return (Rooted(self.key),) if self.parent is None else (*above, (self.step, self.key))

    def __str__(self) -> str:
        return _shown(self)


@dataclass(frozen=True)
class Rooted:
    """The root of a path, compared by identity."""

    owner: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rooted) and other.owner is self.owner

    def __hash__(self) -> int:
        return id(self.owner)


def take(owner: Any, step: Step, key: Any) -> Any:
    """What stands at a part of an owner now; `ABSENT` if nothing does."""
    try:
        if step is Step.ITEM:
            return _item(owner, key)
        if step is Step.ATTRIBUTE:
            return object.__getattribute__(owner, key) if not isinstance(owner, type) else getattr(owner, key)
        if step is Step.CELL:
            return owner.get(ABSENT) if isinstance(owner, ContextVar) else owner.cell_contents
        if step is Step.CALL:
            return owner(*key[0], **dict(key[1]))
        if step is Step.CLASS:
            return vars(owner).get(key, ABSENT)
        if step is Step.LENGTH:
            return len(owner)
        if step is Step.KEYS:
            return tuple(vars(owner) if isinstance(owner, type) else owner)
        return bool(len(owner))
    except (KeyError, IndexError, AttributeError, TypeError, ValueError):
        return ABSENT


def _item(owner: Any, key: Any) -> Any:
    """An item of a container, whatever a subclass makes of `[]`."""
    if isinstance(owner, dict):
        return dict.get(owner, key, ABSENT)  # `[]` of a defaultdict would write
    kinds: tuple[Any, ...] = (list, tuple, collections.deque)
    kind = next((kind for kind in kinds if isinstance(owner, kind)), None)
    return owner[key] if kind is None else kind.__getitem__(owner, key)


def find(path: tuple[Any, ...], arguments: Any) -> Any:
    """What stands at the end of a path now; `ABSENT` if it leads nowhere."""
    root, *steps = path
    value: Any = arguments if root.owner is ARGUMENTS else root.owner
    for step, key in steps:
        if value is ABSENT:
            return ABSENT
        value = take(value, step, key)
    return value


def tensor_places(roots: Iterable[Place]) -> Iterator[Place]:
    """The places, from some roots on, at which tensors were found."""
    pending = [*roots]
    while pending:
        place = pending.pop()
        pending += place.children.values()
        if place.expectation is Expectation.TENSOR:
            yield place


def put(path: tuple[Any, ...], value: Any, arguments: Any) -> Callable[[], None]:
    """Set what stands at a path; returns what undoes it."""
    *above, (step, key) = path
    owner = find(tuple(above), arguments)
    before = take(owner, step, key)
    if isinstance(owner, tuple):
        items = [*owner]
        items[key] = value
        kind: Any = type(owner)
        return put(tuple(above), kind._make(items) if hasattr(kind, "_make") else kind(items), arguments)
    _assign(owner, step, key, value)
    return lambda: _assign(owner, step, key, before)


def _assign(owner: Any, step: Step, key: Any, value: Any) -> None:
    if step is Step.ITEM:
        kinds: tuple[Any, ...] = (dict, list, collections.deque)
        next(kind for kind in kinds if isinstance(owner, kind)).__setitem__(owner, key, value)
    elif step is Step.CELL and isinstance(owner, ContextVar):
        owner.set(value)
    elif step is Step.CELL:
        owner.cell_contents = value
    elif isinstance(owner, type):
        type.__setattr__(owner, key, value)
    else:
        object.__setattr__(owner, key, value)


def is_plain(value: Any) -> bool:
    """Whether a value can neither change nor be told apart from an equal one."""
    if type(value) in PLAIN_TYPES:
        return True
    if type(value) in (tuple, frozenset, torch.Size, slice):
        parts = (value.start, value.stop, value.step) if type(value) is slice else value
        return all(is_plain(part) for part in parts)
    return isinstance(value, np.generic) and not isinstance(value, np.void) and not is_number(value)


def has_hidden_state(value: Any) -> bool:
    """Whether an object holds something that only C knows and that may change: buffers, iterators, thread locals.

    What has a hash of its own is taken for a value that never changes (dates, patterns, decimals). Weak dicts and sets
    are Python, but the interpreter itself writes to them, and torch has some of its own that must not be followed.
    """
    kind = type(value)
    if isinstance(value, _WEAK):
        return True
    if is_plain(value) or isinstance(value, (*_PINNED, *CONTAINERS, torch.Tensor, np.ndarray)) or is_open(value):
        return False
    if kind.__module__.split(".")[0] == "torch":
        return False
    try:
        hash(value)
    except TypeError:
        return True
    return kind.__hash__ is object.__hash__


def is_open(value: Any) -> bool:
    """Whether an object's state can be looked at: its attributes, slots and items are all there is to it."""
    if isinstance(value, CONTAINERS) or type(value) in (types.MethodType, functools.partial, types.CellType):
        return True
    return _has_plain_layout(type(value))


@functools.cache
def _has_plain_layout(cls: type) -> bool:
    """Whether instances hold nothing but attributes: no state of C code."""
    if issubclass(cls, _PINNED) or issubclass(cls, (torch.Tensor, np.ndarray, np.generic)):
        return False
    if cls is types.SimpleNamespace:
        return True
    bases = [base for base in cls.__mro__ if not base.__flags__ & HEAP_TYPE or base.__flags__ & _OF_C]
    return all(base in (object, types.SimpleNamespace, BaseException, Exception) for base in bases)


HEAP_TYPE = 1 << 9
"""The flag of classes that are made by `class` statements: their attributes, and who is of them, can change."""
_OF_C = 1 << 8
"""Classes that cannot be changed: those of C modules, also where they are made like those of Python."""


def expectation(value: Any) -> Expectation:
    """What is to be expected at a place where `value` was found."""
    if is_number(value):
        return Expectation.NUMBER
    if value is ABSENT:
        return Expectation.ABSENT
    if isinstance(value, torch.Tensor):
        return Expectation.TENSOR
    if is_plain(value):
        return Expectation.VALUE
    if isinstance(value, np.ndarray) and value.dtype != object and value.nbytes <= _LARGEST_ARRAY_BYTES:
        return Expectation.ARRAY
    if not isinstance(value, _PINNED) and is_open(value):
        return Expectation.OPEN
    return Expectation.SAME


def same(left: Any, right: Any) -> bool:
    """Whether two plain values are the same one: type, value, sign of zero; a NaN is one."""
    if left is right:
        return True
    if type(left) is not type(right):
        return False
    if isinstance(left, np.generic):
        return left.dtype == right.dtype and left.tobytes() == right.tobytes()
    if isinstance(left, float):
        return (left == right and str(left) == str(right)) or (left != left and right != right)
    if isinstance(left, complex):
        return same(left.real, right.real) and same(left.imag, right.imag)
    if isinstance(left, (slice, range)):  # ranges of the same numbers may still end elsewhere
        return all(same(getattr(left, part), getattr(right, part)) for part in ("start", "stop", "step"))
    if isinstance(left, (tuple, torch.Size, frozenset)):  # sets that are equal may still differ in their order
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


_NEVER_CHANGING = frozenset([decimal.Decimal, datetime.date, datetime.datetime, datetime.time, datetime.timedelta])


def is_made_anew(left: Any, right: Any) -> bool:
    """Whether two objects of C that never change are alike to the letter: `Decimal("1.0")` is not `Decimal("1")`."""
    return type(left) is type(right) and type(left) in _NEVER_CHANGING and repr(left) == repr(right)


def equal_arrays(left: Any, right: Any) -> bool:
    """Whether two arrays have the same type and content."""
    is_alike = type(left) is type(right) and left.dtype == right.dtype and left.shape == right.shape
    return is_alike and left.tobytes() == right.tobytes()


def slot_names(cls: type) -> Iterator[str]:
    """Names of all `__slots__` of a class that hold values, and of what classes of C show like them."""
    for base in cls.__mro__:
        if not base.__flags__ & HEAP_TYPE:
            continue
        for name, member in vars(base).items():
            is_layout = name.startswith("__") and "__slots__" not in vars(base)  # as `__vectorcalloffset__`: raw memory
            if type(member) is types.MemberDescriptorType and not is_layout:
                yield name


def dict_of(owner: Any) -> dict[str, Any] | None:
    """The dict that holds an object's attributes; None if it has none, or none that could be told."""
    if isinstance(owner, (type, types.CellType, types.MethodType)) or type(owner) in _WITHOUT or is_number(owner):
        return None
    try:
        namespace = object.__getattribute__(owner, "__dict__")
    except (AttributeError, TypeError):
        return None
    return namespace if isinstance(namespace, dict) else None


def hashable(key: Any) -> Any:
    """A key that may be no plain value, as a key of our own: by which object it is."""
    return key if is_plain(key) else Rooted(key)


def _shown(place: Place) -> str:
    """A place as a user would spell it: `self.cfg.beta`, `TABLE['a'][0]`, `len(history)`."""
    if place.label:
        return place.label
    if place.parent is None:
        if isinstance(place.key, types.ModuleType):
            return place.key.__name__
        return getattr(place.key, "__qualname__", None) or (
            "" if isinstance(place.key, dict) else type(place.key).__name__
        )
    above = _shown(place.parent)
    if place.step in (Step.ATTRIBUTE, Step.CLASS):
        return above if place.key == "__dict__" else f"{above}.{place.key}"
    if place.step is Step.ITEM:
        is_attribute = place.parent.key == "__dict__" or _is_namespace(place.parent)
        if is_attribute and isinstance(place.key, str):
            return f"{above}.{place.key}" if above else place.key
        return f"{above}[{place.key!r}]"
    return above if place.step is Step.CELL else f"{place.step.value} of {above}"


def _is_namespace(place: Place) -> bool:
    return place.parent is None and isinstance(place.key, dict)
