"""A picture of Python objects of any kind: what they hold, of which types, and which places hold the same object.

A picture maps places to what is there. Two worlds that were built alike and treated alike have equal pictures. Numbers,
strings and tuples are compared by type and value; tensors, arrays and everything that can change also by identity: the
second place that holds an object says where it was met first. A tensor's autograd history is left out, which compiled
steps do not have (docs/limits.md).
"""

from __future__ import annotations

import collections
import enum
import functools
import gc
import inspect
import io
import itertools
import logging
import random
import re
import types
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from tests.parity import differences as tensor_differences
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

WORLD = "world"
"""How the names of modules begin whose globals and classes belong to the picture."""

Picture = dict[str, Tensor | str]
Child = tuple[str, Any]

_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...), type(NotImplemented))
_NAMED = (
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    range,
    slice,
    enum.Enum,
    np.dtype,
    types.CodeType,
)
# What Python keeps of its own in a class; `copy.copy` adds the last.
_CLASS_RECORDS = ("__module__", "__doc__", "__firstlineno__", "__static_attributes__", "__slotnames__")


def picture(roots: Mapping[str, Any], before: Iterable[Any] = ()) -> tuple[Picture, list[Any]]:
    """What the roots hold, and the objects met on the way.

    Handed in again as `before`, those objects are looked at too: a step that changes an object in place differs from
    one that puts a new object there, for whoever still has the old one.
    """
    painter = _Painter()
    for name, value in roots.items():
        painter.visit(name, value)
    met = list(painter.met)
    for index, value in enumerate(before):
        painter.visit(f"before[{index}]", value)
    return painter.seen, met


def generators() -> dict[str, Any]:
    """The states of the global generators, as roots of a picture."""
    return {
        "torch's generator": _digest(torch.get_rng_state().tolist()),
        "random's generator": _digest(random.getstate()),
        "NumPy's generator": _digest(_numpy_state(np.random.get_state(legacy=False))),
    }


def replaced(after: Picture) -> list[str]:
    """Of a picture with `before`: one line for each object that has left its place."""
    return [f"{place}: another object is there now" for place, text in after.items() if _has_left(place, text)]


def _has_left(place: str, text: Tensor | str) -> bool:
    return re.fullmatch(r"(type of )?before\[\d+\]", place) is not None and not str(text).startswith("the object at ")


def differences(expected: Picture, actual: Picture, names: tuple[str, str] = ("eager", "compiled")) -> list[str]:
    """One line for every place that differs."""
    lines: list[str] = []
    for place in [*expected, *(place for place in actual if place not in expected)]:
        left, right = expected.get(place, "nothing"), actual.get(place, "nothing")
        if isinstance(left, Tensor) and isinstance(right, Tensor):
            lines += tensor_differences({place: left}, {place: right})
        elif isinstance(left, Tensor) or isinstance(right, Tensor) or left != right:
            lines.append(f"{place}: {_shown(left)} in {names[0]}, {_shown(right)} in {names[1]}")
    return lines


def _digest(state: Any) -> str:
    """Long states are told apart by a number."""
    return f"state {zlib.crc32(repr(state).encode()):08x}"


def _numpy_state(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _numpy_state(value) for key, value in state.items()}
    return state.tolist() if isinstance(state, np.ndarray) else state


def _shown(value: Tensor | str) -> str:
    text = value if isinstance(value, str) else f"a tensor {value.tolist()}"
    return text if len(text) < 200 else f"{text[:200]}..."


