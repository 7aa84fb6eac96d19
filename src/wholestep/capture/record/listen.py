"""What instrumented code calls: each hook hands what it is told to the recorder of the trace that is running, if any.

Code that was instrumented for one trace may outlive it (a function made in it); its hooks then do nothing. So do those
of other threads, and while the recorder itself is at work.
"""

from __future__ import annotations

import functools
import sys
import threading
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import CellType, MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from wholestep import _recording_torch, _torch
from wholestep.capture.record import (
    classes,
    drawing,
    early_arrays,
    late_calls,
    net,
    percent,
    reads,
    sequences,
    standins,
    tensors,
    texts,
    whole,
)
from wholestep.capture.record.again import AsksBefore
from wholestep.capture.record.arrays import LateArray, LateObject
from wholestep.capture.record.calls import choose
from wholestep.capture.record.follow import Followers
from wholestep.capture.record.imports import require_loaded
from wholestep.capture.record.instrument import Hooks, Instrumenter
from wholestep.capture.record.numbers import Number, Table
from wholestep.capture.record.places import CONTAINERS, PLAIN_TYPES, is_plain
from wholestep.capture.record.recorder import Recorder

_active: list[Recorder] = []
_HOOKS: Hooks = {}

# Nothing to be noted when these are read from or computed with.
_QUIET: frozenset[type] = PLAIN_TYPES | {Number, LateArray, LateObject}
_FIRST_IN_PLACE = 13
"""Of the operators that bytecode numbers, `+=` is the first in place."""


@contextmanager
def listening(recorder: Recorder) -> Generator[None]:
    """Let a recorder hear what followed code does."""
    _active.append(recorder)
    recorder.warning_filters = warnings.filters
    is_followed = recorder.followers.instrumenter.is_instrumented
    try:
        with (
            _recording_torch.sizes_are_shown(lambda frame: is_followed(frame.f_code)),
            _recording_torch.text_of_rates(lambda frame: is_followed(frame.f_code), _ask_before),
            net.spread(is_followed, lambda: recorder.is_deaf),
        ):
            yield
    finally:
        _active.pop()
        recorder.followers.restore()


def _ask_before() -> None:
    raise AsksBefore


