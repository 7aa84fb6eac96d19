"""The memory of a tensor, past PyTorch: looking at it applies nothing, and nobody knows that somebody looks."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor


def raw_memory(tensor: Tensor) -> Tensor:
    """A tensor at the same address as a contiguous one, for as long as that stays there."""
    assert tensor.is_contiguous()
    buffer = (ctypes.c_byte * (tensor.numel() * tensor.element_size())).from_address(tensor.data_ptr())
    return torch.frombuffer(buffer, dtype=tensor.dtype).view(tensor.shape)