class _Painter:
    def __init__(self) -> None:
        self.seen: Picture = {}
        self.met: list[Any] = []
        self._places: dict[int, str] = {}
        self._memory: dict[int, str] = {}

    def visit(self, place: str, value: Any) -> None:
        stack = [(place, value)]
        while stack:
            place, value = stack.pop()
            children = self._paint(place, value)
            stack.extend((place + step, child) for step, child in reversed(children))

    def _paint(self, place: str, value: Any) -> list[Child]:
        kind = _kind(value)
        if isinstance(value, _PLAIN) or (isinstance(value, np.generic) and not isinstance(value, np.void)):
            self.seen[place] = f"{kind} {value!r}"
            return []
        if isinstance(value, _NAMED):
            self.seen[place] = f"{kind} {_name_of(value)}"
            return []
        if isinstance(value, tuple | frozenset):
            return self._open(place, kind, value)
        first = self._places.setdefault(id(value), place)
        if first != place:
            self.seen[place] = f"the object at {first}"
            return []
        self.met.append(value)
        if isinstance(value, Tensor):
            return self._paint_tensor(place, kind, value)
        if isinstance(value, np.ndarray) and value.dtype != object:
            self.seen[place] = f"{kind} {value.dtype} {value.shape} {value.tolist()!r}{self._shared(place, value)}"
            return []
        return self._open(place, kind, value)

    def _open(self, place: str, kind: str, value: Any) -> list[Child]:
        text, children = _opened(value, self._label)
        self.seen[place] = f"{kind} {text}".rstrip()
        return children

    def _label(self, key: Any) -> str:
        """A key of a dict, or an element of a set, as text: objects by where they were met."""
        if isinstance(key, tuple):
            return f"({', '.join(map(self._label, key))})"
        if isinstance(key, _PLAIN):
            return repr(key)
        if isinstance(key, _NAMED) or inspect.isroutine(key) or isinstance(key, type):
            return _name_of(key)
        return self._places.get(id(key), _kind(key))

    def _paint_tensor(self, place: str, kind: str, value: Tensor) -> list[Child]:
        if type(value) not in (Tensor, nn.Parameter, nn.Buffer):
            # Of a FakeTensor or the like nothing can be read; its type is the finding.
            self.seen[place] = kind
            return []
        flags = " requires grad" if value.is_leaf and value.requires_grad else ""
        self.seen[f"type of {place}"] = f"{kind}{flags}{self._shared(place, value)}"
        self.seen[place] = value.detach().clone()
        children: list[Child] = [(".grad", value.grad)] if value.is_leaf and value.grad is not None else []
        own = {name: item for name, item in vars(value).items() if name != "_is_param"} if vars(value) else {}
        return children + [(f".{name}", item) for name, item in own.items()]

    def _shared(self, place: str, value: Tensor | np.ndarray[Any, Any]) -> str:
        if isinstance(value, Tensor):
            strided: Tensor = value
            address = strided.untyped_storage().data_ptr() if strided.layout is torch.strided else 0
        else:
            owner: Any = value
            while isinstance(owner.base, np.ndarray):
                owner = owner.base
            address = owner.__array_interface__["data"][0] if owner.size else 0
        first = self._memory.setdefault(address, place) if address else place
        return "" if first == place else f" in the memory of {first}"


def _kind(value: Any) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{_module(kind)}.{kind.__qualname__}"


def _module(named: Any) -> str:
    """Modules of the two worlds are called alike, up to what follows the dot."""
    return str(getattr(named, "__module__", "")).partition("@")[0]


def _name_of(value: Any) -> str:
    name = getattr(value, "__qualname__", None)
    return f"{_module(value)}.{name}" if name else repr(value)


def _is_of_the_world(module_name: Any) -> bool:
    return str(module_name).startswith(WORLD)


def _opened(value: Any, label: Callable[[Any], str]) -> tuple[str, list[Child]]:
    """What a value says of itself, and what it holds, with the way there."""
    for kinds, opener in _OPENERS:
        if isinstance(value, kinds):
            return opener(value, label)
    return _open_object(value)


