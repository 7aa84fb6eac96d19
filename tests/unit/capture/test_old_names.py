"""Tensors made by the names of old (`torch.FloatTensor`, `Variable`), and classes made in the step (`namedtuple`)."""

from __future__ import annotations

import collections
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.twins import SmallNet, Twins, World, momentum, mse_step, pair, small_world
from torch import Tensor
from torch.autograd import Variable

ARRAY = np.arange(24.0).reshape(6, 4)
OUTSIDE = torch.arange(24.0).reshape(6, 4)
FloatTensor: Any = torch.FloatTensor
LongTensor: Any = torch.LongTensor

MADE = {
    "of an array": lambda x: x * FloatTensor(ARRAY),
    "of a list": lambda x: x * FloatTensor([1, 2, 3, 4]),
    "of a tuple": lambda x: x * torch.Tensor((1, 2, 3, 4)),
    "of sizes": lambda x: x * FloatTensor(6, 4).fill_(2.0),
    "whole numbers": lambda x: x[LongTensor([3, 1, 2, 0, 5, 4])],
    "drawn": lambda x: x * FloatTensor(np.random.normal(0, 1, (6, 4))),
    "variable": lambda x: Variable(x, requires_grad=False) + Variable(FloatTensor(ARRAY)),
    "variable from outside": lambda x: x + Variable(OUTSIDE),
    "double": lambda x: (x.type(torch.DoubleTensor) * torch.DoubleTensor([[0.5] * 4])).float(),  # pyright: ignore
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_old_names(make: Any) -> None:
    def step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(make(x)), y)
        loss.backward()
        optimizer.step()
        return loss

    twins = Twins(small_world(), step)
    for seed in range(3):
        twins.step(*pair(seed=seed))
    assert twins.num_captures == 1, twins.reasons


def test_a_named_tuple_made_in_the_step() -> None:
    def step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        made = collections.namedtuple("Pair", ["loss", "twice"])
        loss = mse_step(model, optimizer, x, y)
        return made(loss, 2 * loss).twice

    twins = Twins(small_world(), step)
    twins.steps(3, *pair())
    assert twins.num_captures == 1, twins.reasons


class Trainer:
    def __init__(self) -> None:
        self.inner = SimpleNamespace(net=SmallNet())
        self.optimizer = momentum(self.inner.net.parameters())

    def run(self, x: Tensor, y: Tensor) -> Tensor:
        return mse_step(self.inner.net, self.optimizer, x, y)


def test_a_model_that_is_three_objects_deep() -> None:
    def step(world: World, x: Tensor, y: Tensor) -> Tensor:
        return world.trainer.run(x, y)

    twins = Twins(lambda: World(trainer=Trainer()), step, call=lambda world, step, *args: step(world, *args))
    twins.steps(3, *pair())
    assert twins.num_captures == 1, twins.reasons
