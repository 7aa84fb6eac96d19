"""A batch in micro-batches: what is cut, how it is weighted, and how results are put together again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from wholestep.capture import tree
from wholestep.errors import PipelineError
from wholestep.runtime.arguments import refuse_tensor_keys


@dataclass(frozen=True)
class MicroBatches:
    """The arguments of a step, once for each micro-batch, and how many rows each of them has.

    If rows cannot be dealt out evenly, the first ones have one more than the last.
    """

    arguments: tuple[Any, ...]
    sizes: tuple[int, ...]

    @property
    def shares(self) -> list[float]:
        """What part of the batch each micro-batch is."""
        return [size / sum(self.sizes) for size in self.sizes]

    @property
    def num_large(self) -> int:
        """How many micro-batches have as many rows as the first."""
        return self.sizes.count(self.sizes[0])


def split_batch(arguments: Any, num_micro_batches: int) -> MicroBatches:
    """Cut nested arguments into micro-batches along dimension 0.

    The first tensor with a dimension says how many rows the batch has. Tensors with as many are cut; all others, and
    whatever is no tensor, every micro-batch gets whole.
    """
    leaves, spec = tree.flatten(arguments)
    refuse_tensor_keys(spec)
    sized = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()]
    if not sized:
        raise PipelineError("a pipeline cuts its batch into micro-batches, and no argument of this step is a tensor")
    num_rows = sized[0].shape[0]
    each, rest = divmod(num_rows, num_micro_batches)
    if not each:
        raise PipelineError(
            f"a batch of {num_rows} rows does not make {num_micro_batches} micro-batches; give at least as many rows"
        )
    sizes = [each + (number < rest) for number in range(num_micro_batches)]
    columns = [_pieces(leaf, num_rows, sizes) for leaf in leaves]
    return MicroBatches(tuple(tree.fill(arguments, row) for row in zip(*columns, strict=True)), tuple(sizes))


def _pieces(leaf: Any, num_rows: int, sizes: list[int]) -> Sequence[Any]:
    is_cut = isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == num_rows
    return leaf.split(sizes) if is_cut else [leaf] * len(sizes)


def joined(parts: Sequence[Any], batches: MicroBatches) -> Any:
    """Results of micro-batches as those of the batch: tensors with a row for each row of the input are joined.

    Of anything else there is one for each micro-batch, and a tensor of their mean over rows if it is a number.
    """
    first = parts[0]
    if isinstance(first, torch.Tensor) and first.dim() and first.shape[0] == batches.sizes[0]:
        return torch.cat(list(parts))
    if isinstance(first, torch.Tensor) and not first.dim() and first.is_floating_point():
        return mean(parts, batches)
    if tree.is_text(first):
        return [list(column) for column in zip(*parts, strict=True)]
    return list(parts)


def mean(parts: Sequence[torch.Tensor], batches: MicroBatches) -> torch.Tensor:
    """The mean of a number of each micro-batch, by rows."""
    stacked = torch.stack(list(parts))
    if batches.num_large == len(parts):
        return stacked.mean()
    shares = torch.tensor(batches.shares, dtype=torch.float64, device=stacked.device)
    return (stacked.double() * shares).sum().to(stacked.dtype)
