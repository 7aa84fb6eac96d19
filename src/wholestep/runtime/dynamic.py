"""Which sizes of the arguments a capture takes as they are, and which stay symbolic."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from wholestep.runtime.guards import Call, is_contiguous
from wholestep.runtime.owner_guards import tensor_type
from wholestep.runtime.specialization import Specialization

Dims = frozenset[tuple[int, int]]
"""Argument leaves and their dimensions."""

_MIN_SIZE = 2


def choose_dynamic_dims(dynamic_batch: bool | str, call: Call, known: Iterable[Specialization]) -> Dims:
    """Dimensions of argument leaves that become symbolic.

    `True`: dimension 0 of all that share the batch size. `"auto"`: none at first; once a call differs from a captured
    one only in sizes, those that changed, and those that are symbolic there. `"batch"`: the same for dimension 0 alone.
    Strides of a tensor must follow from its sizes then: but for dimension 0 it has to be contiguous.
    """
    sizes = {
        (index, dim): size
        for index, leaf in enumerate(call.leaves)
        if isinstance(leaf, torch.Tensor)
        for dim, size in enumerate(leaf.shape)
    }
    batch = [size for (_, dim), size in sizes.items() if dim == 0]
    if not batch or dynamic_batch is False:
        return frozenset()
    if dynamic_batch is True:
        is_large = batch[0] >= _MIN_SIZE
        return frozenset(place for place, size in sizes.items() if is_large and place[1] == 0 and size == batch[0])
    changed = _changed(call, known)
    if dynamic_batch == "batch":
        changed = frozenset(place for place in changed if place[1] == 0)
    return changed if all(sizes[place] >= _MIN_SIZE for place in changed) else frozenset()


def fewer_dims(dynamic_batch: bool | str, refused: Dims) -> bool | str:
    """What to try after some dimensions could not be symbolic: that of the batch alone, or none."""
    return "batch" if dynamic_batch == "auto" and any(dim for _, dim in refused) else False


def what_is_fixed(dynamic_batch: bool | str) -> str:
    """What cannot be had after that, for a log."""
    few = "have few of them: pad to a multiple (pad_to_multiple_of=64)"
    if dynamic_batch is False:
        return f"a dynamic batch, each size is captured apart ({few}, leave out a smaller last batch)"
    return f"other dynamic sizes than that of the batch, each is captured apart ({few})"


def _changed(call: Call, specializations: Iterable[Specialization]) -> Dims:
    for known in reversed([*specializations]):
        if known.capture.spec != call.spec:
            continue
        changed: set[tuple[int, int]] | None = set()
        for index, (shape, stride, *rest) in known.leaf_types.items():
            leaf = call.leaves[index]
            dims = _changed_dims(leaf, shape, stride, rest) if isinstance(leaf, torch.Tensor) else None
            changed = None if dims is None or changed is None else changed | {(index, dim) for dim in dims}
        if changed:
            return frozenset(changed | known.capture.dynamic_dims)
    return frozenset()


def _changed_dims(
    leaf: torch.Tensor, shape: tuple[int, ...], stride: tuple[int, ...], rest: list[object]
) -> list[int] | None:
    """Dimensions in which a leaf has another size than before; None if it differs otherwise."""
    new_shape, new_stride, *new_rest = tensor_type(leaf)
    if new_rest != rest or len(new_shape) != len(shape):
        return None
    dims = [dim for dim, (old, new) in enumerate(zip(shape, new_shape, strict=True)) if old != new]
    is_batch = dims in ([], [0]) and stride == new_stride
    follows = is_contiguous(shape, stride) and is_contiguous(new_shape, new_stride)
    return dims if is_batch or follows else None
