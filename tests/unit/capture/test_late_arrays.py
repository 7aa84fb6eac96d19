"""Arrays of what a step computes (`.numpy()`): Python has them after the graph has run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch.nn.functional as F
from tests.twins import Twins, World, mse_step, pair, small_world
from torch import Tensor, nn
from torch.optim import Optimizer

import wholestep

X, Y = pair()


def returns(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Any:
    output = model(features)
    loss = F.mse_loss(output, targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    shown = loss.detach().cpu().numpy()
    assert isinstance(shown, np.ndarray)
    assert type(shown) is np.ndarray
    return {"loss": shown, "again": [shown], "outputs": output.detach().numpy(), "number": shown.item()}


def test_arrays_are_returned_and_kept() -> None:
    def step(world: World, features: Tensor, targets: Tensor) -> Any:
        seen = returns(world.model, world.optimizer, features, targets)
        world.losses.append(seen["loss"])
        world.last = seen["outputs"]
        return seen

    def build() -> World:
        world = small_world()()
        world.losses, world.last = [], None
        return world

    twins = Twins(build, step, call=lambda world, step, *args: step(world, *args))
    for seed in range(4):
        shown = twins.step(*pair(seed=seed))
        assert shown["loss"] is shown["again"][0]
    assert twins.num_captures <= 2


def test_the_array_of_a_parameter_is_its_memory() -> None:
    def step(model: Any, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Any:
        before = model.first.weight.detach().numpy()
        mse_step(model, optimizer, features, targets)
        return before

    twins = Twins(small_world(), step)
    for seed in range(3):
        shown = twins.step(*pair(seed=seed))
    assert np.shares_memory(shown, twins.worlds[1].model.first.weight.detach().numpy())


@pytest.mark.parametrize("look", [lambda a: a.data, lambda a: a.ctypes, lambda a: np.save(a, 1)])
def test_who_looks_into_one_is_refused(look: Callable[[Any], Any]) -> None:
    def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Any:
        loss = mse_step(model, optimizer, features, targets)
        return look(loss.detach().numpy())

    world = small_world()()
    with pytest.raises(wholestep.CaptureError, match=r"late_arrays.py:\d+: "):
        wholestep.compile(step)(world.model, world.optimizer, X, Y)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's `__array__` has no `copy`
def test_an_array_made_by_numpy_is_refused_by_name() -> None:
    def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Any:
        return np.array(mse_step(model, optimizer, features, targets).detach())

    world = small_world()()
    with pytest.raises(wholestep.CaptureError, match=r"test_late_arrays.py:\d+: an array of a tensor \(np.array"):
        wholestep.compile(step)(world.model, world.optimizer, X, Y)


@pytest.mark.parametrize("prepare", [Tensor.clone, lambda loss: loss.detach().bfloat16()])
def test_where_eager_makes_no_array(prepare: Callable[[Tensor], Tensor]) -> None:
    """Of what has gradients, and of a dtype that NumPy does not know."""

    def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Any:
        return prepare(mse_step(model, optimizer, features, targets)).numpy()

    world = small_world()()
    with pytest.raises(wholestep.CaptureError, match=r"\.numpy\(\) needs a value"):
        wholestep.compile(step)(world.model, world.optimizer, X, Y)


@pytest.mark.parametrize("step", ["skips", "raises", "returns"])
def test_finiteness_asked_of_numpy(step: str) -> None:
    def skips(model: nn.Module, optimizer: Optimizer, features: Tensor) -> Any:
        loss = model(features).square().mean()
        if not np.isfinite(loss.item()):
            return None
        return trained(loss, optimizer)

    def raises(model: nn.Module, optimizer: Optimizer, features: Tensor) -> Any:
        loss = model(features).square().mean()
        value = loss.item()
        if np.isnan(value) or np.isinf(value):
            raise ValueError("not finite")
        return trained(loss, optimizer)

    def returns(model: nn.Module, optimizer: Optimizer, features: Tensor) -> Any:
        loss = model(features).square().mean()
        is_finite = np.isfinite(loss.item())
        trained(loss, optimizer)
        return is_finite

    bad = X.clone()
    bad[0, 0] = float("nan")
    functions = {"skips": skips, "raises": raises, "returns": returns}
    twins = Twins(small_world(), functions[step], call=_call_safely)
    for features in (X, bad, X, bad) if step != "returns" else (X, X * 2, bad):
        twins.step(features)
    assert twins.num_captures <= 2


def trained(loss: Tensor, optimizer: Optimizer) -> Tensor:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def _call_safely(world: World, step: Callable[..., Any], features: Tensor) -> Any:
    try:
        return step(world.model, world.optimizer, features)
    except ValueError as error:
        return str(error)
