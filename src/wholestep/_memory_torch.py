# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false
"""Views as what they make of their memory: sizes, strides, the kind of number, and bits that kernels look at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch


@dataclass(frozen=True, slots=True)
class Form:
    """Where a view lies in its memory and how that is read; conjugate and negative views are two bits."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    is_conj: bool
    is_neg: bool


def form_of(tensor: torch.Tensor) -> Form:
    place = tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
    return Form(*place, tensor.dtype, tensor.is_conj(), tensor.is_neg())


def memory_as(tensor: torch.Tensor, form: Form) -> torch.Tensor:
    """A tensor of another form in the memory of one."""
    if (tensor.dtype, tensor.is_conj(), tensor.is_neg()) == (form.dtype, form.is_conj, form.is_neg):
        return tensor.as_strided(form.shape, form.strides, form.offset)
    made = torch.empty(0, dtype=form.dtype, device=tensor.device)
    made.set_(cast(Any, tensor.untyped_storage()), form.offset, form.shape, form.strides)
    made = torch._conj(made) if form.is_conj else made
    return torch._neg_view(made) if form.is_neg else made
