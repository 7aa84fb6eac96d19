"""Scans, checks of torch, and buffers that the first call makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.twins import Twins, World, pair, small_world
from torch import Tensor, nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch.optim import Optimizer

import wholestep

pytestmark = pytest.mark.filterwarnings("ignore")


def trained(loss: Tensor, optimizer: Optimizer) -> Tensor:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def sums(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
    output = associative_scan(lambda one, other: one + other, model(features), dim=0, combine_mode="generic")
    return trained(F.mse_loss(output, targets), optimizer)


@pytest.mark.parametrize("step", [sums])
def test_control_flow_of_torch(step: Callable[..., Any]) -> None:
    twins = Twins(small_world(), step)
    for seed in (0, 1, 2, 1, 0):
        twins.step(*pair(seed=seed))
    assert twins.num_captures <= 4


class MakesPositions(nn.Module):
    def __init__(self, *, is_declared: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        if is_declared:
            self.register_buffer("positions", None)

    def forward(self, features: Tensor) -> Tensor:
        if getattr(self, "positions", None) is None:
            self.register_buffer("positions", torch.arange(3.0) * 0.1)
        return self.layer(features) + self.positions


@pytest.mark.parametrize("is_declared", [True, False])
def test_buffers_that_the_first_call_makes(is_declared: bool) -> None:
    """The first call runs as it is, all others are one graph."""

    def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
        return trained(F.mse_loss(model(features), targets), optimizer)

    twins = Twins(small_world(lambda: MakesPositions(is_declared=is_declared)), step)
    for seed in range(4):
        twins.step(*pair(seed=seed))
    assert (twins.num_captures, twins.compiled.num_eager_calls) == (1, 1)


def test_a_buffer_that_the_first_call_makes_within_a_memory_budget() -> None:
    def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
        return trained(F.mse_loss(model(features), targets), optimizer)

    world = small_world(lambda: MakesPositions(is_declared=False))()
    compiled = wholestep.compile(step, memory_budget=1.0)
    with pytest.raises(wholestep.CaptureError, match=r"the step makes buffer 'positions', .* call the model once"):
        compiled(world.model, world.optimizer, *pair())
    world.model(pair()[0])
    compiled(world.model, world.optimizer, *pair())


def asserts(loss: Tensor) -> None:
    torch._assert(loss < 1e6, "too large")


def checks_all(loss: Tensor) -> None:
    torch._check_tensor_all(loss < 1e6, lambda: "too large")


def checks_soon(loss: Tensor) -> None:
    torch.ops.aten._assert_async.msg(loss < 1e6, "too large")


@pytest.mark.parametrize("check", [asserts, checks_all, checks_soon])
def test_checks_of_torch(check: Callable[[Tensor], None]) -> None:
    def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
        loss = F.mse_loss(model(features), targets)
        check(loss)
        return trained(loss, optimizer)

    def call_safely(world: World, step: Callable[..., Any], features: Tensor, targets: Tensor) -> Any:
        try:
            return step(world.model, world.optimizer, features, targets)
        except (AssertionError, RuntimeError) as error:
            return type(error).__name__, str(error)

    features, targets = pair()
    twins = Twins(small_world(), step, call=call_safely)
    for each in (targets, targets * 1e9, targets):
        assert isinstance(twins.step(features, each), tuple) is (each is not targets)
    assert (twins.num_captures, twins.compiled.num_eager_calls) == (1, 1)
