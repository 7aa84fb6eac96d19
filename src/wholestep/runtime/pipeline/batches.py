"""A batch in micro-batches: what is cut, how it is weighted, and how results are put together again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from wholestep.capture import tree
from wholestep.errors import PipelineError


@dataclass(frozen=True)
class MicroBatches:
    """The arguments of a step, once for each micro-batch; how many rows each has, and which share of the batch."""

    arguments: tuple[Any, ...]
    size: int
    share: float


def split_batch(arguments: Any, num_micro_batches: int) -> MicroBatches:
    """Cut nested arguments into micro-batches along dimension 0.

    The first tensor with a dimension says how many rows the batch has. Tensors with as many are cut; all others, and
    whatever is no tensor, every micro-batch gets whole. Micro-batches have the same size.
    """
    leaves, _ = tree.flatten(arguments)
    sized = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()]
    if not sized:
        raise PipelineError("a pipeline cuts its batch into micro-batches, and no argument of this step is a tensor")
    num_rows = sized[0].shape[0]
    if num_rows % num_micro_batches:
        raise PipelineError(
            f"a batch of {num_rows} rows does not make {num_micro_batches} micro-batches of the same size; give a "
            f"multiple of {num_micro_batches} rows, or pad the batch"
        )
    size = num_rows // num_micro_batches
    if not size:
        raise PipelineError(f"a batch without rows does not make {num_micro_batches} micro-batches")
    pieces = tuple(
        tree.map_leaves(partial(_piece, num_rows=num_rows, start=start, size=size), arguments)
        for start in range(0, num_rows, size)
    )
    return MicroBatches(pieces, size, 1 / num_micro_batches)


def _piece(leaf: Any, *, num_rows: int, start: int, size: int) -> Any:
    is_cut = isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == num_rows
    return leaf[start : start + size] if is_cut else leaf


def joined(parts: Sequence[Any], size: int) -> Any:
    """Results of micro-batches as those of the batch: tensors with a row for each row of the input are joined.

    Of anything else there is one for each micro-batch, and a tensor of their mean if it is a number.
    """
    if isinstance(parts[0], torch.Tensor) and parts[0].dim() and parts[0].shape[0] == size:
        return torch.cat(list(parts))
    if isinstance(parts[0], torch.Tensor) and not parts[0].dim() and parts[0].is_floating_point():
        return torch.stack(list(parts)).mean()
    return list(parts)
