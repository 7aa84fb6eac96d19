"""Values that Python has of a step on a CUDA device: checks, numbers for later, scalers in half precision, lengths."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.parity import differences
from tests.twins import SmallNet, Twins, World, momentum, observe, pair, small_world
from tests.unit.capture.test_checks import (
    FAILING,
    Drops,
    Normed,
    Step,
    call_safely,
    normalizes,
    skips,
    trained,
)
from tests.unit.runtime.test_dynamic_sizes import SIZES, Attends, tokens
from tests.unit.runtime.test_dynamic_sizes import step as attend_step
from torch import Tensor, nn
from torch.optim import Optimizer

import wholestep

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]


def fused(parameters: Any) -> Optimizer:
    return torch.optim.AdamW(parameters, fused=True)


def on_device(world: World, step: Step, *args: Any) -> Any:
    """Call with the device as default, as tensors that the steps make are to be there."""
    with torch.device("cuda"):
        return step(world.model, world.optimizer, *args)


def safely_on_device(world: World, step: Step, *args: Any) -> Any:
    with torch.device("cuda"):
        return call_safely(world, step, *args)


def cuda_world(make_model: Callable[[], nn.Module] = SmallNet, make_optimizer: Any = momentum) -> Callable[[], World]:
    return small_world(lambda: make_model().cuda(), make_optimizer)


def batch(seed: int = 0, scale: float = 1.0) -> Tensor:
    return pair(seed=seed)[0].cuda() * scale


@pytest.mark.parametrize("step", FAILING)
def test_a_check_that_fails_raises_what_eager_raises(step: Step) -> None:
    twins = Twins(cuda_world(), step, call=safely_on_device)
    twins.steps(2, batch())
    assert isinstance(twins.step(batch(scale=math.nan)), tuple)
    twins.steps(2, batch())
    assert (twins.num_captures, twins.compiled.num_eager_calls) == (1, 1)


@pytest.mark.parametrize("step", [normalizes, skips])
def test_a_call_that_leaves_its_graph_leaves_masks_and_statistics_as_eager_does(step: Step) -> None:
    twins = Twins(cuda_world(Normed), step, call=call_safely)
    for scale in (1.0, math.nan, 1.0, math.nan, 1.0):
        twins.step(batch(scale=scale))
    assert 1 <= twins.compiled.num_eager_calls <= 2


def test_layers_that_are_dropped_by_a_draw() -> None:
    def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
        return trained(F.mse_loss(model(features), targets), optimizer)

    twins = Twins(cuda_world(lambda: Drops(0.5)), step)
    features, targets = pair()
    twins.steps(16, features.cuda(), targets.cuda())
    assert twins.num_captures <= 4


def test_numbers_of_all_dtypes_come_after_the_step() -> None:
    def step(world: World, features: Tensor) -> Any:
        output = world.model(features)
        loss = trained(output.square().mean(), world.optimizer)
        world.history.append(loss.item())
        counts = (output > 0).sum()
        return {
            "loss": loss.item() * 2,
            "half": loss.half().item(),
            "bfloat16": float(loss.bfloat16()),
            "count": counts.item() / output.numel(),
            "any": bool_text((output > 0).any().item()),
            "list": output.detach()[0].tolist(),
            "text": f"loss {loss.item():.4f}",
        }

    def bool_text(value: Any) -> list[Any]:
        return [value]

    def build() -> World:
        world = cuda_world()()
        world.history = []
        return world

    twins = Twins(build, step, call=lambda world, step, *args: step(world, *args))
    for seed in range(4):
        twins.step(batch(seed))
    assert twins.num_captures == 1


def test_lengths_on_cuda() -> None:
    def build() -> World:
        model = Attends().cuda()
        return World(model=model, optimizer=momentum(model.parameters()))

    twins = Twins(build, attend_step, call=on_device)
    for seed, size in enumerate(SIZES):
        twins.step(tokens(*size, seed=seed).cuda())
    # Before torch 2.12, attention without a fused kernel is captured for each size.
    assert twins.num_captures <= (3 if torch.__version__ >= "2.12" else len(SIZES))


SCALES = [1.0, 1e30, 1.0, 1.0, 1.0, 1e30, 1e30, 1.0, 1.0, 1.0]


def scaled_step(scaler: torch.amp.GradScaler) -> Step:
    def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> float:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.mse_loss(model(features), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    return step


@pytest.mark.parametrize("make_optimizer", [momentum, fused], ids=["sgd", "fused"])
@pytest.mark.parametrize("first", [1.0, 1e30], ids=["first applied", "first skipped"])
def test_a_scaler_in_half_precision(make_optimizer: Any, first: float) -> None:
    """50 steps, an overflow in a third of them: bit for bit, as no kernel adds in another order than eager's."""
    scalers = [torch.amp.GradScaler("cuda", init_scale=2.0**8, growth_interval=4) for _ in range(2)]
    worlds = [cuda_world(make_optimizer=make_optimizer)() for _ in range(2)]
    worlds[1].model.load_state_dict(worlds[0].model.state_dict())
    steps: list[Any] = [scaled_step(scalers[0]), wholestep.compile(scaled_step(scalers[1]))]
    for number in range(50):
        features, targets = pair(seed=number)
        features = features.cuda() * (SCALES[number % 10] if number else first)
        losses = [
            step(world.model, world.optimizer, features, targets.cuda())
            for step, world in zip(steps, worlds, strict=True)
        ]
        assert repr(losses[0]) == repr(losses[1])  # NaN too
        assert scalers[0].state_dict() == scalers[1].state_dict()
        assert differences(observe(worlds[0]), observe(worlds[1])) == []
    assert steps[1].num_captures <= 5, steps[1].recompile_reasons
