"""The recorder: what Python the step reads, writes and calls while it is traced, and from where.

Followed functions run instrumented code (`instrument`), which tells the recorder of each load, store and call, with the
objects themselves. An object that was there before the step has a place (`places`) from the moment it is first loaded;
one that the step makes has none, and what is read from it is the step's own business. So

    x = self.cfg.beta * scale[0]

notes that `self.cfg` is an object of some class, its `beta` the number 0.5, and `scale[0]` the number 2.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Generator, Iterable
from contextvars import ContextVar
from types import CellType, FrameType, FunctionType, SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from wholestep import _torch
from wholestep.capture import source
from wholestep.capture.record import drawing, legacy, outside, participants, reads, whole
from wholestep.capture.record.again import Missed, Unsymbolic
from wholestep.capture.record.calls import BUILTINS, choose, told
from wholestep.capture.record.caught import Caught
from wholestep.capture.record.follow import Followers, functions_in, is_of_torch
from wholestep.capture.record.late import LateLedger
from wholestep.capture.record.late_values import is_late_value
from wholestep.capture.record.numbers import Ledger, Number, origins_of, settled
from wholestep.capture.record.placed import PlacedNumbers
from wholestep.capture.record.places import (
    ABSENT,
    ARGUMENTS,
    Expectation,
    Place,
    Step,
    dict_of,
    hashable,
    take,
)
from wholestep.capture.record.quiet_texts import QuietTexts
from wholestep.capture.record.state import Kept, Operation, content_of
from wholestep.capture.record.tensors import Twins
from wholestep.capture.record.whole_late import WholeCalls, escalate
from wholestep.errors import CaptureError

_MOST_ITEMS = 20_000
_LOOKED_AFTER = (nn.Module, Optimizer, torch.Tensor)


class Recorder:
    """Notes of one trace. `numbers` are paths of places whose number has changed before: they get a `Number`."""

    def __init__(
        self,
        numbers: Iterable[tuple[Any, ...]] = (),
        whole_draws: Iterable[tuple[Any, ...]] = (),
        fixed: Iterable[tuple[Any, ...]] = (),
        *,
        may_leave: bool = False,
    ) -> None:
        self.thread = threading.get_ident()
        self.ledger = Ledger()
        self.late = LateLedger(_taken=self.ledger._taken)  # pyright: ignore[reportPrivateUsage]
        self.number_in: Callable[[torch.Tensor], Any] = lambda tensor: None
        """The number that a traced tensor holds, for Python to compute with."""
        self.make_tensor: Callable[..., Any] = lambda *args: None
        """What torch makes of an array that is only known later."""
        self.roots: list[Place] = []
        self.followers = Followers()
        self.kept: dict[int, Kept] = {}
        """By id of an owner: what it held before the step wrote to it."""
        self._numbers = dict.fromkeys(numbers)
        self._places: dict[int, Place] = {}
        self._alive: list[Any] = []
        """Keeps owners from being freed, so that an id means one object."""
        self._managed: dict[int, dict[str, Any]] = {}
        """By id of an owner that others look after: the items of it that are noted nonetheless."""
        self._unwatched: set[int] = set()
        """Ids of those to which the step may write without anybody noting it."""
        self._pinned: list[Place] = []
        self.handlers: dict[Any, Any] = {**BUILTINS, **outside.HANDLERS, **legacy.HANDLERS}
        self.outputs: list[outside.Output] = []
        self.is_deaf = False
        """Whether hooks are to be ignored just now."""
        self.known_modules: set[int] = set()
        self._generators: dict[int, Callable[[], None]] = {}
        self.generators: list[Any] = []
        self.needed: set[str] = set()  # names of the numbers that effects and outputs need
        self._plain_types: set[type] = set()
        self._entered: set[int] = set()
        self._given: Any = None
        self._copied: list[tuple[Any, Any]] = []
        self.drawn_arrays: dict[int, tuple[Any, str]] = {}
        """Arrays that were drawn, and their names in the ledger."""
        self.drawers: dict[str, tuple[Any, ...]] = {}
        """By such a name, which function has drawn the array."""
        self.whole_draws = frozenset(whole_draws)
        self.is_drawing: tuple[Any, ...] | None = None
        """Functions each call of which is one draw, and which of them runs."""
        self.draws = drawing.Draws(fixed, may_fix=may_leave)
        self.drawn_tensors: dict[int, tuple[Any, str, Callable[[Any], Any]]] = {}
        """Tensors made of such arrays: the array's name, and how."""
        self.drawn_items: dict[int, tuple[Any, str, list[Any]]] = {}
        """What stands for something at a place that is drawn: its name, and what it holds if that could be changed."""
        self.lent_arrays: list[Any] = []  # early arrays in whose memory there are tensors
        self.lent_tensors: set[int] = set()
        self.arrays: list[tuple[Any, Place]] = []
        self.twins = Twins()
        self.placed = PlacedNumbers(self.ledger, self.twins.twin_of)
        self._rates: dict[int, tuple[Any, tuple[Any, ...], type]] = {}
        self.filled_caches: dict[int, Any] = {}  # of functions, empty before the trace
        self.read_whole: set[int] = set()  # owners of which everything was noted (`whole`)
        self.num_deeds = 0  # how often the step has written or drawn something until now
        self.warning_filters: Any = None
        """The filters of warnings as they were before the step; `catch_warnings` puts others in their place."""
        self.own_generators: dict[int, Any] = {}
        """Generators of random numbers that the step has made itself."""
        self.caught, self.texts = Caught(), QuietTexts()
        self.states_read: set[int] = set()
        """Ids of the optimizers at whose state the step may look by itself."""
        self.whole_calls, self.escalate = WholeCalls(), functools.partial(escalate, self)

    # Owners

    def root(self, owner: Any, label: str = "") -> Place:
        """The place of an object that is always the same one, or of the arguments."""
        known = self._places.get(id(owner))
        if known is not None:
            return known
        place = Place(None, Step.ITEM, owner, owner, Expectation.SAME, label)
        self.roots.append(place)
        self._register(owner, place)
        return place

    def stands_at(self, owner: Any, place: Place) -> None:
        """Say that an object stands at a place: the trace's copy of a container, or a part that is watched."""
        self._register(owner, place)

    def place_of(self, owner: Any) -> Place | None:
        """Where an object was found; None for one that the step has made itself."""
        return self._places.get(id(owner))

    def met(self) -> list[Any]:
        """What the step has read until now, in this order."""
        return self._alive

    def manage(self, owner: Any, noted: dict[str, Any] | None = None, *, is_watched: bool = False) -> None:
        """Leave an owner out, but for reads of some of its items: somebody else looks after it (optimizer state).

        What the step writes to one that `is_watched` is noted nonetheless.
        """
        self._managed[id(owner)] = noted or {}
        if not is_watched:
            self._unwatched.add(id(owner))
        self._alive.append(owner)

    def pin(self, owner: Any, step: Step, key: str, label: str = "") -> None:
        """Something of torch's or of Python's own is read: the same object is expected there.

        In a trace others stand in for some of these; `settle` finds the real ones.
        """
        above = self.root(owner, label)
        if (step, key) not in above.children:
            self._pinned.append(Place(above, step, key, None, Expectation.SAME))
            above.children[step, key] = self._pinned[-1]

    def expect(self, owner: Any, name: str, value: Any) -> None:
        """Python goes by an attribute of a function or class: the very same one is expected at each call."""
        above = self.root(owner)
        above.children.setdefault((Step.ATTRIBUTE, name), Place(above, Step.ATTRIBUTE, name, value, Expectation.SAME))

    def settle(self) -> None:
        """The trace is over: note what really stands at pinned places."""
        for place in self._pinned:
            assert place.parent is not None
            place.value = take(place.parent.value, place.step, place.key)
            place.kind = type(place.value)
        for root in self.roots:
            if isinstance(root.key, Optimizer):
                root.look_again()

    def _register(self, owner: Any, place: Place) -> None:
        self._alive.append(owner)
        self._places[id(owner)] = place

    def add_hook(self, hook: Any) -> None:
        """A hook that torch calls by itself."""
        self.root(hook)
        self.read_deep(hook)
        if hasattr(hook, "__self__"):
            self.read_bound(hook)
        self.follow_all(hook)
        self.follow_operators(hook)

    # Reads

    def note(self, owner: Any, step: Step, key: Any, value: Any, *, only_presence: bool = False) -> Place | None:
        """Something was read from an owner; returns its place, None if the owner is the step's own."""
        above = self._places.get(id(owner))
        is_made = _torch.is_traced(value) or is_late_value(value)
        if above is None or is_made or self._is_managed(owner, step, key, value):
            return None
        key = self.twins.plain_key(key)
        known = above.children.get((step, hashable(key)))
        if known is not None:
            if known.expectation is Expectation.PRESENT and not only_presence:
                known.expectation, known.value = self.texts.expectation(value), value
                self._found(value, known)
            return known
        expected = Expectation.PRESENT if only_presence and value is not ABSENT else self.texts.expectation(value)
        place = Place(above, step, key, value, expected)
        above.children[step, hashable(key)] = place
        if expected is not Expectation.PRESENT:
            self._found(value, place)
        return place

    def _is_managed(self, owner: Any, step: Step, key: Any, value: Any) -> bool:
        """Whether a part is none of ours: not all of an owner's are, or the step has put it there itself."""
        noted = self._managed.get(id(owner))
        if noted is None:
            return False
        if step is not Step.ITEM or participants.is_managed_item(key) or (not noted and id(owner) in self._unwatched):
            return True
        return noted.get(key, ABSENT) is not value and not (key in noted and type(value) is Number)

    def _found(self, value: Any, place: Place) -> None:
        if place.expectation in (Expectation.VALUE, Expectation.ABSENT, Expectation.NUMBER):
            return
        first = self._places.get(id(value))
        if first is None or first.expectation is Expectation.PRESENT:  # only watched until now
            self._register(value, place)
            self.follow_operators(value)
        elif place.expectation is not Expectation.SAME and first is not place:
            place.twin = first
        if place.expectation is Expectation.ARRAY:
            place.value = value.copy()
            self.arrays.append((value, place))

    def read_item(self, owner: Any, key: Any) -> None:
        """`owner[key]` of a dict, list or tuple as it was before the step wrote to it."""
        kept = self.kept.get(id(owner))
        if kept is None:
            self.note(owner, Step.ITEM, key, take(owner, Step.ITEM, key))
        elif isinstance(owner, dict):
            before = kept.before.get(key, ABSENT)
            if before is take(owner, Step.ITEM, key):
                self.note(owner, Step.ITEM, key, before)
        else:
            self.read_all(owner)

    def read_all(self, owner: Any) -> None:
        """Everything that a container held before the step wrote to it: keys or length, and each item."""
        if self._places.get(id(owner)) is None:
            return
        if id(owner) in self._managed:
            for key, value in self._managed[id(owner)].items():
                now = owner[key] if isinstance(owner, dict) and key in owner else value
                if now is value or type(now) is Number:  # or the step has put it there, or numbers that it is lent
                    self.note(owner, Step.ITEM, key, now)
            return
        kept = self.kept.get(id(owner))
        content = owner if kept is None else kept.before
        if len(content) > _MOST_ITEMS:
            self.refuse(f"goes through a container of {len(content)} items from outside", "Pass it as a tensor")
        if isinstance(owner, (dict, set, frozenset)):
            keys = self.note(owner, Step.KEYS, None, tuple(content))
            if keys is not None and keys.expectation is Expectation.OPEN:  # objects among them
                self.read_all(keys.value)
            for key, value in list(content.items() if isinstance(content, dict) else ()):
                self.note(owner, Step.ITEM, key, value)
        else:
            length = self.note(owner, Step.LENGTH, None, len(content))
            settled(None if length is None else length.value)  # it may be a number that was asked for before
            for index, value in enumerate(list(content)):
                self.note(owner, Step.ITEM, index, value)

    def read_deep(self, owner: Any) -> None:
        """The whole plain state of an owner and of what it holds: somebody reads it whom we cannot follow."""
        whole.read(self, owner)

    def namespace_of(self, owner: Any) -> dict[str, Any] | None:
        """The dict that holds an object's attributes, as a place of its own; None if it has none."""
        namespace, place = dict_of(owner), self._places.get(id(owner))
        if namespace is not None and place is not None:
            known = self._places.get(id(namespace))
            is_elsewhere = known is not None and known.parent is not place and not isinstance(owner, _LOOKED_AFTER)
            if known is None or is_elsewhere:  # `vars(owner)` that somebody has kept
                self.note(owner, Step.ATTRIBUTE, "__dict__", namespace)
        return namespace

    def length(self, owner: Any) -> Any:
        """`len(owner)`: a `Number` if it has changed before."""
        kept = self.kept.get(id(owner))
        before = len(owner if kept is None else kept.before)
        place = self._places.get(id(owner))
        if place is None:
            return len(owner)
        if not isinstance(owner, list) and kept is not None:
            self.read_all(owner)  # what writing did to the length depends on what was there
            return len(owner)
        if (*place.path, (Step.LENGTH, None)) in self._numbers and (kept is None or kept.has_steady_length):
            noted = self.note(owner, Step.LENGTH, None, self.ledger.leaf(before, (*place.path, (Step.LENGTH, None))))
            assert noted is not None
            return noted.value + (len(owner) - before) if len(owner) != before else noted.value
        self.note(owner, Step.LENGTH, None, before)
        return len(owner)

    def read_position(self, owner: Any, index: int) -> None:
        """`owner[index]` of a sequence; from its end, that is another item when it has another length."""
        kept, size = self.kept.get(id(owner)), len(owner)
        if kept is not None and index < 0 and -index <= kept.num_appended:
            return
        if index < 0 or index >= size:
            settled(self.length(owner))
        if -size <= index < size:
            self.read_item(owner, index % size)

    def read_presence(self, owner: dict[Any, Any], key: Any) -> None:
        """`key in owner`."""
        kept = self.kept.get(id(owner))
        before = owner if kept is None else kept.before
        value = before.get(key, ABSENT)
        if (value is ABSENT) is (key not in owner):
            self.note(owner, Step.ITEM, key, value, only_presence=True)

    def read_truth(self, owner: Any) -> None:
        """`bool(owner)` of a container."""
        if id(owner) in self.kept:
            self.read_all(owner)
        else:
            self.note(owner, Step.TRUTH, None, bool(len(owner)))

    def read_slot(self, owner: Any, name: str) -> None:
        """An attribute that is one of `__slots__`."""
        kept = self.kept.get(id(owner))
        value = take(owner, Step.ATTRIBUTE, name)
        if kept is None or kept.before.get(name, ABSENT) is value:
            self.note(owner, Step.ATTRIBUTE, name, value)

    def read_cell(self, cell: CellType | ContextVar[Any]) -> None:
        """A variable of a closure or of the context."""
        value, kept = take(cell, Step.CELL, None), self.kept.get(id(cell))
        if kept is None or kept.is_as_before(value):  # `ContextVar.reset` puts back what was there
            self.note(cell, Step.CELL, None, value)

    def read_defaults(self, function: FunctionType) -> None:
        """Default values of a function's arguments."""
        if id(function) not in self._places:
            return
        for name in ("__defaults__", "__kwdefaults__"):
            defaults = getattr(function, name)
            if defaults:
                self.note(function, Step.ATTRIBUTE, name, defaults)
                self.read_all(defaults)

    def read_bound(self, method: Any) -> None:
        """A bound method from outside is called: what it is bound to was there as well."""
        if id(method) in self._places:
            for name in ("__self__", "__func__"):
                self.note(method, Step.ATTRIBUTE, name, take(method, Step.ATTRIBUTE, name))

    def read_attribute(self, owner: Any, name: str) -> None:
        reads.read_attribute(self, owner, name)

    def find_attribute(self, owner: Any, name: str) -> None:
        reads.find_attribute(self, owner, name, self.place_of(owner))

    def write_attribute(self, owner: Any, name: str) -> None:
        reads.write_attribute(self, owner, name)

    def read_subscript(self, owner: Any, key: Any) -> None:
        reads.read_subscript(self, owner, key)

    def read_through(self, owner: Any) -> None:
        reads.read_through(self, owner)

    def refuse_iterator(self, owner: Any) -> None:
        reads.refuse_iterator(self, owner)

    def refuse_hidden_state(self, owner: Any) -> None:
        reads.refuse_hidden_state(self, owner)

    def called(self, function: Any, args: tuple[Any, ...]) -> None:
        """Python calls a function by itself."""
        choose(self, function, args, {})

    def told(self, hook: Any) -> Any:
        """A callable that C code will call, such that it tells what it does."""
        return told(self, hook)

    def root_globals(self) -> None:
        """`globals()` is called by followed code."""
        self.root(self.calling_frame().f_globals)

    def calling_frame(self) -> FrameType:
        """Where followed code is just now."""
        frame: FrameType = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
        while not self.followers.instrumenter.is_instrumented(frame.f_code) and frame.f_back is not None:
            frame = frame.f_back
        return frame

    def asked_again(self, function: Callable[..., Any], *args: Any) -> Any:
        """What a function says that looks at the process: it is asked at each call, and expected to say the same."""
        result = function(*args)
        self.root(function)
        self.note(function, Step.CALL, (args, ()), result)
        return result

    def identify(self, owner: Any) -> None:
        """Something depends on which object this is, not only on what it holds."""
        whole.identify(self, owner)

    def expect_content(self, array: np.ndarray[Any, Any]) -> None:
        """An array is read or written; where it was found its content is expected already."""
        whole.expect_content(self, array)

    # Arguments and numbers

    def give(self, args: tuple[Any, ...], kwargs: dict[str, Any], originals: Any) -> None:
        """The arguments that the step is traced with: copies of the user's containers, and the user's objects."""
        given = self._given = SimpleNamespace(args=args, kwargs=kwargs)
        self._register(given, Place(None, Step.ITEM, ARGUMENTS, given, Expectation.SAME, is_given=True))
        self.roots.append(self._places[id(given)])
        for name in ("args", "kwargs"):
            participants.give(self, given, Step.ATTRIBUTE, name, getattr(given, name))
        self._copied = [*participants.copied((args, kwargs), originals)]

    def refuse_shared_arguments(self) -> None:
        """Of some arguments the step was given copies: it must not write to one that it has found elsewhere, too."""
        participants.refuse_shared(self, self._copied)

    @contextlib.contextmanager
    def placed_numbers(self) -> Generator[None]:
        """Let a `Number` stand where a number stands that has changed before, but for arguments (see `argument`)."""
        with self.placed.in_place(self._numbers, self._given):
            for kept in self.kept.values():  # the step has not begun: what it finds is what was there before
                kept.before = content_of(kept.owner)
            yield

    @contextlib.contextmanager
    def symbolic(self, numbers: Iterable[Any]) -> Generator[None]:
        """Torch is given numbers as symbols inside; where it cannot go on without their values, they get them."""
        try:
            yield
        except CaptureError:
            raise
        except Exception as error:
            numbers = [*numbers]
            paths = self.draws.paths_of(self.ledger, origins_of(*numbers))
            if not paths:
                raise drawing.refused_where_fixed(numbers) from error
            raise Unsymbolic(paths) from error

    def argument(self, path: tuple[Any, ...], value: Any) -> Any:
        """A plain argument: a `Number` if it has changed before, the trace's own copy of a text."""
        is_moving = path in self._numbers and type(value) in (int, float)
        return self.ledger.leaf(value, path) if is_moving else self.texts.copy_of(value, path)

    def add_rate(self, symbol: Any, path: tuple[Any, ...], kind: type) -> None:
        """A learning rate, which is a symbol while the step is traced: where it stands, and its type there."""
        self._rates[id(symbol)] = symbol, path, kind

    def type_of_rate(self, symbol: Any) -> type | None:
        """The type of a learning rate, which is then expected to stay; None for other values."""
        if id(symbol) not in self._rates:
            return None
        _, path, kind = self._rates[id(symbol)]
        self.ledger.assume(f"type(find({self.ledger.constant(path)}, call)) is {self.ledger.constant(kind)}")
        return kind

    # Generators and modules

    def keep_generator(self, generator: Any) -> None:
        """Remember where a generator of Python or NumPy stands before the first draw."""
        if id(generator) not in self._generators:
            self._alive.append(generator)
            self.generators.append(generator)
            self._generators[id(generator)] = outside.save_generator(generator)

    def handler_of(self, owner: Any) -> Any:
        """How calls of an object's methods are handled, if otherwise than others."""
        if type(owner) in self._plain_types:
            return None
        handler = outside.handler_of(owner)
        if handler is None and not isinstance(owner, type):
            self._plain_types.add(type(owner))
        return handler

    def enter_module(self, module: nn.Module) -> None:
        """A module is going to be called: its forward and its hooks are followed."""
        if id(module) in self._entered:
            return
        self._entered.add(id(module))
        self._alive.append(module)
        if id(module) not in self.known_modules and id(module) in self._places:
            raise Missed(module)
        self.read_attribute(type(module), "__call__")
        self.read_attribute(module, "forward")
        self.follow_operators(module)
        for name, hooks in vars(module).items():
            if name.endswith("_hooks") and isinstance(hooks, dict):
                for hook in hooks.values():
                    self.add_hook(hook)

    @contextlib.contextmanager
    def deaf(self) -> Generator[None]:
        """Ignore what followed code does inside."""
        before, self.is_deaf = self.is_deaf, True
        try:
            yield
        finally:
            self.is_deaf = before

    # Writes

    def might_change(self, owner: Any) -> None:
        """Somebody whom we cannot follow is given an owner: keep what it and all it holds were."""
        whole.keep(self, owner)

    def about_to_change(self, owner: Any, *operation: Any) -> None:
        """The step is going to write to an owner: keep what is there, and note the operation on a sequence or set."""
        if id(owner) not in self._places or id(owner) in self._unwatched:
            return
        kept = self.kept.get(id(owner))
        if kept is None:
            kept = self.kept[id(owner)] = Kept.of(owner)
            self._places[id(owner)].is_written = True
        if operation:
            self.num_deeds += 1
            name, *args = operation
            noted: Operation = (name, tuple(args))
            kept.operations.append(noted)

    def wrote(self, owner: Any, key: Any = None) -> None:
        """Like `about_to_change`, for an owner whose parts have keys or names; a cell has one part."""
        self.about_to_change(owner)
        if id(owner) in self.kept:
            self.num_deeds += 1
            self.kept[id(owner)].keys.add(key)

    def cleared(self, owner: dict[Any, Any]) -> None:
        """A dict is going to be emptied."""
        self.about_to_change(owner)
        if id(owner) in self.kept:
            self.kept[id(owner)].is_cleared = True

    def restore(self) -> None:
        """Undo everything that the trace has written."""
        for kept in reversed(self.kept.values()):
            kept.restore()
        for put_back in self._generators.values():
            put_back()
        for function in self.filled_caches.values():
            function.cache_clear()

    # Code

    def follow(self, function: Any) -> bool:
        """Run a function's code instrumented from its next call on; False for one that is not to be followed."""
        if not isinstance(function, FunctionType):
            return False
        is_new = self.followers.follow(function)
        if is_new:
            self.root(function)
            if not is_of_torch(function.__code__.co_filename):
                self.expect(function, "__code__", self.followers.code_of(function))
            self.read_defaults(function)
            for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
                self.root(cell, name)
        return is_new is not None

    def follow_all(self, value: Any) -> bool:
        """Follow the functions behind a method, a property, a partial or a decorator; whether there are some."""
        followed = [self.follow(function) for function in functions_in(value)]
        return any(followed)

    def follow_operators(self, owner: Any) -> None:
        """Follow what a class does when its objects are used: operators, `with`, iteration, calls."""
        for base, name, function in self.followers.operators(type(owner)):
            self.root(base)
            self.note(base, Step.CLASS, name, function)
            self.follow(function)

    def follow_class(self, cls: type) -> None:
        """Follow all that a class defines: somebody whom we cannot follow will call some of it."""
        for base in cls.__mro__:
            for member in list(vars(base).values()):
                self.follow_all(member)

    def refuse(self, what: str, advice: str) -> NoReturn:
        raise CaptureError(f"the step {what}", location=source.current_location(), advice=advice)
