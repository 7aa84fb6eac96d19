"""In-place ops whose tensor does not lie in memory as a fresh result would.

`x.sigmoid_()` on a slice works row by row, `sigmoid(x)` on one run of memory. Vectorised kernels round the odd elements
at the end of a run otherwise than the rest, so the two differ in the last bit. As a function, such an op is a copy of
`x` in the layout of `x` and the in-place op on it; `reinplace` leaves the copy out where `x` is not needed any more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from wholestep import _torch


@dataclass(frozen=True)
class InLayout:
    """`InLayout(op_)(x, *args)`: what an in-place operator would leave in `x`, in a tensor of the same strides."""

    in_place: Any
    is_pure_call: ClassVar[bool] = True

    @property
    def __name__(self) -> str:
        return f"{_torch.packet_name(self.in_place)}in_layout"

    def __str__(self) -> str:
        return f"wholestep.graph.in_layout.InLayout(torch.ops.{self.in_place})"

    def __call__(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        result = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        return self.in_place(result.copy_(tensor), *args, **kwargs)
