"""Steps whose optimizer has more memory than their activations: the update is no excuse for a bad plan."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer

import wholestep

WIDTH, LAYERS, ROWS = 128, 8, 128


def make() -> tuple[nn.Module, Optimizer, torch.Tensor]:
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)]
    model = nn.Sequential(*layers)
    return model, torch.optim.AdamW(model.parameters(), fused=True), torch.randn(ROWS, WIDTH)


def train_step(model: nn.Module, optimizer: Optimizer, x: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def test_the_smallest_peak_is_that_of_all_gradients() -> None:
    """Kept values, two for each layer, are less than a second set of parameters and state. Nearly all can go."""
    made = make()
    step = wholestep.compile(train_step, memory_budget=1.0)
    step(*made)
    parameter_bytes = 4 * sum(p.numel() for p in made[0].parameters())
    value_bytes = 4 * WIDTH * ROWS
    resident = 3 * parameter_bytes + value_bytes
    plan, smallest = step.plan.memory, step.smallest_peak_bytes
    assert plan is not None
    assert smallest is not None
    assert plan.unlimited_peak_bytes > resident + 2 * LAYERS * value_bytes
    # Gradients of all layers are alive when the first layer has its own; next to nothing else has to be.
    assert smallest < resident + parameter_bytes + 3 * value_bytes
    bounded = wholestep.compile(train_step, memory_budget=smallest)
    bounded(*make())
    assert bounded.plan.memory is not None
    assert bounded.plan.memory.peak_bytes == smallest