def _open_mapping(value: Mapping[Any, Any], label: Callable[[Any], str]) -> tuple[str, list[Child]]:
    labels = [label(key) for key in value]
    factory = value.default_factory if isinstance(value, collections.defaultdict) else None
    text = f"of {len(labels)}" if factory is None else f"of {len(labels)} by {_name_of(factory)}"
    # The order of the keys is part of what a dict is: the position tells it.
    children = [(f"[{name}]#{at}", item) for at, (name, item) in enumerate(zip(labels, value.values()))]
    objects = [(f".key#{at}", key) for at, key in enumerate(value) if not isinstance(key, (*_PLAIN, *_NAMED, tuple))]
    return text, objects + children + _own_attributes(value)


def _open_sequence(value: Any, label: Callable[[Any], str]) -> tuple[str, list[Child]]:
    text = f"of {len(value)}"
    if isinstance(value, collections.deque):
        text += f" at most {value.maxlen}"
    return text, [(f"[{at}]", item) for at, item in enumerate(value)] + _own_attributes(value)


def _open_set(value: Any, label: Callable[[Any], str]) -> tuple[str, list[Child]]:
    return f"{{{', '.join(sorted(map(label, value)))}}}", []


def _open_function(value: types.FunctionType, label: Callable[[Any], str]) -> tuple[str, list[Child]]:
    children: list[Child] = [(f".{name}", item) for name, item in vars(value).items()]
    children += [(f".defaults[{at}]", item) for at, item in enumerate(value.__defaults__ or ())]
    children += [(f".defaults[{name}]", item) for name, item in (value.__kwdefaults__ or {}).items()]
    for name, cell in zip(value.__code__.co_freevars, value.__closure__ or ()):
        with_value = [] if _is_empty(cell) else [(f".<{name}>", cell.cell_contents)]
        children += with_value
    if _is_of_the_world(value.__module__):
        used = [name for name in value.__code__.co_names if name in value.__globals__]
        children += [(f".global {name}", value.__globals__[name]) for name in used]
    return _name_of(value), children


