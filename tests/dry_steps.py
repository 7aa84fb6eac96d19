"""Steps planned for ranks that are not there: whoever needs a plan with buckets needs no processes for it."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import SGD, Optimizer

from wholestep.api import CompiledStep
from wholestep.compiler import DataParallel, Hardware, StepOptions
from wholestep.cost import DeviceModel, Link

WIDTH = 256
# Half a millisecond for a layer's product, somewhat less than two for its gradient on the way: as much in all.
DEVICE = DeviceModel(flops_per_us=16_000.0, bytes_per_us=40_000.0, overhead_us=5.0)
LINK = Link(latency_us=100.0, bytes_per_us=150.0)


class Layer(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).relu()


def train_step(model: nn.Module, optimizer: Optimizer, x: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def planned_step(
    cross_iteration: str = "auto",
    *,
    world: int = 4,
    num_layers: int = 4,
    link: Link | None = LINK,
) -> CompiledStep:
    """A step over so many ranks, with a bucket for each layer."""
    model = nn.Sequential(*(Layer() for _ in range(num_layers)))
    options = StepOptions(
        data_parallel=DataParallel(),
        dry_run=Hardware(DEVICE, world, link),
        dynamic_batch=False,
        bucket_mb=0.25,
        cross_iteration=cross_iteration,
    )
    step = CompiledStep(train_step, options)
    step.prepare(model, SGD(model.parameters(), lr=0.1, momentum=0.9), torch.randn(64, WIDTH))
    return step
