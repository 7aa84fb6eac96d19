"""What an instruction of Python reads or writes, as Python would find it: attributes, items, whole containers."""

from __future__ import annotations

import collections
import functools
import io
import sys
from contextvars import Token
from types import (
    FunctionType,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from wholestep.capture.record import classes, drawing, outside, standins, tensors, whole
from wholestep.capture.record.classes import class_member, is_library, read_from_class, read_from_super
from wholestep.capture.record.follow import is_followed_file
from wholestep.capture.record.places import ABSENT, CONTAINERS, Place, Step, has_hidden_state, take

if TYPE_CHECKING:
    from wholestep.capture.record.recorder import Recorder


_OF_CONTENT = frozenset(["T", "mT", "base", "ctypes", "data", "device", "flat", "imag", "real"])
"""Attributes of an array that are no methods, and not about its form."""


def read_attribute(recorder: Recorder, owner: Any, name: str) -> None:
    """`owner.name`, as Python finds it: data descriptors of the class, the object's own, then the class's."""
    if isinstance(owner, ModuleType):
        read_from_namespace(recorder, vars(owner), owner.__name__, name)
        return
    if isinstance(owner, type):
        read_from_class(recorder, owner, name)
        return
    if isinstance(owner, torch.Tensor):
        tensors.read_attribute(recorder, owner, name)
        return
    if id(owner) in recorder.drawn_arrays and name in _OF_CONTENT:
        drawing.refuse_array(recorder, owner, "looks into")
    if type(owner) is super:
        _read_from_super(recorder, owner, name)
        return
    if name == "__class__" and standins.is_number(owner):
        recorder.refuse("reads __class__ of a size or learning rate", "Use isinstance() or type()")
    place = recorder.place_of(owner)
    if isinstance(class_member(type(owner), "__getattribute__"), FunctionType):
        recorder.follow_operators(owner)  # which will say what it reads
        return
    find_attribute(recorder, owner, name, place)


_NAMED_PART: type = type(vars(functools._CacheInfo)["hits"])  # pyright: ignore[reportPrivateUsage]
"""How a named tuple's parts are found by name."""


_OF_STATE = ("state", "state_dict", "load_state_dict", "_init_group", "__dict__", "__getstate__", "__reduce_ex__")
"""Attributes of an optimizer that lead to its state."""
_OF_FUNCTIONS = ("__defaults__", "__kwdefaults__", "__name__", "__qualname__", "__module__", "__doc__")
_ABOUT_ARRAYS = ("shape", "dtype", "ndim", "size", "itemsize", "nbytes", "strides", "flags")
"""What an array tells without its content; the others are views of it."""


def find_attribute(recorder: Recorder, owner: Any, name: str, place: Place | None) -> None:
    """An attribute of an object, as `object.__getattribute__` finds it."""
    if name in _OF_STATE and isinstance(owner, Optimizer):
        recorder.states_read.add(id(owner))
    if name == "__dict__":
        recorder.namespace_of(owner)
        return
    member = class_member(type(owner), name)
    if type(member) is _NAMED_PART:
        recorder.read_all(owner)
        return
    if _is_data_descriptor(member):
        if isinstance(member, MemberDescriptorType):
            recorder.read_slot(owner, name)
            return
        read_from_class(recorder, type(owner), name)
        if isinstance(member, property):
            _read_property(recorder, owner, member)
        elif isinstance(owner, FunctionType) and name in _OF_FUNCTIONS:
            recorder.note(owner, Step.ATTRIBUTE, name, take(owner, Step.ATTRIBUTE, name))
        elif not isinstance(getattr(type(member), "__get__", None), FunctionType):
            # Of C: a part of a container, or something about an object that only C knows.
            if isinstance(owner, CONTAINERS):
                recorder.read_all(owner)
            if isinstance(owner, np.ndarray) and name not in _ABOUT_ARRAYS:
                recorder.expect_content(owner)
            if isinstance(owner, Token):
                outside.read_replaced(recorder, owner)
            refuse_hidden_state(recorder, owner)
        return
    if member is not ABSENT and hasattr(type(member), "__get__"):
        recorder.follow_operators(member)
    namespace = recorder.namespace_of(owner)
    if place is None:
        recorder.follow_operators(owner)
        if namespace is not None and recorder.place_of(namespace) is not None:  # `self.__dict__ = shared`
            recorder.read_item(namespace, name)
        if namespace is None or name not in namespace:
            read_from_class(recorder, type(owner), name)
        return
    if namespace is not None and name in namespace:
        recorder.read_item(namespace, name)
    elif isinstance(owner, nn.Module) and _is_part(owner, name):
        return
    elif member is not ABSENT:
        if namespace is not None:
            recorder.read_item(namespace, name)
        if isinstance(member, functools.cached_property) and namespace is not None:
            recorder.about_to_change(namespace)
        read_from_class(recorder, type(owner), name)
    elif type(owner) in (MethodType, functools.partial) or isinstance(owner, FunctionType):
        recorder.note(owner, Step.ATTRIBUTE, name, take(owner, Step.ATTRIBUTE, name))
    else:
        if namespace is not None:
            recorder.read_item(namespace, name)
        read_from_class(recorder, type(owner), name)  # what its class may get hides what `__getattr__` finds
        getter = class_member(type(owner), "__getattr__")
        recorder.follow_all(getter)
        if getter in (dict.__getitem__, dict.get):
            recorder.read_item(owner, name)
        elif not isinstance(getter, FunctionType) and not _is_found_by_name(owner):
            recorder.read_deep(owner)
            refuse_hidden_state(recorder, owner)


def read_from_namespace(recorder: Recorder, namespace: dict[str, Any], label: str, name: str) -> None:
    """A global of a module. A trace patches some functions of torch and of Python."""
    value = namespace.get(name, ABSENT)
    if is_library(label) and (callable(value) or isinstance(value, ModuleType)):
        recorder.pin(namespace, Step.ITEM, name, label)
        return
    recorder.root(namespace, label)
    recorder.read_item(namespace, name)


def read_module(recorder: Recorder, name: str) -> None:
    """`import name` of a module that has been imported before."""
    if name in sys.modules and not is_library(name):
        recorder.root(sys.modules, "sys.modules")
        recorder.read_item(sys.modules, name)


def _is_found_by_name(owner: Any) -> bool:
    """Whether an attribute that is in no namespace is not there: no code in C looks elsewhere for it."""
    cls = type(owner)
    search = class_member(cls, "__getattribute__")
    is_plain_search = search is object.__getattribute__ or isinstance(search, FunctionType)
    return is_plain_search and class_member(cls, "__getattr__") is ABSENT


def _read_from_super(recorder: Recorder, owner: Any, name: str) -> None:
    """`super().name`, which is bound to the object."""
    member = read_from_super(recorder, owner, name)
    if name == "__dict__":
        recorder.namespace_of(owner.__self__)
    elif isinstance(member, MemberDescriptorType):
        recorder.read_slot(owner.__self__, name)
    elif isinstance(member, property):
        _read_property(recorder, owner.__self__, member)
    elif isinstance(member, functools.cached_property):
        read_attribute(recorder, owner.__self__, name)
    elif member is not ABSENT and hasattr(type(member), "__get__"):
        recorder.follow_operators(member)


def _read_property(recorder: Recorder, owner: Any, member: property) -> None:
    if not isinstance(member.fget, FunctionType):
        recorder.called(member.fget, (owner,))
    elif not is_followed_file(member.fget.__code__.co_filename):
        recorder.read_deep(owner)


def _is_part(module: nn.Module, name: str) -> bool:
    """Parameters and buffers are inputs of the graph, and submodules its structure: all are guarded as such."""
    return any(name in vars(module)[part] for part in ("_parameters", "_buffers", "_modules"))


def _is_data_descriptor(member: Any) -> bool:
    return member is not ABSENT and hasattr(type(member), "__set__")


def write_attribute(recorder: Recorder, owner: Any, name: str) -> None:
    """`owner.name` is going to be set or deleted."""
    if isinstance(owner, torch.Tensor):
        tensors.write_attribute(recorder, owner, name)
        return
    if isinstance(class_member(type(owner), name), GetSetDescriptorType) and recorder.place_of(owner) is not None:
        recorder.refuse(f"sets {name} of a {type(owner).__name__} from outside", "Set it outside the step")
    if isinstance(owner, ModuleType):
        recorder.root(vars(owner), owner.__name__)
        recorder.wrote(vars(owner), name)
    elif isinstance(owner, type):
        recorder.root(owner)
        recorder.wrote(owner, name)
    elif recorder.place_of(owner) is not None:
        member = class_member(type(owner), name)
        setter = class_member(type(owner), "__setattr__")
        if setter is dict.__setitem__:  # as in `class Config(dict)` with its keys for attributes
            write_item(recorder, owner, "__setitem__", name)
        elif isinstance(member, MemberDescriptorType):
            recorder.wrote(owner, name)
        elif _is_data_descriptor(member):
            read_from_class(recorder, type(owner), name)
        elif (namespace := recorder.namespace_of(owner)) is not None:
            if isinstance(setter, FunctionType) and not isinstance(owner, nn.Module):
                recorder.about_to_change(namespace)  # it will say what it writes
            else:
                recorder.wrote(namespace, name)
        else:
            refuse_hidden_state(recorder, owner)
    elif (namespace := recorder.namespace_of(owner)) is not None:
        recorder.wrote(namespace, name)  # the step's own, unless it has given its object a dict from outside
    recorder.follow_operators(owner)


def read_subscript(recorder: Recorder, owner: Any, key: Any) -> None:
    """`owner[key]`."""
    if id(owner) in recorder.drawn_arrays:
        drawing.refuse_array(recorder, owner, "looks into")
    if isinstance(owner, MappingProxyType):
        classes.read_view(recorder, owner, (key,))
    if recorder.place_of(owner) is None:
        return
    if isinstance(owner, dict):
        tensors.looked_up(recorder, owner, key)
        recorder.identify(key)
        recorder.read_item(owner, key)
        if hasattr(type(owner), "__missing__"):  # looking may write
            if isinstance(owner, collections.defaultdict) and key not in owner:
                recorder.read_slot(owner, "default_factory")
            recorder.follow_all(getattr(owner, "default_factory", None))
            recorder.about_to_change(owner)
    elif isinstance(owner, (list, tuple, collections.deque)) and type(key) is int:
        recorder.read_position(owner, key)
    elif isinstance(owner, CONTAINERS):
        recorder.read_all(owner)
    elif isinstance(owner, np.ndarray):
        recorder.expect_content(owner)
    else:
        if not _is_followed(owner, "__getitem__"):
            recorder.read_deep(owner)
        refuse_hidden_state(recorder, owner)


def _is_followed(owner: Any, name: str) -> bool:
    """Whether what Python calls for an operator tells what it does; `os.environ` has code that nobody can follow."""
    member = class_member(type(owner), name)
    return isinstance(member, FunctionType) and is_followed_file(member.__code__.co_filename)


def write_item(recorder: Recorder, owner: Any, operation: str, *args: Any) -> None:
    """An item of an owner is going to be set or deleted."""
    recorder.follow_operators(owner)
    if isinstance(owner, dict):
        if recorder.place_of(owner) is not None:
            tensors.looked_up(recorder, owner, args[0])
        if operation == "__delitem__":
            recorder.read_presence(owner, args[0])
        recorder.wrote(owner, args[0])
    elif isinstance(owner, (list, collections.deque)):
        recorder.about_to_change(owner, operation, *args)
    elif isinstance(owner, np.ndarray):
        recorder.expect_content(owner)
        recorder.about_to_change(owner)
    else:
        refuse_hidden_state(recorder, owner)
        is_outside = recorder.place_of(owner) is not None and not isinstance(owner, torch.Tensor)
        if is_outside and not _is_followed(owner, operation):
            recorder.refuse(f"writes to a {type(owner).__name__}, which cannot be followed", "Write outside the step")


def read_through(recorder: Recorder, owner: Any) -> None:
    """Something goes through all items of an owner."""
    if id(owner) in recorder.drawn_arrays:
        drawing.refuse_array(recorder, owner, "looks into")
    if isinstance(owner, MappingProxyType):
        classes.read_view(recorder, owner)
    if isinstance(owner, torch.Tensor) or recorder.place_of(owner) is None:
        return
    if isinstance(owner, CONTAINERS):
        recorder.read_all(owner)
    elif isinstance(owner, np.ndarray):
        recorder.expect_content(owner)
    else:
        refuse_iterator(recorder, owner)
        refuse_hidden_state(recorder, owner)


def refuse_iterator(recorder: Recorder, owner: Any) -> None:
    """Taking an item from an iterator of C's changes it where nobody can see or undo it."""
    if isinstance(owner, io.IOBase) and recorder.place_of(owner) is not None:
        recorder.refuse(f"reads or writes a file (a {type(owner).__name__})", "Read and write files outside the step")
    if isinstance(owner, whole.VIEWS):
        refuse_hidden_state(recorder, owner)
    taker = getattr(type(owner), "__next__", None)
    if taker is not None and not isinstance(taker, FunctionType) and recorder.place_of(owner) is not None:
        recorder.refuse(
            f"takes items from an iterator that outlives it (a {type(owner).__name__})", "Call next() outside the step"
        )


def refuse_hidden_state(recorder: Recorder, owner: Any) -> None:
    """An object from outside whose state is C's, and may change: nobody could tell."""
    if recorder.place_of(owner) is not None and has_hidden_state(owner):
        recorder.refuse(
            f"reads or writes a {type(owner).__module__}.{type(owner).__name__} from outside, whose content cannot be "
            "watched",
            "Pass what it holds to the step as an argument",
        )
