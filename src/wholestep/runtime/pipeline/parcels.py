"""Tensors as bytes and back: any dtype, any strides, several in one buffer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

_ALIGNMENT = 16
"""A view of bytes as another type starts at a multiple of its size; no type is larger."""
_PLAIN = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8}
"""Types that every backend sends; others travel as bytes."""


class Form(NamedTuple):
    """What a tensor looks like."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(tensor: torch.Tensor) -> Form:
        return Form(tuple(map(int, tensor.shape)), tuple(map(int, tensor.stride())), tensor.dtype, tensor.device)

    @staticmethod
    def contiguous(tensor: torch.Tensor) -> Form:
        """Of a tensor like this one, but laid out row by row."""
        shape = tuple(map(int, tensor.shape))
        return Form(shape, torch.empty(shape, device="meta").stride(), tensor.dtype, tensor.device)


@dataclass(frozen=True)
class _Item:
    """One tensor of a parcel: where it lies, and how it is laid out there.

    What is expanded (has stride 0) travels once: `core` is the shape without repetitions. If memory has no gaps, it is
    sent as it lies; otherwise row by row.
    """

    name: str
    form: Form
    core: tuple[int, ...]
    begin: int
    end: int
    is_dense: bool

    @staticmethod
    def at(begin: int, name: str, form: Form) -> _Item:
        core = tuple(1 if stride == 0 else size for size, stride in zip(form.shape, form.stride, strict=True))
        core = core if math.prod(form.shape) else form.shape
        end = begin + math.prod(core) * form.dtype.itemsize
        return _Item(name, form, core, begin, end, _is_dense(core, form.stride))

    def _checked(self, value: Any) -> torch.Tensor:
        assert isinstance(value, torch.Tensor), f"{self.name} is no tensor"
        shape, _, dtype, _ = self.form
        assert value.shape == shape, f"{self.name} has shape {tuple(value.shape)}, not {shape}"
        assert value.dtype is dtype, f"{self.name} has type {value.dtype}, not {dtype}"
        return value

    def contiguous(self, value: Any) -> torch.Tensor:
        """The tensor itself, row by row."""
        return self._checked(value).detach().resolve_neg().contiguous()

    def to_bytes(self, value: Any) -> torch.Tensor:
        shape, stride, dtype, _ = self.form
        value = self._checked(value).detach().resolve_conj().resolve_neg()
        if self.core != shape:
            value = value[tuple(slice(0, size) for size in self.core)]
        if not self.is_dense:
            value = value.contiguous()
        elif not _same_strides(value.stride(), stride, self.core):
            value = torch.empty_strided(self.core, stride, dtype=dtype, device=value.device).copy_(value)
        return value.as_strided((value.numel(),), (1,)).view(torch.uint8)

    def from_bytes(self, data: torch.Tensor) -> torch.Tensor:
        shape, stride, dtype, device = self.form
        data = data.to(device).view(dtype)
        if self.is_dense:
            return data.as_strided(shape, stride)
        spread = torch.empty_strided(self.core, stride, dtype=dtype, device=device)
        return spread.copy_(data.view(self.core)).as_strided(shape, stride)


class Parcel:
    """A buffer's worth of named tensors."""

    def __init__(self, forms: Mapping[str, Form], wire: torch.device) -> None:
        self._wire = wire
        items: list[_Item] = []
        end = 0
        for name, form in forms.items():
            items.append(_Item.at(-(-end // _ALIGNMENT) * _ALIGNMENT, name, form))
            end = items[-1].end
        self._items: Sequence[_Item] = items
        self.num_bytes = max(1, end)  # nothing at all is hard to send
        self._is_bare = len(items) == 1 and end > 0
        self._as_it_is = items[0] if self._is_bare and _is_plain(items[0].form, wire) else None

    def empty(self) -> torch.Tensor:
        """Room for a parcel to arrive in."""
        if self._as_it_is is not None:
            return torch.empty(self._as_it_is.form.shape, dtype=self._as_it_is.form.dtype, device=self._wire)
        return torch.empty(self.num_bytes, dtype=torch.uint8, device=self._wire)

    def pack(self, values: Mapping[str, Any]) -> torch.Tensor:
        """The bytes of all tensors; those of a single one are its own memory where that has the right layout."""
        if self._as_it_is is not None:
            return self._as_it_is.contiguous(values[self._as_it_is.name])
        if self._is_bare:
            item = self._items[0]
            return item.to_bytes(values[item.name]).to(self._wire)
        buffer = self.empty()
        for item in self._items:
            buffer[item.begin : item.end].copy_(item.to_bytes(values[item.name]))
        return buffer

    def unpack(self, buffer: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """Names and tensors, which lie in the buffer where that has the right layout."""
        if self._as_it_is is not None:
            return [(self._as_it_is.name, buffer)]
        if self._is_bare:
            item = self._items[0]
            return [(item.name, item.from_bytes(buffer))]
        return [(item.name, item.from_bytes(buffer[item.begin : item.end])) for item in self._items]


def _is_plain(form: Form, wire: torch.device) -> bool:
    """Whether a backend takes such a tensor as it is: row by row, of a common type, where the wire begins."""
    is_by_rows = form.stride == torch.empty(form.shape, device="meta").stride()
    return is_by_rows and form.dtype in _PLAIN and form.device == wire


def _is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether elements fill their memory without gap or overlap."""
    if 0 in shape:
        return True
    expected = 1
    for step, size in sorted((step, size) for step, size in zip(stride, shape, strict=True) if size > 1):
        if step != expected:
            return False
        expected *= size
    return True


def _same_strides(stride: Sequence[int], other: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether two layouts are one; of a dimension with one element the stride means nothing."""
    return stride == other or all(a == b or size <= 1 for a, b, size in zip(stride, other, shape, strict=True))