def _is_empty(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is cell
    except ValueError:
        return True


def _open_cached(value: Any, label: Callable[[Any], str]) -> tuple[str, list[Child]]:
    """An `lru_cache`; only the garbage collector knows what it keeps."""
    info = value.cache_info()
    held = [item for item in gc.get_referents(value) if item is not vars(value) and not inspect.isroutine(item)]
    if info.maxsize is None:
        [results] = [list(item.values()) for item in held if type(item) is dict]
    else:
        results = [item for item in held if not isinstance(item, dict | type)]
    return str(info), [(".wrapped", value.__wrapped__), *((f".kept[{at}]", item) for at, item in enumerate(results))]


def _open_method(value: Any, label: Callable[[Any], str]) -> tuple[str, list[Child]]:
    owner = getattr(value, "__self__", None)
    held = [] if owner is None or inspect.ismodule(owner) else [(".self", owner)]
    function = getattr(value, "__func__", None)
    return _name_of(value), [*held, *([] if function is None else [(".function", function)])]


def _open_partial(value: functools.partial[Any], label: Callable[[Any], str]) -> tuple[str, list[Child]]:
    return "", [(".func", value.func), (".args", value.args), (".keywords", value.keywords)]


def _open_class(value: type, label: Callable[[Any], str]) -> tuple[str, list[Child]]:
    if not _is_of_the_world(value.__module__):
        return _name_of(value), []
    hidden = {
        "__dict__",
        "__weakref__",
        "__module__",
        "__doc__",
        "__firstlineno__",
        "__static_attributes__",
        "__slotnames__",
    }
    own = [(f".{name}", item) for name, item in vars(value).items() if name not in hidden]
    return _name_of(value), [child for child in own if not isinstance(child[1], types.GetSetDescriptorType)]


def _open_module(value: types.ModuleType, label: Callable[[Any], str]) -> tuple[str, list[Child]]:
    name = value.__name__.partition("@")[0]
    if not _is_of_the_world(name):
        return name, []
    return name, [(f".{key}", item) for key, item in vars(value).items() if not key.startswith("__")]


def _open_wrapper(value: Any, label: Callable[[Any], str]) -> tuple[str, list[Child]]:
    if isinstance(value, property):
        return "", [(".get", value.fget), (".set", value.fset)]
    return "", [(".function", value.__func__)]


def _open_state(value: Any, label: Callable[[Any], str]) -> tuple[str, list[Child]]:
    """Generators of random numbers, and what else has its whole state in one value."""
    for kind, state in _STATES:
        if isinstance(value, kind):
            return "", [(".state", state(value))]
    raise AssertionError(f"no state is known of {value!r}")


def _open_generator(value: types.GeneratorType[Any, Any, Any], label: Any) -> tuple[str, list[Child]]:
    if value.gi_frame is None:
        return "at its end", []
    return f"at {value.gi_frame.f_lasti}", [(f".<{k}>", v) for k, v in value.gi_frame.f_locals.items()]


def _open_object(value: Any) -> tuple[str, list[Child]]:
    children = _own_attributes(value)
    if children or hasattr(value, "__dict__") or _slots(value):
        return "", children
    text = repr(value)
    return ("" if " at 0x" in text else text), []


def _own_attributes(value: Any) -> list[Child]:
    names = [(name, item) for name, item in getattr(value, "__dict__", {}).items() if isinstance(name, str)]
    names += [(name, getattr(value, name)) for name in _slots(value) if hasattr(value, name)]
    # Schedulers look at this mark of torch's own; a compiled step always sets it, eager if there is a scheduler.
    names = [(name, item) for name, item in names if name != "_opt_called"]
    if isinstance(value, nn.Module | torch.optim.Optimizer):
        # Hooks are kept by the number of their handle, of which the process has one series.
        hooks = [
            (f".{name}[{at}]", hook)
            for name, item in names
            if "_hooks" in name
            for at, hook in enumerate(item.values())
        ]
        return [(f".{name}", item) for name, item in names if "_hooks" not in name] + hooks
    return [(f".{name}", item) for name, item in names]


def _slots(value: Any) -> Iterator[str]:
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ()) if _is_of_the_world(kind.__module__) else ()
        yield from (slot for slot in ([slots] if isinstance(slots, str) else slots) if not slot.startswith("__"))


_STATES: list[tuple[Any, Callable[[Any], Any]]] = [
    (random.Random, lambda value: _digest(value.getstate())),
    (np.random.Generator, lambda value: _digest(_numpy_state(value.bit_generator.state))),
    (np.random.RandomState, lambda value: _digest(_numpy_state(value.get_state(legacy=False)))),
    (torch.Generator, lambda value: _digest(value.get_state().tolist())),
    (io.StringIO, lambda value: value.getvalue()),
    (itertools.count, repr),
    (logging.Logger, lambda value: value.name),
    # Handles are numbered through the process; what counts is whether the hook is still there.
    (RemovableHandle, lambda value: value.id in (value.hooks_dict_ref() or {})),
    ((weakref.ref), lambda value: value()),
    ((type(iter([])), type(iter(())), type(iter(range(0)))), lambda value: value.__reduce__()[1:]),
]
_OPENERS: list[tuple[Any, Callable[[Any, Callable[[Any], str]], tuple[str, list[Child]]]]] = [
    (tuple(kind for kinds, _ in _STATES for kind in (kinds if isinstance(kinds, tuple) else (kinds,))), _open_state),
    (type, _open_class),
    (types.ModuleType, _open_module),
    (types.FunctionType, _open_function),
    (types.GeneratorType, _open_generator),
    (functools._lru_cache_wrapper, _open_cached),
    (functools.partial, _open_partial),
    ((types.MethodType, types.BuiltinMethodType), _open_method),
    ((property, staticmethod, classmethod), _open_wrapper),
    (Mapping, _open_mapping),
    ((list, tuple, collections.deque), _open_sequence),
    ((set, frozenset), _open_set),
]
