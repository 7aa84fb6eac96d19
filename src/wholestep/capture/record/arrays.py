"""Arrays that Python has after the graph has run: `loss.detach().cpu().numpy()`, to return or to keep.

While the step is traced nobody knows what is in one, so that all that looks into it, or computes with it, is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import torch


class LateArray:
    """Stands in for the array that shares the memory of a traced tensor; whoever asks is told it is an array."""

    __slots__ = ("_refuse", "tensor")

    def __init__(self, tensor: torch.Tensor, refuse: Callable[[], NoReturn]) -> None:
        self.tensor = tensor
        self._refuse = refuse

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        return np.ndarray

    @__class__.setter
    def __class__(self, kind: type) -> None:
        self._refuse()

    def refuse(self) -> NoReturn:
        self._refuse()

    def item(self) -> Any:
        return self.tensor.item()

    def tolist(self) -> Any:
        return self.tensor.tolist()

    def __getattr__(self, name: str) -> Any:
        return self._refuse()


def _refused(self: LateArray, *_args: Any, **_kwargs: Any) -> Any:
    return self._refuse()  # pyright: ignore[reportPrivateUsage]


_ASKED_OF_CLASSES = """
    add radd iadd sub rsub isub mul rmul imul truediv rtruediv itruediv floordiv rfloordiv ifloordiv mod rmod imod
    pow rpow ipow matmul rmatmul imatmul and rand iand or ror ior xor rxor ixor lshift rshift neg pos abs invert
    eq ne lt le gt ge bool int float complex index len iter getitem setitem delitem contains hash repr str format
    round copy deepcopy reduce reduce_ex array array_ufunc array_function array_interface array_struct buffer
"""
_ATTRIBUTES = ("array_interface", "array_struct")
for name in _ASKED_OF_CLASSES.split():
    setattr(LateArray, f"__{name}__", property(_refused) if name in _ATTRIBUTES else _refused)


def array_of(tensor: torch.Tensor) -> Any:
    return tensor.detach().numpy()
