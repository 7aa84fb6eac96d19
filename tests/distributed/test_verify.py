"""`verify=N` on ranks: the compiled step is held against eager with gradients reduced after each backward."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
import torch.distributed as dist
from tests.distributed.ranks import run_ranks
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import wholestep

pytestmark = pytest.mark.distributed

Reduce = Literal["mean", "sum"]


def _train_in_two_parts(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    for part in x.chunk(2):
        model(part).square().mean().backward()
    optimizer.step()


def _verify_two_backwards(reduce: Reduce) -> int:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = SGD(model.parameters(), lr=0.1)
    options = wholestep.DataParallel(reduce=reduce)
    step = wholestep.compile(_train_in_two_parts, data_parallel=options, verify=3)
    for number in range(3):
        step(model, optimizer, torch.randn(6, 4, generator=torch.Generator().manual_seed(number + dist.get_rank())))
    return step.num_captures


@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_gradients_of_two_backwards_are_verified(reduce: Reduce) -> None:
    """What the first backward has left is summed over ranks already."""
    assert run_ranks(_verify_two_backwards, 2, reduce) == [1, 1]
