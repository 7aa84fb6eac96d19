"""A picture of Python objects of any kind: what they hold, of which types, and which places hold the same object.

A picture maps places to what is there. Two worlds that were built alike and treated alike have equal pictures. Numbers,
strings and tuples are compared by type and value; tensors, arrays and everything that can change also by identity: the
second place that holds an object says where it was met first. A tensor's autograd history is left out, which compiled
steps do not have (docs/limits.md).
"""

from __future__ import annotations

import dataclasses
import inspect
import random
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from tests.openers import NAMED, PLAIN, Child, digest, kind_of, name_of, opened
from tests.parity import differences as tensor_differences
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

Picture = dict[str, Tensor | str]

_INTERNAL = (FakeTensor, FunctionalTensor)


@dataclasses.dataclass(frozen=True)
class _ByValue:
    """Marks what is compared by value alone."""

    value: Any


def picture(
    roots: Mapping[str, Any], before: Iterable[Any] = (), *, torchs_by_value: bool = False
) -> tuple[Picture, list[Any]]:
    """What the roots hold, and the objects met on the way.

    Handed in again as `before`, those objects are looked at too: a step that changes an object in place differs from
    one that puts a new object there, for whoever still has the old one.

    With `torchs_by_value`, gradients, buffers and the state of optimizers are compared by value only, and memory that
    tensors share is not looked at: what most tests of steps are about is the numbers.
    """
    painter = _Painter(torchs_by_value)
    for name, value in roots.items():
        painter.visit(name, value)
    met = list(painter.met)
    for index, value in enumerate(before):
        painter.visit(f"before[{index}]", value)
    return painter.seen, met


def generators() -> dict[str, Any]:
    """The states of the global generators, as roots of a picture."""
    return {
        "torch's generator": digest(torch.get_rng_state()),
        "random's generator": digest(random.getstate()),
        "NumPy's generator": digest(np.random.get_state(legacy=False)),
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
            if _kind(left) != _kind(right):
                lines.append(f"{place}: {_kind(left)} in {names[0]}, {_kind(right)} in {names[1]}")
                continue
            left, right = _comparable(left), _comparable(right)
            if not torch.equal(left, right):
                lines += tensor_differences({place: left}, {place: right})
        elif isinstance(left, Tensor) or isinstance(right, Tensor) or left != right:
            lines.append(f"{place}: {_shown(left)} in {names[0]}, {_shown(right)} in {names[1]}")
    return lines


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.layout, tensor.dtype, tensor.device, tuple(tensor.shape)


def _comparable(tensor: Tensor) -> Tensor:
    """The same values as torch can compare them."""
    dense = tensor if tensor.layout is torch.strided else tensor.to_dense()
    return torch.view_as_real(dense.resolve_conj()) if dense.dtype is torch.complex32 else dense


def _shown(value: Tensor | str) -> str:
    text = value if isinstance(value, str) else f"a tensor {value.tolist()}"
    return text if len(text) < 200 else f"{text[:200]}..."


class _Painter:
    def __init__(self, torchs_by_value: bool) -> None:
        self._torchs_by_value = torchs_by_value
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
        if isinstance(value, _ByValue):
            return self._paint_by_value(place, value.value)
        kind = kind_of(value)
        if isinstance(value, PLAIN) or (isinstance(value, np.generic) and not isinstance(value, np.void)):
            self.seen[place] = f"{kind} {value!r}"
            return []
        if isinstance(value, NAMED):
            self.seen[place] = f"{kind} {name_of(value)}"
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
        text, children = opened(value, self._label)
        self.seen[place] = f"{kind} {text}".rstrip()
        if self._torchs_by_value and isinstance(value, nn.Module | torch.optim.Optimizer):
            return _torchs_children(value, children)
        return children

    def _paint_by_value(self, place: str, value: Any) -> list[Child]:
        if isinstance(value, Tensor):
            self.seen[place] = kind_of(value) if isinstance(value, _INTERNAL) else value.detach().clone()
            return []
        if isinstance(value, Mapping):
            return [(f"[{self._label(key)}]", _ByValue(item)) for key, item in value.items()]
        return [("", value)]

    def _label(self, key: Any) -> str:
        """A key of a dict, or an element of a set, as text: objects by where they were met."""
        if isinstance(key, tuple):
            return f"({', '.join(map(self._label, key))})"
        if isinstance(key, PLAIN):
            return repr(key)
        if isinstance(key, NAMED) or inspect.isroutine(key) or isinstance(key, type):
            return name_of(key)
        return self._places.get(id(key), kind_of(key))

    def _paint_tensor(self, place: str, kind: str, value: Tensor) -> list[Child]:
        if isinstance(value, _INTERNAL):
            # Nothing can be read of it; its type is the finding.
            self.seen[place] = kind
            return []
        if self._torchs_by_value:
            # While updates wait, the class of a parameter is one of ours.
            kind = "parameter" if isinstance(value, nn.Parameter) else "tensor"
        flags = " requires grad" if value.is_leaf and value.requires_grad else ""
        self.seen[f"type of {place}"] = f"{kind}{flags}{self._shared(place, value)}"
        self.seen[place] = value.detach().clone()
        children: list[Child] = []
        if value.is_leaf and value.grad is not None:
            children = [(".grad", _ByValue(value.grad) if self._torchs_by_value else value.grad)]
        own = {name: item for name, item in vars(value).items() if name != "_is_param"} if vars(value) else {}
        return children + [(f".{name}", item) for name, item in own.items()]

    def _shared(self, place: str, value: Tensor | np.ndarray[Any, Any]) -> str:
        if self._torchs_by_value:
            return ""
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


def _torchs_children(value: nn.Module | torch.optim.Optimizer, children: list[Child]) -> list[Child]:
    if isinstance(value, nn.Module):
        return [(way, _ByValue(item) if way == "._buffers" else item) for way, item in children]
    own = [(way, item) for way, item in children if not way.startswith("._")]
    states = {parameter: state for parameter, state in value.state.items() if state}
    torchs = {".state": _ByValue(states), ".defaults": _ByValue(getattr(value, "defaults", None))}
    return [(way, torchs.get(way, item)) for way, item in own]
