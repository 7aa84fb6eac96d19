"""Python's indices that torch would look at: one truth value where a mask could stand."""

from __future__ import annotations

from typing import Any

import torch

from wholestep import _torch

_NUMBERS = (bool, int, float)


def fills_where(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether a call is `tensor[truth] = number` with a tensor of no dimensions that says whether to write at all.

    Torch asks for the truth and writes to all or nothing, which is what `masked_fill_` does without looking.
    """
    if func is not torch.Tensor.__setitem__ or len(args) != 3:
        return False
    tensor, key, value = args
    if not isinstance(key, torch.Tensor) or key.dim() or key.dtype is not torch.bool or _torch.is_constant(key):
        return False
    return tensor.is_floating_point() and type(value) in _NUMBERS


def fill_where(tensor: torch.Tensor, truth: torch.Tensor, value: float) -> None:
    tensor.masked_fill_(truth, value)
