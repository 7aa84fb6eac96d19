"""Image classification."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.loops import World, loop
from wholestep.zoo.case import seeded_generator


def images(number: int, size: int = 6, side: int = 8, classes: int = 5) -> tuple[Tensor, Tensor]:
    """A batch of images with labels."""
    generator = seeded_generator(number)
    return torch.randn(size, 3, side, side, generator=generator), torch.randint(classes, (size,), generator=generator)


class SmallConvNet(nn.Module):
    """Two convolutions with batch norm, dropout and a classifier."""

    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 6, 3, 1), nn.Conv2d(6, 8, 3, 1)
        self.norm = nn.BatchNorm2d(8)
        self.dropout = nn.Dropout(0.25)
        self.head = nn.Linear(8 * 2 * 2, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.norm(self.conv2(x))), 2)
        return F.log_softmax(self.head(torch.flatten(self.dropout(x), 1)), dim=1)


def mnist_world() -> World:
    model = SmallConvNet()
    return World(model=model, optimizer=torch.optim.Adadelta(model.parameters(), lr=1.0), batch_idx=0, epoch=1)


@loop("MNIST", kind="vision", source="pytorch/examples mnist/main.py", build=mnist_world, batch=images)
def mnist(w: World, data: Tensor, target: Tensor) -> Any:
    data, target = data.to("cpu"), target.to("cpu")
    w.optimizer.zero_grad()
    output = w.model(data)
    loss = F.nll_loss(output, target)
    loss.backward()
    w.optimizer.step()
    if w.batch_idx % 3 == 0:
        done = 100.0 * w.batch_idx / 100
        print(f"Train Epoch: {w.epoch} [{w.batch_idx * len(data)}/600 ({done:.0f}%)]\tLoss: {loss.item():.6f}")
    w.batch_idx += 1
