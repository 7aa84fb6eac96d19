"""`requires_grad` that a step leaves otherwise than it was: GANs freeze one side while the other one learns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.twins import SmallNet, Twins, World, adam, momentum, pair
from torch import Tensor, nn

X, _ = pair()


def freeze(model: nn.Module, flag: bool) -> None:
    for parameter in model.parameters():
        parameter.requires_grad = flag


def build(make_optimizer: Any) -> World:
    left, right = SmallNet(), nn.Linear(3, 1)
    optimizers = {
        "left_optimizer": make_optimizer(left.parameters()),
        "right_optimizer": make_optimizer(right.parameters()),
    }
    return World(left=left, right=right, **optimizers, n=0)


def in_turns(world: World, x: Tensor) -> Any:
    freeze(world.left, False)
    freeze(world.right, True)
    world.right.zero_grad()
    first = world.right(world.left(x)).square().mean()
    first.backward()
    world.right_optimizer.step()
    freeze(world.left, True)
    freeze(world.right, False)
    world.left.zero_grad()
    second = world.right(world.left(x)).mean()
    second.backward()
    world.left_optimizer.step()
    return first, second


@pytest.mark.parametrize("verify", [0, 2])
@pytest.mark.parametrize("make_optimizer", [momentum, adam])
def test_sides_that_take_turns(make_optimizer: Any, verify: int) -> None:
    twins = Twins(lambda: build(make_optimizer), in_turns, call=lambda w, step, *args: step(w, *args), verify=verify)
    twins.steps(5, X)
    assert twins.num_captures <= 3, twins.reasons
    assert not any(p.requires_grad for p in twins.worlds[1].right.parameters())
    twins.change(lambda world: freeze(world.right, True))
    twins.steps(2, X)


def test_layers_that_thaw_one_after_the_other() -> None:
    def step(world: World, x: Tensor) -> Any:
        if world.n == 2:
            freeze(world.left.second, True)
        world.left_optimizer.zero_grad()
        loss = world.left(x).square().mean()
        loss.backward()
        world.left_optimizer.step()
        world.n += 1
        return loss

    def frozen() -> World:
        world = build(adam)
        freeze(world.left.second, False)
        return world

    twins = Twins(frozen, step, call=lambda w, step, *args: step(w, *args))
    twins.steps(7, X)


def test_an_argument_that_is_left_asking_for_a_gradient() -> None:
    def step(world: World, x: Tensor) -> Any:
        x.requires_grad = True
        [gradient] = torch.autograd.grad(world.left(x).sum(), x, create_graph=True)
        world.left.zero_grad()
        gradient.square().sum().backward()
        world.left_optimizer.step()
        return gradient.detach()

    twins = Twins(lambda: build(momentum), step, call=lambda w, step, *args: step(w, *args))
    twins.steps(3, X)
