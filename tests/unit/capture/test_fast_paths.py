"""Layers that take another path where no gradient is asked for; blocks and wrappers that only C++ sees."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.twins import Twins, World, momentum, pair, small_world
from torch import nn

import wholestep

X, Y = pair()
SEQUENCES = torch.randn(5, 4, 8, generator=torch.Generator().manual_seed(0))
PADDING = torch.tensor([[False, False, False, True]] * 5)

layer = partial(nn.TransformerEncoderLayer, 8, 2, 12, batch_first=True)
LAYERS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Any], Any]]] = {
    "layer": (layer, lambda teacher, x: teacher(x)),
    "norm first": (partial(layer, norm_first=True), lambda teacher, x: teacher(x, src_key_padding_mask=PADDING)),
    "attention": (partial(nn.MultiheadAttention, 8, 2, batch_first=True), lambda teacher, x: teacher(x, x, x)[0]),
    "no weights": (
        partial(nn.MultiheadAttention, 8, 2, batch_first=True),
        lambda teacher, x: teacher(x, x, x, need_weights=False)[0],
    ),
    "encoder": (lambda: nn.TransformerEncoder(layer(), 2), lambda teacher, x: teacher(x)),
    "padded encoder": (
        lambda: nn.TransformerEncoder(layer(), 2, enable_nested_tensor=False),
        lambda teacher, x: teacher(x, src_key_padding_mask=PADDING),
    ),
}


def distilled(make: Callable[[], nn.Module], run: Callable[[Any, Any], Any]) -> tuple[Callable[[], World], Any]:
    """A world with a frozen teacher, and the step of a student."""

    def build() -> World:
        student = nn.Linear(8, 8)
        return World(model=student, teacher=make().eval(), optimizer=momentum(student.parameters()))

    def step(world: World, x: Any) -> Any:
        world.optimizer.zero_grad()
        with torch.no_grad():
            target = run(world.teacher, x)
        loss = F.mse_loss(world.model(x), target)
        loss.backward()
        world.optimizer.step()
        return target

    return build, step


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", LAYERS)
def test_teachers_take_the_path_of_eager(name: str) -> None:
    build, step = distilled(*LAYERS[name])
    twins = Twins(build, step, call=lambda world, step, *args: step(world, *args))
    twins.steps(2, SEQUENCES)


def test_nested_tensors_are_refused() -> None:
    """Eager leaves zeros where there is padding; the other path would not."""
    build, step = distilled(lambda: nn.TransformerEncoder(layer(), 2), LAYERS["padded encoder"][1])
    with pytest.raises(wholestep.CaptureError, match=r"makes a nested tensor.*enable_nested_tensor=False"):
        wholestep.compile(step)(build(), SEQUENCES)


@torch.inference_mode()
def score(world: World, x: Any) -> Any:
    return torch.gather(world.model(x).log_softmax(-1), 1, torch.zeros(len(x), dtype=torch.long).unsqueeze(-1))


def inference(world: World, x: Any, y: Any) -> Any:
    world.optimizer.zero_grad()
    kept = score(world, x)
    with torch.inference_mode():
        norm = world.model(x).norm().item()
        with torch.inference_mode(False):
            trainable = world.model(x)
    loss = (trainable - y).square().mean() - kept.mean()
    loss.backward()
    world.optimizer.step()
    return norm, torch.is_inference_mode_enabled()


def variables(world: World, x: Any, y: Any) -> Any:
    """An attack in two steps on noise that is kept (free adversarial training)."""
    for _ in range(2):
        noise = torch.autograd.Variable(world.noise[: len(x)], requires_grad=True)
        disturbed = x + noise
        disturbed.clamp_(0, 1)
        loss = F.mse_loss(world.model(disturbed), y)
        world.optimizer.zero_grad()
        loss.backward()
        assert noise.grad is not None
        world.noise[: len(x)] += 0.1 * torch.sign(noise.grad)
        world.optimizer.step()


def rate_of_numpy(world: World, x: Any, y: Any) -> Any:
    """Noise as large as the step (SGLD)."""
    world.optimizer.zero_grad()
    F.mse_loss(world.model(x), y).backward()
    world.optimizer.step()
    with torch.no_grad():
        for p in world.model.parameters():
            p.add_(torch.randn_like(p) / np.sqrt(world.optimizer.param_groups[0]["lr"]), alpha=1e-3)


@pytest.mark.parametrize("step", [inference, variables, rate_of_numpy])
def test_what_only_c_sees(step: Callable[..., Any]) -> None:
    def build() -> World:
        world = small_world()()
        world.noise = torch.zeros(9, 4)
        return world

    twins = Twins(build, step, call=lambda world, step, *args: step(world, *args))
    twins.steps(3, X, Y)
