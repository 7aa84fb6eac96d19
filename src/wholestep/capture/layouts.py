"""Fake tensors that promise the strides real kernels have.

Tracing decides from strides which reshape is a view and which gradient needs a copy, and dropout fills memory in its
order. A few fake kernels are wrong about them; this is the correction.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch

from wholestep import _torch

# Operators (by the start of their name) whose fake kernel may promise other strides than the real one gives when an
# input is not contiguous.
_UNCERTAIN_LAYOUT = (
    "native_batch_norm",
    "_native_batch_norm",
    "native_group_norm",
    "native_layer_norm",
    "_log_softmax",
    "_softmax",
    "rrelu_with_noise",
    "max_pool",
    "avg_pool",
    "adaptive_",
    "upsample_",
    "reflection_pad",
    "replication_pad",
    "grid_sampler",
    "glu",
    "cumsum",
    "cumprod",
)


class TrueLayouts(_torch.FakeTensorMode):
    """Fake tensors with the strides that real kernels give.

    Which reshape is a view and which gradient needs a copy is decided while tracing, from strides. Where a fake kernel
    is not to be trusted with them, the real one is run once on zeros of the same geometry.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._known: dict[Any, list[tuple[int, ...]]] = {}

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().dispatch(func, types, args, kwargs)
        if not _is_uncertain(func) or all(tensor.is_contiguous() for tensor in _tensors((args, kwargs or {}))):
            return result
        tensors = list(_tensors(result))
        true = {
            id(fake): strides for fake, strides in zip(tensors, self._strides(func, args, kwargs or {}), strict=False)
        }
        return _torch.tree_map_only(torch.Tensor, lambda fake: self._corrected(fake, true.get(id(fake))), result)

    def _strides(self, func: Any, args: Any, kwargs: Any) -> list[tuple[int, ...]]:
        """Strides of the real results; computed once for each geometry of the inputs."""
        key = (func, *map(str, _torch.tree_leaves((_geometry_of((args, kwargs)),))))
        if key not in self._known:
            with _torch.real_kernels():
                real_args, real_kwargs = _torch.tree_map_only(torch.Tensor, _zeros_like_fake, (args, kwargs))
                try:
                    results = list(_tensors(func(*real_args, **real_kwargs)))
                except RuntimeError:  # another fake kernel was wrong about a dtype; the first run checks layouts again
                    results = []
                self._known[key] = [tensor.stride() for tensor in results]
        return self._known[key]

    def _corrected(self, fake: torch.Tensor, strides: tuple[int, ...] | None) -> torch.Tensor:
        hints = tuple(_torch.optimization_hint(stride) for stride in fake.stride())
        if strides is None or len(strides) != fake.dim() or hints == strides:
            return fake
        sizes = tuple(_torch.optimization_hint(size) for size in fake.shape)
        contiguous = torch.empty(sizes, device="meta").stride()
        with self:
            if strides == contiguous:
                return torch.empty(fake.shape, dtype=fake.dtype, device=fake.device)
            if sizes == tuple(fake.shape):
                return torch.empty_strided(sizes, strides, dtype=fake.dtype, device=fake.device)
        return fake


@functools.cache
def _is_uncertain(func: Any) -> bool:
    return _torch.namespace(func) == "aten" and _torch.packet_name(func).startswith(_UNCERTAIN_LAYOUT)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in _torch.tree_leaves(value) if isinstance(leaf, torch.Tensor))


def _geometry_of(value: Any) -> Any:
    describe = lambda t: (*map(_torch.optimization_hint, (*t.shape, *t.stride())), t.dtype, t.device)  # noqa: E731
    return _torch.tree_map_only(torch.Tensor, describe, value)


def _zeros_like_fake(fake: torch.Tensor) -> torch.Tensor:
    sizes, strides = ([_torch.optimization_hint(size) for size in sizes] for sizes in (fake.shape, fake.stride()))
    return torch.empty_strided(sizes, strides, dtype=fake.dtype, device=fake.device).zero_()


def new_fake_mode() -> TrueLayouts:
    """A fake mode with symbolic shapes; real tensors it meets (constants made inside the step) are faked on the fly.

    `capture_scalar_outputs` is what lets the optimizer's `step.item()` become a symbolic number instead of an error.
    """
    return TrueLayouts(
        shape_env=_torch.ShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=False),
        allow_non_fake_inputs=True,
    )
