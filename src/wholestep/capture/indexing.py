"""Python's indices that torch would look at: one truth value where a mask could stand, arrays that are drawn."""

from __future__ import annotations

import operator
from typing import Any

import torch

from wholestep import _torch
from wholestep.capture.record import Recorder, index_of

_NUMBERS = (bool, int, float)
BY_PLACES = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)


def with_drawn_places(recorder: Recorder, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of an access by places, with a tensor in the place of each array that is drawn."""
    tensor, key, *rest = args
    parts = key if type(key) is tuple else (key,)
    found = tuple(index_of(recorder, part) for part in parts)
    return args if all(map(operator.is_, found, parts)) else (tensor, found if type(key) is tuple else found[0], *rest)


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
