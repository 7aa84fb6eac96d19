"""Methods of Python's own containers: which of them read, which write, and what."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from wholestep.capture.record import tensors

if TYPE_CHECKING:
    from wholestep.capture.record.recorder import Recorder

_READERS = frozenset(
    [
        "keys",
        "values",
        "items",
        "get",
        "copy",
        "index",
        "count",
        "__iter__",
        "__len__",
        "__contains__",
        "__getitem__",
        "__eq__",
        "__ne__",
        "__lt__",
        "__le__",
        "__gt__",
        "__ge__",
        "__add__",
        "__mul__",
        "__reversed__",
        "__or__",
        "union",
        "intersection",
        "difference",
        "symmetric_difference",
        "issubset",
        "issuperset",
        "isdisjoint",
        "__repr__",
        "__str__",
        "__format__",
        "__hash__",
        "__sizeof__",
        "__reduce__",
        "__reduce_ex__",
        "__class_getitem__",
        "_asdict",
    ]
)

KEEPING = frozenset(
    ["append", "appendleft", "insert", "extend", "extendleft", "update", "setdefault", "pop", "get", "__setitem__"]
)
"""What these are given is put away, or handed out if nothing else is there: nobody looks at it."""


def call_method(recorder: Recorder, owner: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A method of a builtin container; one that may write is noted with what it is given."""
    if recorder.place_of(owner) is None:
        return
    for arg in args:
        is_key = isinstance(arg, torch.Tensor) or id(arg) in recorder.drawn_items
        if is_key and name not in ("append", "appendleft", "insert"):
            tensors.looked_up(recorder, owner, arg)
    if isinstance(owner, dict):
        _dict_method(recorder, owner, name, args, kwargs)
    elif name in ("append", "appendleft", "add", "discard"):
        recorder.about_to_change(owner, name, *args)
    elif name in ("extend", "extendleft", "update") and all(isinstance(arg, (list, tuple)) for arg in args):
        recorder.about_to_change(owner, name, *map(tuple, args))
    elif name in ("insert", "clear", "__setitem__", "__delitem__", "reverse", "rotate"):
        recorder.about_to_change(owner, name, *args)
    elif name in ("pop", "popleft") and not isinstance(owner, set):
        _read_popped(recorder, owner, name, args)
        recorder.about_to_change(owner, name, *args)
    else:
        recorder.read_all(owner)
        if name not in _READERS:
            recorder.about_to_change(owner, name, *args)


def _read_popped(recorder: Recorder, owner: Any, name: str, args: tuple[Any, ...]) -> None:
    index = args[0] if args else (0 if name == "popleft" else -1)
    if type(index) is int:
        recorder.read_position(owner, index)
    else:
        recorder.read_all(owner)


def _dict_method(
    recorder: Recorder, owner: dict[Any, Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    if name in ("get", "setdefault", "pop", "__getitem__") and args:
        recorder.identify(args[0])
        recorder.read_item(owner, args[0])
        if name in ("setdefault", "pop"):
            recorder.about_to_change(owner)
    elif name == "__contains__":
        recorder.read_presence(owner, args[0])
    elif name == "__setitem__":
        recorder.wrote(owner, args[0])
    elif name == "__delitem__":
        recorder.read_presence(owner, args[0])
        recorder.about_to_change(owner)
    elif name == "update":
        recorder.about_to_change(owner)
        given = dict(*args) if args and isinstance(args[0], (dict, list, tuple)) else {}
        for key in (*given, *kwargs):
            recorder.wrote(owner, key)
    elif name == "clear":
        recorder.cleared(owner)
    elif name in ("move_to_end", "popitem"):
        recorder.read_all(owner)
        recorder.about_to_change(owner)
    else:
        recorder.read_all(owner)
        if name not in _READERS:
            recorder.about_to_change(owner)
