"""What Python objects say of themselves and what they hold: the openers that pictures are painted with."""

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
import types
import weakref
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

Child = tuple[str, Any]
Opened = tuple[str, list[Child]]
Label = Callable[[Any], str]

WORLD = "world"
"""How the names of modules begin whose globals and classes belong to the picture."""

PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...), type(NotImplemented))
NAMED = (
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


def kind_of(value: Any) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{_module(kind)}.{kind.__qualname__}"


def _module(named: Any) -> str:
    return str(getattr(named, "__module__", ""))


def name_of(value: Any) -> str:
    name = getattr(value, "__qualname__", None)
    return f"{_module(value)}.{name}" if name else repr(value)


def _is_of_the_world(module_name: Any) -> bool:
    return str(module_name).startswith(WORLD)


def digest(state: Any) -> str:
    """Long states are told apart by a number."""
    if isinstance(state, torch.Tensor):
        state = state.numpy()
    if isinstance(state, np.ndarray):
        return f"state {zlib.crc32(state.tobytes()):08x}"
    if isinstance(state, dict):
        return " ".join(f"{key}: {digest(item)}" for key, item in state.items())
    return f"state {hash(state) & 0xFFFFFFFF:08x}" if isinstance(state, tuple) else str(state)


def opened(value: Any, label: Label) -> Opened:
    """What a value says of itself, and what it holds, with the way there."""
    return _opener_of(type(value))(value, label)


@functools.cache
def _opener_of(kind: type) -> Callable[[Any, Label], Opened]:
    return next((opener for kinds, opener in _OPENERS if issubclass(kind, kinds)), _open_object)


def _open_mapping(value: Mapping[Any, Any], label: Label) -> Opened:
    labels = [label(key) for key in value]
    factory = value.default_factory if isinstance(value, collections.defaultdict) else None
    text = f"of {len(labels)}" if factory is None else f"of {len(labels)} by {name_of(factory)}"
    # The order of the keys is part of what a dict is: the position tells it.
    children = [(f"[{name}]#{at}", item) for at, (name, item) in enumerate(zip(labels, value.values()))]
    objects = [(f".key#{at}", key) for at, key in enumerate(value) if not isinstance(key, (*PLAIN, *NAMED, tuple))]
    return text, objects + children + _own_attributes(value)


def _open_sequence(value: Any, label: Label) -> Opened:
    text = f"of {len(value)}"
    if isinstance(value, collections.deque):
        text += f" at most {value.maxlen}"
    return text, [(f"[{at}]", item) for at, item in enumerate(value)] + _own_attributes(value)


def _open_set(value: Any, label: Label) -> Opened:
    return f"{{{', '.join(sorted(map(label, value)))}}}", []


def _open_function(value: types.FunctionType, label: Label) -> Opened:
    children: list[Child] = [(f".{name}", item) for name, item in vars(value).items()]
    children += [(f".defaults[{at}]", item) for at, item in enumerate(value.__defaults__ or ())]
    children += [(f".defaults[{name}]", item) for name, item in (value.__kwdefaults__ or {}).items()]
    for name, cell in zip(value.__code__.co_freevars, value.__closure__ or ()):
        with_value = [] if _is_empty(cell) else [(f".<{name}>", cell.cell_contents)]
        children += with_value
    if _is_of_the_world(value.__module__):
        used = [name for name in value.__code__.co_names if name in value.__globals__]
        children += [(f".global {name}", value.__globals__[name]) for name in used]
    return name_of(value), children


def _is_empty(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is cell
    except ValueError:
        return True


def _open_cached(value: Any, label: Label) -> Opened:
    """An `lru_cache`; only the garbage collector knows what it keeps."""
    info = value.cache_info()
    held = [item for item in gc.get_referents(value) if item is not vars(value) and not inspect.isroutine(item)]
    if info.maxsize is None:
        [results] = [list(item.values()) for item in held if type(item) is dict]
    else:
        results = [item for item in held if not isinstance(item, dict | type)]
    # How often it was asked is not part of what it holds: a capture asks once more.
    return f"lru_cache of {info.currsize} (at most {info.maxsize})", [
        (".wrapped", value.__wrapped__),
        *((f".kept[{at}]", item) for at, item in enumerate(results)),
    ]


def _open_method(value: Any, label: Label) -> Opened:
    owner = getattr(value, "__self__", None)
    held = [] if owner is None or inspect.ismodule(owner) else [(".self", owner)]
    function = getattr(value, "__func__", None)
    return name_of(value), [*held, *([] if function is None else [(".function", function)])]


def _open_partial(value: functools.partial[Any], label: Label) -> Opened:
    return "", [(".func", value.func), (".args", value.args), (".keywords", value.keywords)]


def _open_class(value: type, label: Label) -> Opened:
    if not _is_of_the_world(value.__module__):
        return name_of(value), []
    own = [(f".{name}", item) for name, item in vars(value).items() if name not in _CLASS_RECORDS]
    return name_of(value), [child for child in own if not isinstance(child[1], types.GetSetDescriptorType)]


def _open_module(value: types.ModuleType, label: Label) -> Opened:
    name = value.__name__
    if not _is_of_the_world(name):
        return name, []
    return name, [(f".{key}", item) for key, item in vars(value).items() if not key.startswith("__")]


def _open_wrapper(value: Any, label: Label) -> Opened:
    if isinstance(value, property):
        return "", [(".get", value.fget), (".set", value.fset)]
    return "", [(".function", value.__func__)]


def _open_state(value: Any, label: Label) -> Opened:
    """Generators of random numbers, and what else has its whole state in one value."""
    for kind, state in _STATES:
        if isinstance(value, kind):
            return "", [(".state", state(value))]
    raise AssertionError(f"no state is known of {value!r}")


def _open_generator(value: types.GeneratorType[Any, Any, Any], label: Any) -> Opened:
    if value.gi_frame is None:
        return "at its end", []
    return f"at {value.gi_frame.f_lasti}", [(f".<{k}>", v) for k, v in value.gi_frame.f_locals.items()]


def _open_object(value: Any, label: Label) -> Opened:
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
        hooks = [(name, item) for name, item in names if "_hooks" in name and isinstance(item, dict)]
        others = [(f".{name}", item) for name, item in names if "_hooks" not in name]
        return others + [(f".{name}[{at}]", hook) for name, item in hooks for at, hook in enumerate(item.values())]
    return [(f".{name}", item) for name, item in names]


def _slots(value: Any) -> list[str]:
    declared = [kind.__dict__.get("__slots__", ()) for kind in type(value).__mro__]
    slots = [slot for names in declared for slot in ([names] if isinstance(names, str) else names)]
    return [slot for slot in slots if not slot.startswith("__")]


_STATES: list[tuple[Any, Callable[[Any], Any]]] = [
    (random.Random, lambda value: digest(value.getstate())),
    (np.random.Generator, lambda value: digest(value.bit_generator.state)),
    (np.random.RandomState, lambda value: digest(value.get_state(legacy=False))),
    (torch.Generator, lambda value: digest(value.get_state())),
    (io.StringIO, lambda value: value.getvalue()),
    (itertools.count, repr),
    (logging.Logger, lambda value: value.name),
    # Handles are numbered through the process; what counts is whether the hook is still there.
    (RemovableHandle, lambda value: value.id in (value.hooks_dict_ref() or {})),
    (weakref.ref, lambda value: value()),
    ((type(iter([])), type(iter(())), type(iter(range(0)))), lambda value: value.__reduce__()[1:]),
]
_OPENERS: list[tuple[Any, Callable[[Any, Label], Opened]]] = [
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
