"""Learning rates that the step sets itself: schedules by hand, schedulers stepped inside."""

import bisect
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.twins import SmallNet, Twins, World, mse_step, pair, small_world
from torch import nn
from torch.optim import ASGD, SGD, Adam, AdamW, Optimizer, Rprop, lr_scheduler

import wholestep

X, Y = pair()
STEPS = 8

SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "lambda": partial(lr_scheduler.LambdaLR, lr_lambda=lambda n: 1 / (1 + n)),
    "step": partial(lr_scheduler.StepLR, step_size=3),
    "multi step": partial(lr_scheduler.MultiStepLR, milestones=[2, 5]),
    "exponential": partial(lr_scheduler.ExponentialLR, gamma=0.9),
    "cosine": partial(lr_scheduler.CosineAnnealingLR, T_max=5),
    "warm restarts": partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=3),
    "one cycle": partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=20),
    "linear": partial(lr_scheduler.LinearLR, total_iters=4),
    "polynomial": partial(lr_scheduler.PolynomialLR, total_iters=6),
    "sequential": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.LinearLR(optimizer, total_iters=3), lr_scheduler.ExponentialLR(optimizer, 0.9)], [3]
    ),
    "chained": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer, total_iters=3), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    ),
}
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": partial(SGD, lr=0.05, momentum=0.9),
    "adamw": partial(AdamW, lr=0.01),
    "adam fused": partial(Adam, lr=0.01, fused=True),
    "adamw foreach": partial(AdamW, lr=0.01, foreach=True),
    "lr of 1": partial(SGD, lr=1),
}


def trained(step: Callable[..., Any], optimizer: str, scheduler: Any = None, *, most: int, **more: Any) -> Twins:
    """Twins whose step gets its world; `most` captures for all steps."""

    def build() -> World:
        model = SmallNet()
        world = World(model=model, optimizer=OPTIMIZERS[optimizer](model.parameters()), n=0, **more)
        if scheduler is not None:
            world.scheduler = scheduler(world.optimizer)
        return world

    twins = Twins(build, step, call=lambda world, step, *args: step(world, *args))
    twins.steps(STEPS, X, Y)
    assert twins.num_captures <= most, twins.reasons
    return twins


@pytest.mark.sample(2)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "adam fused"])
def test_a_scheduler_stepped_inside(optimizer: str, scheduler: str) -> None:
    def step(world: World, x: Any, y: Any) -> Any:
        loss = mse_step(world.model, world.optimizer, x, y)
        world.scheduler.step()
        return {"loss": loss.item(), "lr": world.scheduler.get_last_lr()[0]}

    # One that looks the epoch up in a dict of milestones takes each of its values for another step.
    trained(step, optimizer, SCHEDULERS[scheduler], most=8 if scheduler == "multi step" else 7)


def test_milestones_are_compared() -> None:
    """`bisect` asks for nothing but comparisons: a graph for each side of a milestone, not for each epoch."""

    def step(world: World, x: Any, y: Any) -> Any:
        world.n += 1
        world.optimizer.param_groups[0]["lr"] = [0.1, 0.05, 0.01][bisect.bisect_right(world.milestones, world.n)]
        return mse_step(world.model, world.optimizer, x, y)

    twins = trained(step, "sgd", most=5, milestones=[3, 6])
    twins.steps(8, X, Y)
    assert twins.num_captures <= 5, twins.reasons


@pytest.mark.parametrize("optimizer", ["adamw", "adam fused"])
def test_a_schedule_of_numpy(optimizer: str) -> None:
    """`np.linspace` holds float64s, which are no floats of Python: they stay what they are in the group."""

    def step(world: World, x: Any, y: Any) -> Any:
        for group in world.optimizer.param_groups:
            group["lr"] = world.rates[world.n]
            group["weight_decay"] = world.decays[world.n]
        world.n += 1
        return mse_step(world.model, world.optimizer, x, y), world.optimizer.param_groups[0]["lr"]

    trained(step, optimizer, most=4, rates=np.linspace(0.01, 0.02, 9), decays=np.linspace(0.1, 0.2, 9))


