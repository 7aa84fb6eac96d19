"""Tensors drawn from a generator of the step's own, which is asked before the graph at each call."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.twins import Twins, World, adam, pair, small_world
from torch import Tensor

import wholestep


def build() -> World:
    world = small_world(make_optimizer=adam)()
    world.model.generator = torch.Generator().manual_seed(5)
    return world


def step_of(noise: Callable[[Any, Tensor], Tensor]) -> Callable[..., Any]:
    def step(model: Any, optimizer: Any, features: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(features + noise(model, features)), targets)
        loss.backward()
        optimizer.step()
        return loss

    return step


def states(twins: Twins) -> list[Tensor]:
    return [world.model.generator.get_state() for world in twins.worlds]


DRAWS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "randn": lambda m, x: torch.randn(x.shape, generator=m.generator),
    "rand, numbers": lambda m, x: torch.rand(6, 4, generator=m.generator, dtype=torch.float64).float(),
    "randint": lambda m, x: torch.randint(0, 2, x.size(), generator=m.generator) * 2.0 - 1.0,
    "randperm": lambda m, x: x[torch.randperm(6, generator=m.generator)],
    "several, and global ones": lambda m, x: (
        torch.randn(4, generator=m.generator) * torch.rand(4) + F.dropout(torch.rand(4, generator=m.generator))
    ),
    "changed in place": lambda m, x: torch.randn(6, 4, generator=m.generator).mul_(2).add_(x),
}


@pytest.mark.parametrize("noise", DRAWS.values(), ids=DRAWS.keys())
def test_each_call_draws_on(noise: Callable[[Any, Tensor], Tensor]) -> None:
    twins = Twins(build, step_of(noise))
    for seed in range(4):
        twins.step(*pair(seed=seed))
        assert torch.equal(*states(twins))
    assert twins.num_captures == 1
    twins.change(lambda world: world.model.generator.manual_seed(3))
    twins.step(*pair())
    assert twins.num_captures == 1
    twins.change(lambda world: setattr(world.model, "generator", torch.Generator().manual_seed(9)))
    twins.steps(2, *pair())
    assert torch.equal(*states(twins))


def test_verified_steps_draw_once() -> None:
    twins = Twins(build, step_of(DRAWS["randn"]), verify=2)
    for seed in range(3):
        twins.step(*pair(seed=seed))
        assert torch.equal(*states(twins))


def test_what_a_call_that_leaves_the_graph_drew_is_drawn_again() -> None:
    def noise(model: Any, features: Tensor) -> Tensor:
        drawn = torch.randn(6, 4, generator=model.generator)
        if not torch.isfinite(model(features)).all():
            drawn = drawn * torch.randn(4, generator=model.generator)
        return drawn

    twins = Twins(build, step_of(noise))
    twins.steps(2, *pair())
    features, targets = pair()
    twins.step(features * float("nan"), targets)
    twins.steps(2, *pair())
    assert torch.equal(*states(twins))


REFUSED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "in place": lambda m, x: torch.empty(6, 4).normal_(generator=m.generator),
    "of tensors": lambda m, x: torch.bernoulli(x.sigmoid(), generator=m.generator),
    "the global one": lambda m, x: torch.randn(6, 4, generator=torch.default_generator),
}


@pytest.mark.parametrize("noise", REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_drawn_before_is_refused(noise: Callable[[Any, Tensor], Tensor]) -> None:
    world = build()

    def both(model: Any, features: Tensor) -> Tensor:
        return torch.randn(6, 4, generator=model.generator) + noise(model, features)

    before = world.model.generator.get_state(), torch.get_rng_state()
    with pytest.raises(wholestep.CaptureError, match=r"draws from a torch\.Generator of its own"):
        wholestep.compile(step_of(both))(world.model, world.optimizer, *pair())
    assert torch.equal(before[0], world.model.generator.get_state())
    assert torch.equal(before[1], torch.get_rng_state())
