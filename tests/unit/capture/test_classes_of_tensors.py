"""`tensor.__class__` is what it is in eager: libraries tell quantised weights and parameters by it."""

from typing import Any

import torch
from tests.twins import Twins, World, mse_step, pair, small_world
from torch import Tensor, nn


def test_the_class_of_a_tensor_is_that_of_eager() -> None:
    def step(world: World, features: Tensor, targets: Tensor) -> Any:
        weight = world.model.first.weight
        names = [one.__class__.__name__ for one in (weight, features, weight.detach(), features.sum())]
        scale = 2.0 if weight.__class__ is nn.Parameter and features.__class__ == torch.Tensor else 1.0
        if weight.__class__.__name__ in ("Params4bit", "Int8Params"):
            scale = 100.0
        loss = mse_step(world.model, world.optimizer, features * scale, targets)
        return (
            loss,
            names,
            loss.__class__.__module__,
            world.model.__class__.__name__,
            issubclass(weight.__class__, Tensor),
        )

    twins = Twins(small_world(), step, call=lambda world, step, *args: step(world, *args))
    for seed in range(3):
        twins.step(*pair(seed=seed))
    assert twins.num_captures == 1, twins.reasons
