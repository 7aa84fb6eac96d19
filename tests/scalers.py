"""Steps with a gradient scaler as people write them, trained in eager and compiled with overflows forced.

Compared after every step: parameters, gradients, optimizer state, the scale, the growth tracker, what is returned.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from tests.parity import differences
from tests.twins import SmallNet, World, observe, pair
from torch import Tensor, nn

import wholestep

Recipe = Callable[[World, Tensor, Tensor], Any]
NUM_STEPS = 50
OVERFLOWS = frozenset({0, 1, 7, 13, 14, 30, 31, 32, 45})
"""Steps whose losses are infinite; the first two leave optimizers without any state."""


def forward(world: World, features: Tensor, targets: Tensor) -> Tensor:
    with torch.autocast(world.device, dtype=world.dtype):
        return F.mse_loss(world.model(features).float(), targets)


def plain(world: World, features: Tensor, targets: Tensor) -> Any:
    world.optimizer.zero_grad()
    loss = forward(world, features, targets)
    world.scaler.scale(loss).backward()
    world.scaler.step(world.optimizer)
    world.scaler.update()
    return loss.detach()


def clipped(world: World, features: Tensor, targets: Tensor) -> Any:
    world.optimizer.zero_grad()
    loss = forward(world, features, targets)
    world.scaler.scale(loss).backward()
    world.scaler.unscale_(world.optimizer)
    norm = nn.utils.clip_grad_norm_(world.model.parameters(), 0.1)
    world.scaler.step(world.optimizer)
    world.scaler.update()
    return loss.item(), norm


def two_optimizers(world: World, features: Tensor, targets: Tensor) -> Any:
    world.optimizer.zero_grad()
    world.other.zero_grad()
    loss = forward(world, features, targets)
    world.scaler.scale(loss).backward()
    world.scaler.unscale_(world.optimizer)
    nn.utils.clip_grad_norm_(world.model.parameters(), 1.0)
    world.scaler.step(world.optimizer)
    world.scaler.step(world.other)
    world.scaler.update()
    return loss.detach()


def two_losses(world: World, features: Tensor, targets: Tensor) -> Any:
    world.optimizer.zero_grad()
    world.other.zero_grad()
    with torch.autocast(world.device, dtype=world.dtype):
        output = world.model(features).float()
        first, second = F.mse_loss(output, targets), F.l1_loss(output, targets)
    world.scaler.scale(first).backward(retain_graph=True)
    world.scaler.scale(second * 0.5).backward()
    world.scaler.step(world.optimizer)
    world.scaler.step(world.other)
    world.scaler.update()
    return first.detach(), second.detach()


def skips_a_schedule(world: World, features: Tensor, targets: Tensor) -> Any:
    """What decides whether the scheduler is stepped, after the call."""
    scale_before = world.scaler.get_scale()
    loss = plain(world, features, targets)
    is_skipped = world.scaler.get_scale() < scale_before
    if not is_skipped:
        world.num_updates += 1
    return loss, is_skipped


def accumulates(world: World, features: Tensor, targets: Tensor) -> Any:
    """A micro-batch; each second one ends with an update."""
    loss = forward(world, features, targets) / 2
    world.scaler.scale(loss).backward()
    world.position += 1
    if world.position % 2 == 0:
        world.scaler.step(world.optimizer)
        world.scaler.update()
        world.optimizer.zero_grad()
    return loss.detach()


RECIPES: tuple[Recipe, ...] = (plain, clipped, two_optimizers, two_losses, skips_a_schedule, accumulates)
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}


def build(device: str, dtype: torch.dtype, optimizer: str) -> World:
    model = SmallNet().to(device)
    make = OPTIMIZERS[optimizer]
    scaler = torch.amp.GradScaler(device, init_scale=2.0**8, growth_interval=3)
    other = make([*model.second.parameters()])
    own = make([*model.parameters()])
    return World(
        model=model, optimizer=own, other=other, scaler=scaler, device=device, dtype=dtype, position=0, num_updates=0
    )


def assert_scaled_alike(recipe: Recipe, device: str, dtype: torch.dtype, optimizer: str, most_captures: int) -> None:
    """Train both for 50 steps; on a device, numbers may differ by rounding, and everything that is decided may not."""
    worlds = [build(device, dtype, optimizer) for _ in range(2)]
    worlds[1].model.load_state_dict(worlds[0].model.state_dict())
    steps: list[Any] = [recipe, wholestep.compile(recipe)]
    tolerance = {"rtol": 0.0, "atol": 0.0} if device == "cpu" else {"rtol": 1.3e-6, "atol": 1e-5}
    for number in range(NUM_STEPS):
        features, targets = (value.to(device) for value in pair(seed=number))
        features = features * 1e30 if number in OVERFLOWS else features
        results = [step(world, features, targets) for step, world in zip(steps, worlds, strict=True)]
        seen = [
            observe(world) | observe(World(result=result, **_of_scaler(world)))
            for world, result in zip(worlds, results, strict=True)
        ]
        assert differences(*seen, **tolerance) == [], number
        assert len(worlds[0].optimizer.state) == len(worlds[1].optimizer.state), number
    assert steps[1].num_captures <= most_captures, steps[1].recompile_reasons


def _of_scaler(world: World) -> dict[str, Any]:
    """All that a scaler keeps, but for what it remembers of optimizers between `unscale_` and `update`."""
    return {"scaling": world.scaler.state_dict(), "num_updates": world.num_updates, "position": world.position}
