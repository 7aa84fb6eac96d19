"""What real kernels make of zeros, where fake ones refuse their inputs: torch's know less than run, now and then.

Sizes that are symbols are tried with several values. A size of the result that is that of an input each time is the
same symbol, and one that never changes a number. Of anything else only this call's sizes are known, which are pinned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from wholestep import _sizes_torch, _torch

_NUM_TRIALS = 3


@dataclass(frozen=True)
class _Form:
    """All of a tensor but its values."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    is_plain: bool
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(tensor: torch.Tensor) -> _Form:
        return _Form(tuple(tensor.shape), tensor.stride(), tensor.is_contiguous(), tensor.dtype, tensor.device)

    def fake(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)


Trials = dict[Any, list[list[_Form]] | None]
"""What came of the trials of a call, by its function and the geometry of what it is given."""


def results(mode: _torch.FakeTensorMode, seen: Trials, func: Any, args: Any, kwargs: Any) -> list[torch.Tensor] | None:
    """The tensors that a call returns, as fakes of the mode; None if the real kernel refuses as well."""
    leaves = _torch.tree_leaves((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    sizes = [size for tensor in tensors for size in (*tensor.shape, *tensor.stride())]
    symbolic = [size for size in (*sizes, *leaves) if isinstance(size, torch.SymInt)]
    numbers = range(_NUM_TRIALS if symbolic else 1)
    key = (func, *(_told(leaf) for leaf in leaves))
    if key not in seen:
        try:
            seen[key] = [_made(func, args, kwargs, number) for number in numbers]
        except Exception:
            seen[key] = None
    trials = seen[key]
    if trials is None:
        return None
    if symbolic:
        known = {tuple(_sizes_torch.other_size(size, number) for number in numbers): size for size in symbolic}
        shapes: list[Any] = [_followed(forms, known) for forms in zip(*trials, strict=True)]
        if None not in shapes:
            with mode:
                return [torch.empty(shape, dtype=f.dtype, device=f.device) for shape, f in zip(shapes, trials[0])]
    for size in symbolic:
        int(size)
    with mode:
        return [form.fake() for form in trials[0]]


def _told(leaf: Any) -> str:
    return f"{leaf.shape} {leaf.stride()} {leaf.dtype} {leaf.device}" if isinstance(leaf, torch.Tensor) else str(leaf)


def _made(func: Any, args: Any, kwargs: Any, number: int) -> list[_Form]:
    """What the real kernel returns in one of the trials."""

    def real(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return _sizes_torch.other_size(value, number)
        sizes, strides = (
            [_sizes_torch.other_size(size, number) for size in of] for of in (value.shape, value.stride())
        )
        return torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device).zero_()

    with _torch.real_kernels(()):
        real_args, real_kwargs = _torch.tree_map_only((torch.Tensor, torch.SymInt), real, (args, kwargs))
        return [_Form.of(tensor) for tensor in _torch.tree_leaves((func(*real_args, **real_kwargs),))]


def _followed(forms: Sequence[_Form], known: Mapping[tuple[int, ...], torch.SymInt]) -> list[Any] | None:
    """The shape of a result by its sizes in all trials; None if one follows no input's, or it lies otherwise."""
    shape: list[Any] = []
    for sizes in zip(*(form.shape for form in forms), strict=True):
        shape.append(sizes[0] if len({*sizes}) == 1 else known.get(sizes))
    return shape if None not in shape and all(form.is_plain for form in forms) else None
