"""Arguments that a step cannot be captured with, in words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import wholestep
from wholestep import CaptureError


def train_step(model: nn.Module, optimizer: Optimizer, batch: Any) -> Tensor:
    optimizer.zero_grad()
    loss = torch.stack([model(value).square().mean() for value in batch["parts"].values()]).sum()
    loss.backward()
    optimizer.step()
    return loss


@pytest.mark.parametrize("size", [1, 2])
def test_a_dict_with_tensors_as_keys(size: int) -> None:
    """F11: comparing such keys raised a RuntimeError in the second call, or took the wrong graph."""
    model = nn.Linear(4, 2)
    step = wholestep.compile(train_step)
    before = model.weight.detach().clone()
    for _ in range(2):
        batch = {"parts": {torch.ones(size): torch.randn(3, 4), torch.zeros(size): torch.randn(3, 4)}}
        with pytest.raises(CaptureError, match=r"an argument is a dict with tensors as keys\. Use names or numbers"):
            step(model, SGD(model.parameters(), lr=0.1), batch)
    assert torch.equal(model.weight, before)
    step(model, SGD(model.parameters(), lr=0.1), {"parts": {"a": torch.randn(3, 4)}})


def test_a_dict_with_tensors_as_keys_in_a_pipeline() -> None:
    pipe = wholestep.pipeline(nn.Linear(4, 2), num_micro_batches=2, num_stages=1, loss_fn=lambda out, _: out.mean())
    with pytest.raises(CaptureError, match="tensors as keys"):
        pipe.step({torch.ones(2): torch.randn(4, 4)})
