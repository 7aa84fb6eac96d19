"""A trainer in the style of published projects, and a run of it beside its compiled twin."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from tests.pictures import differences, picture
from tests.twins import Twins, World
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from wholestep import CaptureError

STEPS = 6
WIDTH = 4


def batches(number: int = STEPS, size: int = 4) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        (torch.randn(size, WIDTH, generator=generator), torch.randint(3, (size,), generator=generator))
        for _ in range(number)
    ]


def classifier() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, 3))


def train(
    trainer: Callable[[], Any],
    max_captures: int = 3,
    change: Callable[[World, int], Any] | None = None,
    num_steps: int = STEPS,
    may_refuse: bool = False,
) -> Twins:
    """Some steps of a trainer on both sides, with something done to the world before each.

    A step that may be refused is refused at its first call, which leaves the trainer as it was.
    """
    twins = Twins(
        lambda: World(trainer=trainer()),
        make=lambda world: world.trainer.step,
        call=lambda world, step, *batch: step(*batch),
    )
    before = picture(vars(twins.worlds[1]))[0]
    for number, batch in enumerate(batches(num_steps)):
        twins.change(lambda world, number=number: change(world, number) if change and number else None)
        try:
            twins.step(*batch)
        except CaptureError:
            if not may_refuse or number:
                raise
            lines = differences(before, picture(vars(twins.worlds[1]))[0], ("before", "after"))
            assert not lines, "\n".join(lines)
            return twins
    assert twins.num_captures <= max_captures, f"{twins.num_captures} captures: {'; '.join(twins.reasons)}"
    return twins


class Trainer:
    """A model, its optimizer, and the loop body that subclasses fill in."""

    def __init__(self) -> None:
        self.model = classifier()
        self.optimizer: Optimizer = Adam(self.model.parameters(), lr=0.01)

    def loss(self, features: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.model(features), labels)

    def update(self, loss: Tensor) -> None:
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def step(self, features: Tensor, labels: Tensor) -> Any:
        loss = self.loss(features, labels)
        self.update(loss)
        return loss
