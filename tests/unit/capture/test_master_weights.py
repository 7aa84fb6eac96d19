"""Mixed precision by hand: parameters in bfloat16 and masters in float32, and steps that are skipped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.twins import SmallNet, Twins, World, pair
from torch import Tensor, nn
from torch.optim import Optimizer


class MasterWeights:
    """Keeps float32 copies of bfloat16 parameters, and lets an optimizer update those."""

    def __init__(self, parameters: Any, make: Callable[..., Optimizer], **options: Any) -> None:
        self.parameters = list(parameters)
        self.masters = [nn.Parameter(p.detach().clone().float()) for p in self.parameters]
        self.optimizer = make(self.masters, **options)
        self.num_steps = 0

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        for parameter, master in zip(self.parameters, self.masters):
            master.grad = None if parameter.grad is None else parameter.grad.float()
        nn.utils.clip_grad_norm_(self.masters, 1.0)
        self.optimizer.step()
        self.num_steps += 1
        for parameter, master in zip(self.parameters, self.masters):
            parameter.data.copy_(master)


class MasterAdamW(torch.optim.AdamW):
    """The same as an optimizer: the masters are in its state."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        lent: list[tuple[Tensor, Tensor]] = []
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["master"] = p.detach().float().clone()
                    state["mean"] = torch.zeros_like(state["master"])
                    state["count"] = 0
                state["count"] += 1
                state["mean"].lerp_(p.grad.float(), 0.1)
                state["master"].mul_(1 - group["lr"] * group["weight_decay"])
                state["master"].add_(state["mean"] / (1 - 0.9 ** state["count"]), alpha=-group["lr"])
                lent.append((p, state["master"]))
        for p, master in lent:
            p.data.copy_(master)


def in_bfloat16(make_optimizer: Callable[[nn.Module], Any]) -> Callable[[], World]:
    def build() -> World:
        model = SmallNet().bfloat16()
        return World(model=model, optimizer=make_optimizer(model))

    return build


def step(world: World, features: Tensor, targets: Tensor) -> Tensor:
    world.optimizer.zero_grad()
    loss = nn.functional.mse_loss(world.model(features.bfloat16()), targets.bfloat16())
    loss.backward()
    world.optimizer.step()
    return loss


def call(world: World, step: Callable[..., Any], *args: Any) -> Any:
    return step(world, *args)


@pytest.mark.parametrize(
    ("make", "num_captures"),
    [
        (lambda model: MasterWeights(model.parameters(), torch.optim.AdamW, lr=0.01), 1),
        (lambda model: MasterWeights(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9), 1),
        (lambda model: MasterAdamW(model.parameters(), lr=0.01), 2),
    ],
    ids=["wrapper of AdamW", "wrapper of SGD", "an optimizer"],
)
def test_masters_in_float32(make: Callable[[nn.Module], Any], num_captures: int) -> None:
    twins = Twins(in_bfloat16(make), step, call=call)
    for index in range(6):
        twins.step(*pair(seed=index))
    assert twins.num_captures == num_captures, twins.reasons


def skipping(world: World, features: Tensor, targets: Tensor) -> Any:
    world.optimizer.zero_grad()
    loss = nn.functional.mse_loss(world.model(features), targets)
    if not torch.isfinite(loss):
        world.num_skipped += 1
        return None
    loss.backward()
    norm = nn.utils.clip_grad_norm_(world.model.parameters(), 1.0)
    world.optimizer.step()
    world.num_steps += 1
    return loss.detach(), norm


def skipping_by_norm(world: World, features: Tensor, targets: Tensor) -> Any:
    loss = nn.functional.mse_loss(world.model(features), targets)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(world.model.parameters(), 1.0)
    if torch.isfinite(norm):
        world.optimizer.step()
        world.num_steps += 1
    else:
        world.num_skipped += 1
    world.optimizer.zero_grad(set_to_none=True)
    return loss.item()


@pytest.mark.parametrize("step", [skipping, skipping_by_norm], ids=lambda step: step.__name__)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_step_is_skipped_if_the_loss_is_not_finite(step: Callable[..., Any], bad: float) -> None:
    def build() -> World:
        model = SmallNet()
        return World(model=model, optimizer=torch.optim.AdamW(model.parameters()), num_steps=0, num_skipped=0)

    twins = Twins(build, step, call=call)
    for index in range(8):
        features, targets = pair(seed=index)
        twins.step(features * (bad if index in (2, 5, 6) else 1.0), targets)
    assert [world.num_skipped for world in twins.worlds] == [3, 3]
    assert twins.num_captures <= 2, twins.reasons


def cleared_by_hand(world: World, features: Tensor, targets: Tensor) -> Tensor:
    for parameter in world.model.parameters():
        parameter.grad = None
    loss = nn.functional.mse_loss(world.model(features), targets)
    loss.backward()
    world.optimizer.step()
    return loss


def deleted(world: World, features: Tensor, targets: Tensor) -> Tensor:
    for parameter in world.model.parameters():
        del parameter.grad
    loss = nn.functional.mse_loss(world.model(features), targets)
    loss.backward()
    world.optimizer.step()
    return loss


def looked_at_first(world: World, features: Tensor, targets: Tensor) -> Any:
    parameters = list(world.model.parameters())
    before = [None if parameter.grad is None else parameter.grad.norm() for parameter in parameters]
    return cleared_by_hand(world, features, targets), before


def cleared_in_part(world: World, features: Tensor, targets: Tensor) -> Tensor:
    world.model.first.weight.grad = None
    loss = nn.functional.mse_loss(world.model(features), targets)
    loss.backward()
    world.optimizer.step()
    return loss


def cleared_after_use(world: World, features: Tensor, targets: Tensor) -> Tensor:
    loss = nn.functional.mse_loss(world.model(features), targets)
    loss.backward()
    world.optimizer.step()
    for parameter in world.model.parameters():
        parameter.grad = None
    return loss


@pytest.mark.parametrize(
    ("step", "num_captures"),
    [(cleared_by_hand, 1), (deleted, 2), (looked_at_first, 2), (cleared_in_part, 2), (cleared_after_use, 1)],
    ids=lambda step: getattr(step, "__name__", ""),
)
def test_gradients_that_are_replaced_before_they_are_looked_at(step: Callable[..., Any], num_captures: int) -> None:
    def build() -> World:
        model = SmallNet()
        return World(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))

    twins = Twins(build, step, call=call)
    for index in range(5):
        twins.step(*pair(seed=index))
    assert twins.num_captures == num_captures, twins.reasons