def _hook(num_owners: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A hook that is told nothing if the first `num_owners` values it would be told are plain ones."""

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        def tell(*args: Any) -> Any:
            if not _active:
                return None
            recorder = _active[-1]
            is_quiet = bool(num_owners) and all(type(arg) in _QUIET for arg in args[:num_owners])
            if recorder.texts and not recorder.is_deaf and recorder.thread == threading.get_ident():
                recorder.texts.settle_in_instruction(recorder, name, args)
            is_wary = recorder.late.has_texts or (name == "binary" and texts.may_make(recorder))
            if is_quiet and not is_wary:
                return None
            if recorder.is_deaf or recorder.thread != threading.get_ident():
                return None
            if is_wary:
                texts.refuse_in_instruction(recorder, name, args)
                if is_quiet:
                    return None
            recorder.is_deaf = True
            try:
                return function(recorder, *args)
            finally:
                recorder.is_deaf = False

        name = function.__name__.lstrip("_")
        _HOOKS[name] = tell
        return function

    return wrap


@_hook(1)
def _attribute(recorder: Recorder, owner: Any, name: str) -> None:
    reads.read_attribute(recorder, owner, name)


@_hook(0)
def _set_attribute(recorder: Recorder, _value: Any, owner: Any, name: str) -> None:
    reads.write_attribute(recorder, owner, name)


@_hook(0)
def _delete_attribute(recorder: Recorder, owner: Any, name: str) -> None:
    reads.write_attribute(recorder, owner, name)


def _item(owner: Any, key: Any) -> Any:
    """Before `owner[key]`: what to take the item from; a table that is asked for a changing number is one of ours."""
    recorder = _hearing()
    if recorder is None:
        return owner
    if recorder.late.has_texts:
        texts.refuse_in_instruction(recorder, "item", (owner, key))
    if recorder.texts:
        recorder.texts.settle_in_instruction(recorder, "item", (owner, key))
    if type(owner) in _QUIET:
        if type(owner) is LateArray and type(key) not in _QUIET:
            _read_key(recorder, key)
        return owner
    if isinstance(owner, torch.Tensor) and is_plain(key) and recorder.place_of(key) is None:
        return owner
    if recorder.late.is_used and late_calls.is_table(owner, key):
        return late_calls.table(recorder, owner)
    recorder.is_deaf = True
    try:
        if isinstance(owner, (torch.Tensor, np.ndarray)):
            whole.read_reached(recorder, key)
        if isinstance(owner, torch.Tensor):
            return owner
        recorder.follow_operators(owner)
        if sequences.is_picked_from(recorder, owner, key):
            return sequences.Picked(recorder, owner)
        reads.read_subscript(recorder, owner, key)
        if early_arrays.takes_rows(recorder, owner, key):
            return early_arrays.Rows(recorder, owner)
        is_table = type(key) is Number and type(owner) in (list, tuple, np.ndarray)
        return Table(recorder.ledger, owner) if is_table else owner
    finally:
        recorder.is_deaf = False


def _read_key(recorder: Recorder, key: Any) -> None:
    with recorder.deaf():
        whole.read_reached(recorder, key)


def _class_of(owner: Any) -> Any:
    """Before `owner.__class__`: what to ask, in place of a traced tensor one that says what the user's tensor would."""
    recorder = _hearing()
    if recorder is None:
        return owner
    if _torch.is_traced(owner):
        return standins.OfClass(standins.type_of(recorder, owner))
    _HOOKS["attribute"](owner, "__class__")
    return owner


def _hearing() -> Recorder | None:
    recorder = _active[-1] if _active else None
    return None if recorder is None or recorder.is_deaf or recorder.thread != threading.get_ident() else recorder


@_hook(1)
def _slice(recorder: Recorder, owner: Any, _start: Any, _stop: Any) -> None:
    reads.read_through(recorder, owner)


@_hook(0)
def _set_item(recorder: Recorder, value: Any, owner: Any, key: Any) -> None:
    if early_arrays.is_written_by_draws(recorder, owner, key, value):
        drawing.require_whole(recorder)
    if recorder.late.is_used:
        late_calls.refuse_in_item(recorder, value, owner, key)
    if isinstance(owner, (torch.Tensor, np.ndarray)) or type(key) is slice:  # takes what is in the value
        whole.read_reached(recorder, key, value)
    reads.write_item(recorder, owner, "__setitem__", key, value)


@_hook(0)
def _delete_item(recorder: Recorder, owner: Any, key: Any) -> None:
    reads.write_item(recorder, owner, "__delitem__", key)


@_hook(0)
def _set_slice(recorder: Recorder, value: Any, owner: Any, start: Any, stop: Any) -> None:
    whole.read_reached(recorder, value)
    reads.write_item(recorder, owner, "__setitem__", slice(start, stop), value)


@_hook(1)
def _iterate(recorder: Recorder, owner: Any) -> None:
    recorder.follow_operators(owner)
    reads.read_through(recorder, owner)


@_hook(0)
def _contains(recorder: Recorder, key: Any, owner: Any) -> None:
    if recorder.place_of(owner) is None:
        sequences.refuse_identity(recorder, key)
    recorder.follow_operators(owner)
    for item in (key, *(owner if isinstance(owner, CONTAINERS) and not is_plain(owner) else ())):
        recorder.identify(item)
    if not isinstance(owner, (dict, set, frozenset)):  # compares with what it holds
        whole.read_reached(recorder, key, *(owner if isinstance(owner, CONTAINERS) else ()))
    if isinstance(owner, MappingProxyType):
        classes.read_view(recorder, owner, (key,))
    if type(owner) in _QUIET or recorder.place_of(owner) is None:
        return
    tensors.looked_up(recorder, owner, key)
    if isinstance(owner, dict):
        recorder.read_presence(owner, key)
    else:
        reads.read_through(recorder, owner)


@_hook(2)
def _operands(recorder: Recorder, left: Any, right: Any) -> None:
    for owner in (left, right):
        recorder.follow_operators(owner)
        if id(owner) in recorder.drawn_arrays:
            drawing.refuse_array(recorder, owner, "computes with")
        if isinstance(owner, (*CONTAINERS, np.ndarray, SimpleNamespace)):
            whole.read_reached(recorder, owner)
        elif isinstance(owner, MappingProxyType):
            classes.read_view(recorder, owner)
        elif type(owner).__eq__ is object.__eq__:  # which asks for the object itself
            recorder.identify(owner)
        elif type(owner).__hash__ is None:
            recorder.refuse_hidden_state(owner)


@_hook(1)
def _unary(recorder: Recorder, owner: Any) -> None:
    recorder.follow_operators(owner)


@_hook(1)
def _match_class(recorder: Recorder, subject: Any, cls: Any, names: tuple[str, ...], num_positional: int) -> None:
    """`case Point(0, y=1)`: the attributes that the pattern asks for."""
    if standins.is_number(subject) and isinstance(subject, cls) is not standins.is_instance(recorder, subject, cls):
        recorder.refuse("matches the class of a size or learning rate", "Use isinstance() or type()")
    if not isinstance(subject, torch.Tensor):
        for name in (*getattr(cls, "__match_args__", ())[:num_positional], *names):
            reads.read_attribute(recorder, subject, name)


@_hook(2)
def _binary(recorder: Recorder, left: Any, right: Any, operator: int) -> None:
    _operands(recorder, left, right)
    if operator < _FIRST_IN_PLACE:
        return
    if isinstance(left, list) and isinstance(right, (list, tuple)):
        recorder.about_to_change(left, "extend", tuple(right))
    elif isinstance(left, (*CONTAINERS, np.ndarray)):
        recorder.about_to_change(left)


@_hook(0)
def _identity(recorder: Recorder, left: Any, right: Any) -> None:
    standins.refuse_identity(recorder, left, right)
    if not is_plain(left) and not is_plain(right):
        sequences.refuse_identity(recorder, left, right)
    if type(left) in _QUIET and type(right) in _QUIET:
        return
    if not _caller_globals().get("__name__", "").startswith("torch."):  # whose layers look whether weights are theirs
        tensors.same_object(recorder, left, right)
    if type(left) is type(right):
        recorder.identify(left)
        recorder.identify(right)


@_hook(1)
def _formatted(recorder: Recorder, value: Any, _spec: str = "") -> None:
    recorder.follow_operators(value)
    whole.read_reached(recorder, value)


@_hook(1)
def _shown(recorder: Recorder, value: Any) -> None:
    _formatted(recorder, value)


@_hook(0)
def _entered(recorder: Recorder, manager: Any) -> None:
    recorder.follow_operators(manager)


@_hook(1)
def _truth(recorder: Recorder, value: Any) -> None:
    recorder.follow_operators(value)
    if isinstance(value, CONTAINERS) and recorder.place_of(value) is not None:
        recorder.read_truth(value)
    elif type(value).__hash__ is None:
        recorder.refuse_hidden_state(value)


@_hook(0)
def _handled(recorder: Recorder, error: BaseException) -> None:
    recorder.caught.note(error)


@_hook(0)
def _compared_class(recorder: Recorder, classes: Any) -> None:
    """`except classes`, which may be a tuple."""
    whole.read_reached(recorder, classes)


@_hook(0)
def _global_name(recorder: Recorder, name: str) -> None:
    namespace = _caller_globals()
    reads.read_from_namespace(recorder, namespace, namespace.get("__name__", ""), name)


@_hook(0)
def _imported(recorder: Recorder, level: int, members: tuple[str, ...] | None, name: str) -> None:
    require_loaded("." * level + name, _caller_globals().get("__package__"), tuple(members or ()))
    reads.read_module(recorder, name)


@_hook(0)
def _set_global(recorder: Recorder, _value: Any, name: str) -> None:
    namespace = _caller_globals()
    recorder.root(namespace, namespace.get("__name__", ""))
    recorder.wrote(namespace, name)


@_hook(0)
def _delete_global(recorder: Recorder, name: str) -> None:
    namespace = _caller_globals()
    recorder.root(namespace, namespace.get("__name__", ""))
    recorder.read_presence(namespace, name)
    recorder.about_to_change(namespace)


def _caller_globals() -> dict[str, Any]:
    """Globals of the followed function: above this one, the hook and its wrapper."""
    return sys._getframe(3).f_globals  # pyright: ignore[reportPrivateUsage]


@_hook(0)
def _cell(recorder: Recorder, cell: CellType, _name: str) -> None:
    if recorder.place_of(cell) is not None:
        recorder.read_cell(cell)


@_hook(0)
def _set_cell(recorder: Recorder, _value: Any, cell: CellType, _name: str) -> None:
    recorder.wrote(cell)


@_hook(0)
def _delete_cell(recorder: Recorder, cell: CellType, _name: str) -> None:
    recorder.about_to_change(cell)


def _call(function: Any, *rest: Any) -> Any:
    """Before a call: the callable, its arguments, the names of those passed by keyword."""
    *args, names = rest
    positional = args[: len(args) - len(names)]
    return _chosen(function, tuple(positional), dict(zip(names, args[len(positional) :], strict=True)))


def _call_with(function: Any, args: Any, kwargs: Any = None) -> Any:
    """Before `function(*args, **kwargs)`; an iterator among them must not be used up here, and is when it is called."""
    if (recorder := _hearing()) is not None and recorder.texts:
        recorder.texts.settle(recorder, (args,), is_deep=False)
    if texts.is_marked(args) and (recorder := _hearing()) is not None:  # whose letters would be the arguments
        texts.refuse_in_instruction(recorder, "iterate", (args,))
    if not isinstance(args, (list, tuple)) or not isinstance(kwargs, (dict, type(None))):
        return functools.partial(_unpacked, function)
    return _chosen(function, tuple(args), dict(kwargs or {}), (args, kwargs))


def _unpacked(function: Any, *args: Any, **kwargs: Any) -> Any:
    return _chosen(function, args, kwargs)(*args, **kwargs)


def _chosen(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], unpacked: tuple[Any, ...] = ()) -> Any:
    recorder = _hearing()
    if recorder is None:
        return function
    recorder.is_deaf = True
    try:
        for container in unpacked:
            if isinstance(container, CONTAINERS):
                recorder.read_all(container)
        return choose(recorder, function, args, kwargs)
    finally:
        recorder.is_deaf = False


def _remainder(left: Any, right: Any) -> Any:
    """Before `left % right`: what to format with, if that is text and numbers among the values are known only later."""
    recorder = _hearing() if type(left) is str else None
    if recorder is not None:
        recorder.texts.settle(recorder, (left, right))
    return left if recorder is None else percent.formatting(recorder, left, right)


_HOOKS.update(call=_call, call_with=_call_with, item=_item, remainder=_remainder, class_of=_class_of)
Followers.instrumenter = Instrumenter(_HOOKS)
