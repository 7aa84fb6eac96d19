"""Inputs that share memory: they are traced as independent values, which is wrong as soon as one of them is written."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch

from wholestep import _torch
from wholestep.capture.blank import is_blank


class Span(NamedTuple):
    """Which bytes a tensor lies in: of which memory, from where to where."""

    memory: str
    start: int
    end: int
    name: str


def span(name: str, tensor: torch.Tensor) -> Span | None:
    """Where a tensor lies; None if it has no memory that could be shared."""
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return None
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    num_bytes = extent * tensor.element_size()
    if is_blank(tensor):
        start = int(tensor.storage_offset()) * tensor.element_size()
        return Span(f"blank {_torch.storage_key(tensor)}", start, start + num_bytes, name)
    if tensor.device.type == "meta":
        return None
    start = tensor.data_ptr()
    return Span(str(tensor.device), start, start + num_bytes, name)


def array_span(name: str, array: np.ndarray[Any, Any]) -> Span:
    """Where a NumPy array lies."""
    extents = [(size - 1) * stride for size, stride in zip(array.shape, array.strides, strict=True)]
    start = array.ctypes.data
    below, above = (sum(map(bound, extents, [0] * len(extents))) for bound in (min, max))
    return Span("cpu", start + below, start + above + array.itemsize, name)


def first_overlap(spans: Iterable[Span], written: Container[str]) -> tuple[str, str] | None:
    """Two tensors that overlap and of which one is written; None if there are none."""
    ordered = sorted(spans)
    for index, one in enumerate(ordered):
        for other in ordered[index + 1 :]:
            if other.memory != one.memory or other.start >= one.end:
                break
            if one.name in written or other.name in written:
                return one.name, other.name
    return None
