"""A step that asks for an attribute that is not there depends on that name alone, not on all that the object holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from tests.twins import Twins, World, momentum
from torch import Tensor, nn


class Config:
    """As those of transformers: what it holds is looked up by a method of its own."""

    def __init__(self) -> None:
        self.scale = 2.0
        self.architectures: list[str] | None = None

    def __getattribute__(self, name: str) -> Any:
        return super().__getattribute__(name)


class Layers:
    """A sequence made of a configuration."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def __iter__(self) -> Iterator[Config]:
        yield self.config


def build() -> World:
    model = nn.Linear(4, 3)
    config = Config()
    return World(model=model, optimizer=momentum(model.parameters()), config=config, layers=Layers(config))


def step(model: Any, optimizer: Any, config: Any, layers: Any, features: Tensor) -> Tensor:
    optimizer.zero_grad()
    outputs = model(features)
    for one, _ in zip(layers, "a", strict=True):
        outputs = outputs * one.scale
    if getattr(config, "extra", None) is not None:
        outputs = outputs + config.extra
    loss = outputs.square().mean()
    loss.backward()
    optimizer.step()
    return loss


def call(world: World, step: Any, *args: Any) -> Any:
    return step(world.model, world.optimizer, world.config, world.layers, *args)


def test_what_else_the_object_holds_may_change() -> None:
    twins = Twins(build, step, call=call)
    twins.step(torch.ones(2, 4))
    twins.change(lambda world: setattr(world.config, "architectures", ["Linear"]))
    twins.step(torch.ones(2, 4))
    assert twins.num_captures == 1
    twins.change(lambda world: setattr(world.config, "extra", 1.5))
    twins.step(torch.ones(2, 4))
    assert twins.num_captures == 2
    twins.change(lambda world: setattr(world.config, "scale", 3.0))
    twins.step(torch.ones(2, 4))
    assert twins.num_captures == 3
