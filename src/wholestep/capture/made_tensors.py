"""Tensors made of arrays that Python computes from what the graph computes: a call inside the graph.

    target = torch.tensor(ratio / np.mean(ratio))       made_tensor(<the graph's ratio>), of this shape and dtype

The array of a tensor as it is (`torch.from_numpy(loss.numpy())`) is that tensor, and no call is needed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from wholestep import _recording_torch, _torch
from wholestep.capture.record import forms
from wholestep.capture.record.arrays import LateArray, Memory
from wholestep.capture.record.late import Within
from wholestep.capture.record.late_calls import FROM_DATA
from wholestep.capture.record.late_values import finder, late_parts, samples
from wholestep.capture.record.numbers import Number, settled

if TYPE_CHECKING:
    from wholestep.capture.session import Session

_SHARING = (torch.from_numpy, torch.as_tensor, torch.asarray)


class Made(Within):
    """A call of the graph: the tensor that torch makes of what Python makes of tensors."""

    __name__ = "made_tensor"
    is_python: bool = True

    def __init__(self, within: Within, make: Callable[[Any], torch.Tensor], like: torch.Tensor, text: str) -> None:
        super().__init__(within.code, within.name, may_raise=True)
        self._make, self._text = make, text
        self._layout = like.shape, like.stride(), like.dtype, like.device

    def __str__(self) -> str:
        return f"made_tensor({self.code.text!r}, {self._text})"

    def __call__(self, *values: Any) -> Any:
        if any(isinstance(value, _torch.FakeTensor) for value in values):
            return torch.empty_strided(*self._layout[:2], dtype=self._layout[2], device=self._layout[3])
        return self._make(_own(self.value(*values)))


def make(session: Session, function: Any, data: Any, *args: Any, requires_grad: bool = False, **kwargs: Any) -> Any:
    """`function(data)`, traced."""
    alias = _alias(function, data, args, kwargs)
    made = alias if alias is not None else _call(session, function, data, args, kwargs)
    return made.requires_grad_() if requires_grad else made


def _alias(function: Any, data: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The tensor behind an array, where torch would make one of the same numbers."""
    if type(data) is not LateArray or data.late.tensor is None or args or function not in FROM_DATA:
        return None
    tensor = data.late.tensor.detach()
    if function is torch.tensor:
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    dtype, device = kwargs.get("dtype"), kwargs.get("device", torch.get_default_device())
    if kwargs.keys() - {"dtype", "device"} or (function is torch.from_numpy and kwargs):
        return None
    return tensor if function is torch.from_numpy else tensor.to(device=device, dtype=dtype or tensor.dtype)


def _call(session: Session, function: Any, data: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    late = session.recorder.late
    for part in late_parts(data):
        late.require_kind(part) if type(part) is Number else late.require_form(part)
    rest: tuple[Any, ...] = (*args, *kwargs.values())
    if any(isinstance(one, (torch.Tensor, LateArray, torch.SymInt, torch.SymFloat)) for one in rest):
        session.recorder.refuse("makes a tensor of an array in a way that cannot be traced", "Use torch.from_numpy")
    args, kwargs = tuple(map(settled, args)), {name: settled(value) for name, value in kwargs.items()}
    if function in (torch.tensor, torch.as_tensor, torch.asarray):
        kwargs = {"device": torch.get_default_device(), **kwargs}
    if isinstance(getattr(function, "__self__", None), torch.Tensor):  # `x.new_tensor(data)`
        owner = function.__self__
        function, kwargs = torch.tensor, {"dtype": owner.dtype, "device": owner.device, **kwargs}
    create = functools.partial(_created, function, args, kwargs)
    real = _sample(create, data)
    name = late.line(late.spelled(data))
    within = Made(late.within_name(name), create, real, f"{getattr(function, '__name__', function)}, {args}, {kwargs}")
    leaves, given = session.looks.given_to(within)
    fake = _torch.fake_like(session.fake_mode, real, "made_tensor")
    _torch.track_as_call(session.tracer, fake, within, (*leaves, *given))
    session.annotate()
    twin = _torch.to_functional(fake)
    session.handed_out.add(twin)
    session.looks.note_made(name, twin)
    if type(data) is LateArray and (function in _SHARING or isinstance(function, type)):
        data.late.seen[Memory(twin)] = session.node_of(twin)  # whoever writes to it writes to the array
    return twin


def _created(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], data: Any) -> torch.Tensor:
    return function(data, *args, **kwargs)


def _sample(create: Callable[[Any], torch.Tensor], data: Any) -> torch.Tensor:
    """A real tensor of the form that is made."""
    with _recording_torch.untraced():
        made = forms.tried(lambda index: create(_own(samples(data, index))), 2)
        return made[0] if made else create(_own(finder(data)()))


def _own(value: Any) -> Any:
    """Arrays in memory of their own: the graph may write to what it has made."""
    if isinstance(value, np.ndarray):
        return value.copy(order="K")
    return type(value)(map(_own, value)) if type(value) in (list, tuple) else value
