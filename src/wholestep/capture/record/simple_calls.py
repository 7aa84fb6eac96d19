"""Builtins and methods of torch that read or write in one known way."""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.optim import Optimizer

from wholestep import _torch
from wholestep.capture.entries import Entries
from wholestep.capture.record import classes, whole
from wholestep.capture.record.imports import require_loaded
from wholestep.capture.record.places import CONTAINERS

if TYPE_CHECKING:
    from wholestep.capture.record.recorder import Recorder


def vars_(recorder: Recorder, function: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    if args and isinstance(args[0], torch.Tensor):
        recorder.read_attribute(args[0], "__dict__")
    if args and recorder.place_of(args[0]) is not None:
        recorder.namespace_of(args[0])
        if isinstance(args[0], Optimizer):
            recorder.states_read.add(id(args[0]))
    return function


def dir_(recorder: Recorder, function: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    if args:
        classes.read_names(recorder, args[0])
    return function


def globals_(recorder: Recorder, function: Any, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    recorder.root_globals()
    return function


def copied(recorder: Recorder, method: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """`copy.deepcopy` of a tensor, which copies memory that is not there while the step is traced."""
    if _torch.is_traced(args[0] if isinstance(method, types.FunctionType) else method.__self__):
        recorder.refuse(
            "copies a tensor with copy.deepcopy()",
            "Use clone(), as in {name: value.clone() for name, value in model.state_dict().items()}",
        )
    return method


def train(recorder: Recorder, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`model.train()` and `model.eval()`, which set an attribute of every layer."""
    root = getattr(method, "__self__", None) or args[0]
    for module in root.modules():
        recorder.wrote(recorder.namespace_of(module), "training")
        recorder.follow_all(type(module).train)
    return method


def get_attributes(recorder: Recorder, getter: Any, args: tuple[Any, ...]) -> None:
    """`operator.attrgetter("a.b")(owner)`."""
    for name in getter.__reduce__()[1]:
        owner = args[0]
        for part in name.split("."):
            recorder.read_attribute(owner, part)
            owner = getattr(owner, part, None)


def get_items(recorder: Recorder, getter: Any, args: tuple[Any, ...]) -> None:
    """`operator.itemgetter(0)(owner)`."""
    for key in getter.__reduce__()[1]:
        recorder.read_subscript(args[0], key)


def imports(_recorder: Recorder, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    require_loaded(*args, **kwargs)
    return function


def is_subclass(recorder: Recorder, function: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    whole.read_reached(recorder, args[1])
    return function


def length(recorder: Recorder, function: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    owner = args[0]
    if type(owner) is Entries:
        return Entries.length
    if isinstance(owner, torch.Tensor) and owner.dim() and isinstance(owner.shape[0], torch.SymInt):
        return _num_rows
    if isinstance(owner, types.MappingProxyType):
        classes.read_view(recorder, owner)
        return function
    if recorder.place_of(owner) is None or not isinstance(owner, (*CONTAINERS, np.ndarray)):
        recorder.refuse_hidden_state(owner)
        recorder.follow_operators(owner)
        return function
    return recorder.length if isinstance(owner, CONTAINERS) else function


def _num_rows(tensor: torch.Tensor) -> Any:
    """`len(tensor)`, without asking for the number."""
    return tensor.shape[0]