@pytest.mark.sample(2)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_schedule_by_hand(optimizer: str) -> None:
    """Set before the update, which uses it, as nanoGPT does; read again afterwards."""

    def step(world: World, x: Any, y: Any) -> Any:
        lr = 0.01 * min(1.0, (world.n + 1) / 5)
        for group in world.optimizer.param_groups:
            group["lr"] = lr
        loss = mse_step(world.model, world.optimizer, x, y)
        world.n += 1
        return loss, world.optimizer.param_groups[0]["lr"]

    trained(step, optimizer, most=4)


def test_a_rate_that_decays_from_what_it_was() -> None:
    """Between calls somebody else sets it, too."""

    def step(world: World, x: Any, y: Any) -> Any:
        loss = mse_step(world.model, world.optimizer, x, y)
        world.optimizer.param_groups[0]["lr"] *= 0.9
        return loss

    twins = trained(step, "adamw", most=1)
    twins.change(lambda world: world.optimizer.param_groups[0].update(lr=0.02))
    twins.steps(2, X, Y)
    assert twins.num_captures == 1


def test_a_rate_set_every_few_steps() -> None:
    def step(world: World, x: Any, y: Any) -> Any:
        loss = mse_step(world.model, world.optimizer, x, y)
        world.n += 1
        if world.n % 3 == 0:
            for group in world.optimizer.param_groups:
                group["lr"] = group["lr"] * 0.5
        return loss

    trained(step, "sgd", most=4)


def test_a_rate_set_twice_with_an_update_between() -> None:
    """Two updates, each with its own rate; the first one ends as it began."""

    def step(world: World, x: Any, y: Any) -> Any:
        [group] = world.optimizer.param_groups
        kept = group["lr"]
        group["lr"] = kept * world.settings.scale
        mse_step(world.model, world.optimizer, x, y)
        group["lr"] = kept
        return mse_step(world.model, world.optimizer, x, y)

    twins = trained(step, "adamw", most=1, settings=SimpleNamespace(scale=0.1))
    twins.change(lambda world: setattr(world.settings, "scale", 0.3))
    twins.steps(2, X, Y)
    twins.change(lambda world: setattr(world.settings, "scale", 0.4))
    twins.steps(2, X, Y)
    assert twins.num_captures == 2


def test_a_rate_in_a_tensor_is_written_in_place() -> None:
    def step(world: World, x: Any, y: Any) -> Any:
        loss = mse_step(world.model, world.optimizer, x, y)
        world.optimizer.param_groups[0]["lr"].mul_(0.9)
        return loss

    OPTIMIZERS["tensor"] = lambda parameters: AdamW(parameters, lr=torch.tensor(0.01), fused=True)
    try:
        trained(step, "tensor", most=2)
    finally:
        del OPTIMIZERS["tensor"]


def test_groups_that_are_counted() -> None:
    """`enumerate(groups)` looks at the groups, and not at what is in them."""

    def step(world: World, x: Any, y: Any) -> Any:
        for index, group in enumerate(world.optimizer.param_groups):
            group["weight_decay"] = 0.1 / (1 + world.n) if index == 0 else 0.0
        world.n += 1
        return mse_step(world.model, world.optimizer, x, y)

    trained(step, "adamw", most=3)


@pytest.mark.parametrize("make_optimizer", [partial(Rprop, lr=0.01), partial(ASGD, lr=0.01)])
def test_state_that_is_made_of_a_rate(make_optimizer: Callable[..., Optimizer]) -> None:
    """It is made before the trace: of another rate than that which the step sets first."""

    def step(model: nn.Module, optimizer: Optimizer, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.param_groups[0]["lr"] = 0.5
        return mse_step(model, optimizer, x, y)

    world = small_world(make_optimizer=make_optimizer)()
    with pytest.raises(wholestep.CaptureError, match=r"sets the learning rate of .*, which makes its state of that"):
        wholestep.compile(step)(world.model, world.optimizer, X, Y)


def test_state_made_of_a_rate_that_is_set_afterwards() -> None:
    OPTIMIZERS["rprop"] = partial(Rprop, lr=0.01)
    try:
        trained(_decayed, "rprop", most=2)
    finally:
        del OPTIMIZERS["rprop"]


def _decayed(world: World, x: Any, y: Any) -> Any:
    loss = mse_step(world.model, world.optimizer, x, y)
    world.optimizer.param_groups[0]["lr"] *= 0.9
    return loss
