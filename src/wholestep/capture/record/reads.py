"""What an instruction of Python reads or writes, as Python would find it: attributes, items, whole containers."""

from __future__ import annotations

import collections
import functools
import sys
from types import FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from wholestep.capture.record import standins, tensors
from wholestep.capture.record.places import ABSENT, CONTAINERS, Place, Step, take

if TYPE_CHECKING:
    from wholestep.capture.record.recorder import Recorder


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
    if name == "__class__" and standins.is_number(owner):
        recorder.refuse("reads __class__ of a size or learning rate", "Use isinstance() or type()")
    place = recorder.place_of(owner)
    if isinstance(_class_member(type(owner), "__getattribute__"), FunctionType):
        recorder.follow_operators(owner)  # which will say what it reads
        return
    find_attribute(recorder, owner, name, place)


def find_attribute(recorder: Recorder, owner: Any, name: str, place: Place | None) -> None:
    """An attribute of an object, as `object.__getattribute__` finds it."""
    if name == "__dict__":
        recorder.namespace_of(owner)
        return
    member = _class_member(type(owner), name)
    if _is_data_descriptor(member):
        recorder.follow_all(member)
        if isinstance(member, MemberDescriptorType):
            recorder.read_slot(owner, name)
        return
    if member is not ABSENT and hasattr(type(member), "__get__"):
        recorder.follow_operators(member)
    if place is None:
        recorder.follow_all(member)
        recorder.follow_operators(owner)
        return
    namespace = recorder.namespace_of(owner)
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
        getter = _class_member(type(owner), "__getattr__")
        recorder.follow_all(getter)
        if not isinstance(getter, FunctionType):
            recorder.read_deep(owner)


def read_from_namespace(recorder: Recorder, namespace: dict[str, Any], label: str, name: str) -> None:
    """A global of a module. Functions of torch and of Python are taken for what they are: a trace patches some."""
    value = namespace.get(name, ABSENT)
    if _is_library(label) and (callable(value) or isinstance(value, ModuleType)):
        return
    recorder.root(namespace, label)
    recorder.read_item(namespace, name)


@functools.cache
def _is_library(module: str) -> bool:
    root = module.split(".")[0]
    return root in ("torch", "numpy", "wholestep") or root in sys.stdlib_module_names


def read_from_class(recorder: Recorder, cls: type, name: str) -> None:
    for base in cls.__mro__:
        if name in vars(base):
            member = vars(base)[name]
            if base.__flags__ & _HEAP_TYPE and not (_is_library(base.__module__) and callable(member)):
                recorder.root(base)
                recorder.note(base, Step.CLASS, name, member)
            recorder.follow_all(member)
            return
    metaclass = _class_member(type(cls), name)
    if metaclass is not ABSENT:
        recorder.follow_all(metaclass)


_HEAP_TYPE = 1 << 9


def _is_part(module: nn.Module, name: str) -> bool:
    """Parameters and buffers are inputs of the graph, and submodules its structure: all are guarded as such."""
    return any(name in vars(module)[part] for part in ("_parameters", "_buffers", "_modules"))


def _class_member(cls: type, name: str) -> Any:
    for base in cls.__mro__:
        if name in vars(base):
            return vars(base)[name]
    return ABSENT


def _is_data_descriptor(member: Any) -> bool:
    return member is not ABSENT and hasattr(type(member), "__set__")


def write_attribute(recorder: Recorder, owner: Any, name: str) -> None:
    """`owner.name` is going to be set or deleted."""
    if isinstance(owner, torch.Tensor):
        tensors.write_attribute(recorder, owner, name)
        return
    if isinstance(owner, ModuleType):
        recorder.root(vars(owner), owner.__name__)
        recorder.about_to_change(vars(owner))
    elif isinstance(owner, type):
        recorder.root(owner)
        recorder.about_to_change(owner)
    elif recorder.place_of(owner) is not None:
        member = _class_member(type(owner), name)
        if isinstance(member, MemberDescriptorType):
            recorder.about_to_change(owner)
        elif _is_data_descriptor(member):
            recorder.follow_all(member)
        elif (namespace := recorder.namespace_of(owner)) is not None:
            recorder.about_to_change(namespace)
    recorder.follow_operators(owner)


def read_subscript(recorder: Recorder, owner: Any, key: Any) -> None:
    """`owner[key]`."""
    if id(owner) in recorder.drawn_arrays:
        recorder.refuse("looks into an array that it has drawn", "Draw with torch, or outside the step")
    if recorder.place_of(owner) is None:
        return
    if isinstance(owner, dict):
        tensors.looked_up(recorder, owner, key)
        recorder.identify(key)
        recorder.read_item(owner, key)
        if hasattr(type(owner), "__missing__"):  # looking may write
            recorder.follow_all(getattr(owner, "default_factory", None))
            recorder.about_to_change(owner)
    elif isinstance(owner, (list, tuple, collections.deque)) and type(key) is int:
        recorder.read_position(owner, key)
    elif isinstance(owner, CONTAINERS):
        recorder.read_all(owner)
    elif isinstance(owner, np.ndarray):
        recorder.expect_content(owner)


def write_item(recorder: Recorder, owner: Any, operation: str, *args: Any) -> None:
    """An item of an owner is going to be set or deleted."""
    if isinstance(owner, dict):
        if recorder.place_of(owner) is not None:
            tensors.looked_up(recorder, owner, args[0])
        recorder.about_to_change(owner)
    elif isinstance(owner, (list, collections.deque)):
        recorder.about_to_change(owner, operation, *args)
    elif isinstance(owner, np.ndarray):
        recorder.expect_content(owner)
        recorder.about_to_change(owner)


def read_through(recorder: Recorder, owner: Any) -> None:
    """Something goes through all items of an owner."""
    if id(owner) in recorder.drawn_arrays:
        recorder.refuse("looks into an array that it has drawn", "Draw with torch, or outside the step")
    if isinstance(owner, torch.Tensor) or recorder.place_of(owner) is None:
        return
    if isinstance(owner, CONTAINERS):
        recorder.read_all(owner)
    elif isinstance(owner, np.ndarray):
        recorder.expect_content(owner)
    elif hasattr(type(owner), "__next__"):
        recorder.refuse(
            f"takes items from an iterator that outlives it (a {type(owner).__name__})", "Call next() outside the step"
        )
