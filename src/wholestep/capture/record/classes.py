"""What is read from classes: members as Python finds them, their names, and the views of them that `vars` gives."""

from __future__ import annotations

import functools
import gc
import sys
import typing
import weakref
from collections.abc import Iterable
from types import FunctionType, MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any

from wholestep._recording_torch import class_namespace
from wholestep.capture.record.follow import is_followed_file
from wholestep.capture.record.places import ABSENT, HEAP_TYPE, Step, is_plain

if TYPE_CHECKING:
    from wholestep.capture.record.recorder import Recorder


@functools.cache
def is_library(module: str) -> bool:
    root = module.split(".")[0]
    return root in ("torch", "numpy", "wholestep") or root in sys.stdlib_module_names


def class_member(cls: type, name: str) -> Any:
    for base in cls.__mro__:
        if name in vars(base):
            return vars(base)[name]
    return ABSENT


def read_from_class(recorder: Recorder, cls: type, name: str) -> None:
    """`cls.name`, as Python finds it in one of its bases or in its metaclass."""
    if cls.__flags__ & HEAP_TYPE and not is_library(cls.__module__):
        recorder.expect(cls, "__mro__", cls.__mro__)
    if _read_along(recorder, cls.__mro__, name) is not ABSENT or type(cls) is type:
        return
    if class_member(type(cls), name) is not ABSENT:
        read_from_class(recorder, type(cls), name)
    else:
        recorder.follow_all(class_member(type(cls), "__getattr__"))


def read_from_super(recorder: Recorder, owner: Any, name: str) -> Any:
    """What `super().name` finds: it asks the classes after the one that it stands in."""
    mro = owner.__self_class__.__mro__
    recorder.expect(owner.__self_class__, "__mro__", mro)
    return _read_along(recorder, mro[mro.index(owner.__thisclass__) + 1 :], name)


def _read_along(recorder: Recorder, mro: Iterable[type], name: str) -> Any:
    """A member of the first of some classes that has it."""
    for base in mro:
        member = _read_own(recorder, base, name)
        if member is not ABSENT:
            recorder.follow_all(member)
            _read_descriptor(recorder, member)
            return member
    return ABSENT


def _read_own(recorder: Recorder, cls: type, name: str) -> Any:
    """What a class itself defines, or that it does not."""
    member = vars(cls).get(name, ABSENT)
    is_fixed = is_library(cls.__module__) and member is ABSENT
    if not cls.__flags__ & HEAP_TYPE or is_fixed:
        return member
    if is_library(cls.__module__) and callable(member):
        recorder.pin(cls, Step.CLASS, name)
    else:
        recorder.root(cls)
        recorder.note(cls, Step.CLASS, name, member)
    return member


def _read_descriptor(recorder: Recorder, member: Any) -> None:
    """A descriptor of Python's own library looks at what it was made of, and nobody follows it: `partialmethod`."""
    getter = getattr(type(member), "__get__", None)
    if isinstance(getter, FunctionType) and not is_followed_file(getter.__code__.co_filename):
        recorder.read_deep(member)
    if isinstance(member, functools.singledispatchmethod):
        [registry] = gc.get_referents(member.dispatcher.registry)
        recorder.root(registry, "registered functions")
        recorder.read_all(registry)


def read_plain(recorder: Recorder, cls: type) -> None:
    """All plain attributes of a class: somebody whom we cannot follow is given it."""
    for base in cls.__mro__:
        for name, member in list(vars(base).items()):
            if is_plain(member) and not name.startswith("__"):
                read_from_class(recorder, base, name)


def read_members(recorder: Recorder, cls: type) -> None:
    """All that a class itself defines."""
    _read_keys(recorder, cls)
    for name in list(vars(cls)):
        _read_own(recorder, cls, name)


def read_names(recorder: Recorder, owner: Any) -> None:
    """`dir(owner)`: which attributes there are."""
    recorder.follow_operators(owner)
    for base in (owner if isinstance(owner, type) else type(owner)).__mro__:
        _read_keys(recorder, base)
    if isinstance(owner, ModuleType):
        recorder.root(vars(owner), owner.__name__)
        namespace: Any = vars(owner)
    else:
        namespace = recorder.namespace_of(owner)
    if namespace is not None:
        kept = recorder.kept.get(id(namespace))
        recorder.note(namespace, Step.KEYS, None, tuple(namespace if kept is None else kept.before))


def read_reflected(recorder: Recorder, owner: Any) -> None:
    """`inspect.getmembers(owner)` and the like: all that can be found by a name."""
    read_names(recorder, owner)
    for base in (owner if isinstance(owner, type) else type(owner)).__mro__:
        if not is_library(base.__module__):
            read_members(recorder, base)
    if isinstance(owner, ModuleType):
        recorder.read_all(vars(owner))


def _read_keys(recorder: Recorder, cls: type) -> None:
    if cls.__flags__ & HEAP_TYPE and not is_library(cls.__module__):
        recorder.root(cls)
        kept = recorder.kept.get(id(cls))
        added = () if kept is None else {*vars(cls)} - {*kept.before, "__dict__", "__weakref__"}
        recorder.note(cls, Step.KEYS, None, tuple(name for name in vars(cls) if name not in added))


def read_view(recorder: Recorder, view: MappingProxyType[Any, Any], keys: Iterable[Any] | None = None) -> None:
    """A view of a class (`vars(cls)`) or of a dict is looked into: at some keys, or at all that it shows."""
    cls = _class_behind(view)
    [shown] = (cls,) if cls is not None else gc.get_referents(view)
    if isinstance(shown, type):
        for name in keys or ():
            _read_own(recorder, shown, name)
        if keys is None:
            read_members(recorder, shown)
    elif isinstance(shown, dict):
        for key in keys or ():
            recorder.read_item(shown, key)
        if keys is None:
            recorder.read_all(shown)
    elif recorder.place_of(shown) is not None:
        recorder.refuse(f"looks into a view of a {type(shown).__name__} from outside", "Look into it directly")


_known: weakref.WeakValueDictionary[int, type] = weakref.WeakValueDictionary()
"""By id of the dict that holds what a class defines: the class, which is never found without it."""


def _class_behind(view: MappingProxyType[Any, Any]) -> type | None:
    [namespace] = gc.get_referents(view)
    if not isinstance(namespace, dict) or "__module__" not in namespace or "__doc__" not in namespace:
        return None
    if id(namespace) not in _known:
        for cls in gc.get_referrers(namespace):
            if isinstance(cls, type) and class_namespace(cls) is namespace:
                _known[id(namespace)] = cls
    return _known.get(id(namespace))


class _Empty(typing.Protocol): ...


_OF_ANY_PROTOCOL = frozenset(vars(_Empty))


def read_protocol(recorder: Recorder, owner: Any, protocol: Any) -> None:
    """`isinstance(owner, protocol)` asks for attributes, as `hasattr` does."""
    for base in protocol.__mro__:
        if getattr(base, "_is_protocol", False) and base is not typing.Protocol:
            for name in {**vars(base), **vars(base).get("__annotations__", {})}.keys() - _OF_ANY_PROTOCOL:
                recorder.read_attribute(owner, name)
