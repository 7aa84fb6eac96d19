"""Operators whose fake kernels refuse what the real ones take: the real one is asked, on zeros."""

from typing import Any

import pytest
import torch
from tests.twins import Twins, small_world
from torch import Tensor, nn

import wholestep
from wholestep.errors import CaptureError

WIDTH, EXPERTS = 4, 3


class Routed(nn.Module):
    """Each example goes to one of three experts: their products are one call of `grouped_mm`."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))

    def forward(self, features: Tensor) -> Tensor:
        weights, chosen = self.gate(features).softmax(-1).max(-1)
        order = torch.argsort(chosen, stable=True)
        sizes = torch.nn.functional.one_hot(chosen, EXPERTS).sum(0)
        made = torch.nn.functional.grouped_mm(features[order], self.experts, offs=sizes.cumsum(0, dtype=torch.int32))
        return (made * weights[order, None])[torch.argsort(order)]


def square_step(model: Any, optimizer: Any, features: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = model(features).square().mean()
    loss.backward()
    optimizer.step()
    return loss


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_products_of_groups_in_float32(capfd: pytest.CaptureFixture[str]) -> None:
    twins = Twins(small_world(Routed), square_step)
    for seed, size in enumerate((6, 6, 6, 8, 5)):
        twins.step(torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(seed)))
    assert twins.num_captures == 2
    assert "failed while attempting" not in capfd.readouterr().err


def test_what_the_real_kernel_refuses_is_refused() -> None:
    def step(model: Any, optimizer: Any, features: Tensor) -> Tensor:
        sizes = torch.tensor([2, 4, 6], dtype=torch.int64)  # int32 is asked for
        return torch.nn.functional.grouped_mm(features, model.experts, offs=sizes).sum()

    model = Routed()
    compiled = wholestep.compile(step)
    with pytest.raises((CaptureError, RuntimeError), match=r"int32|Offsets|BF16"):
        compiled(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(6, WIDTH))
