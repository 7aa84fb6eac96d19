"""Numbers that Python makes of what the graph computes: returned, kept and printed with each call's values."""

from __future__ import annotations

import collections
import dataclasses
import json
import logging
import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.twins import Twins, World, mse_step, pair, small_world
from torch import Tensor

import wholestep
from wholestep import CaptureError
from wholestep.capture.blank import no_weights

X, Y = pair()


@dataclasses.dataclass
class Meter:
    """A running average, as nearly every training script has one."""

    total: float = 0.0
    count: int = 0
    best: float = math.inf

    def update(self, value: float, number: int = 1) -> None:
        self.total += value * number
        self.count += number
        self.best = min(self.best, value)

    @property
    def average(self) -> float:
        return self.total / max(self.count, 1)


def returns(make: Callable[[Tensor, Tensor], Any]) -> Callable[..., Any]:
    def step(world: World, features: Tensor, targets: Tensor) -> Any:
        loss = mse_step(world.model, world.optimizer, features, targets)
        return make(loss, features)

    return step


def trained(step: Callable[..., Any], captures: int, build: Callable[[], World] | None = None, **options: Any) -> Twins:
    twins = Twins(build or small_world(), step, call=lambda world, step, *args: step(world, *args), **options)
    for seed in range(5):
        twins.step(*pair(seed=seed))
    assert twins.num_captures == captures, twins.reasons
    return twins


def assert_said_alike(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    """Eager and the compiled step took turns, three times: they have printed and logged the same, each time another."""
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("loss")]
    logged = [record.getMessage() for record in caplog.records if record.name == "tests.late"]
    for lines in (printed, logged):
        assert lines[::2] == lines[1::2]
        assert len(set(lines)) == 3


RETURNED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "item": lambda loss, x: loss.item(),
    "json": lambda loss, x: json.dumps({"loss": [loss.item()]}, default=str),
    "ufunc": lambda loss, x: np.sqrt(loss.item()),
    "float": lambda loss, x: float(loss.detach()),
    "int": lambda loss, x: int(loss * 1000),
    "arithmetic": lambda loss, x: (loss.item() * 100 - 1) / 3 // 0.25 % 7 + 2 ** loss.item(),
    "reflected": lambda loss, x: -abs(1 - loss.item()) + (3 / loss.item()),
    "rounded": lambda loss, x: (round(loss.item(), 2), round(loss.item())),
    "math": lambda loss, x: (
        math.exp(loss.detach()),
        math.sqrt(loss.item()),
        math.isfinite(loss.item()),
        math.floor(loss.item()),
    ),
    "largest": lambda loss, x: (max(loss.item(), 0.5), min(1.0, loss.item(), 0.7), sum([loss.item(), 1.0])),
    "list": lambda loss, x: (loss * x).tolist(),
    "part of a list": lambda loss, x: {"row": (loss * x).tolist()[1], "sum": sum((loss * x).sum(0).tolist())},
    "truth": lambda loss, x: (x * loss > 0).any().item(),
    "integer": lambda loss, x: (x * loss).argmax().item() + 1,
    "of the batch": lambda loss, x: (x > 0).sum().item() / x.numel(),
    "with others": lambda loss, x: [{"loss": loss.item(), "tensor": loss, "text": "fixed"}, (loss.detach().item(),)],
    "before it is changed": lambda loss, x: (before := loss.clone(), before.item(), before.mul_(2), before.item())[
        1::2
    ],
    "types that are certain": lambda loss, x: (
        type(2.0 ** loss.item()) is float,
        isinstance(max(0.5, loss.item()), float),
        isinstance(max(1, loss.item()), (int, float)),
        type(2 * (loss > 1).item()) is int,
        (loss > 1).item() is None,
    ),
    "half": lambda loss, x: (loss.bfloat16().item(), loss.half().double().item()),
}


@pytest.mark.parametrize("make", RETURNED.values(), ids=RETURNED)
def test_what_is_returned(make: Callable[[Tensor, Tensor], Any]) -> None:
    trained(returns(make), captures=1)


def test_values_of_a_parameter_are_those_of_the_moment() -> None:
    def step(world: World, features: Tensor, targets: Tensor) -> Any:
        before = world.model.first.bias[0].item()
        loss = mse_step(world.model, world.optimizer, features, targets)
        return before, world.model.first.bias[0].item(), loss.item(), world.model.first.bias.tolist()

    trained(step, captures=1)


def test_what_is_kept() -> None:
    def build() -> World:
        world = small_world()()
        world.meter, world.history = Meter(), []
        world.recent, world.by_name = collections.deque(maxlen=2), collections.defaultdict(list)
        return world

    def step(world: World, features: Tensor, targets: Tensor) -> float:
        loss = mse_step(world.model, world.optimizer, features, targets)
        world.meter.update(loss.item(), features.shape[0])
        world.history.append(loss.item())
        world.recent.append((loss.item(), features.shape[0]))
        world.by_name["loss"].append(loss.item())
        world.last = loss.item()
        return world.meter.average

    trained(step, captures=2, build=build)


def test_what_is_printed_and_logged(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("tests.late")

    def step(world: World, features: Tensor, targets: Tensor) -> Tensor:
        loss = mse_step(world.model, world.optimizer, features, targets)
        print("loss", loss.item(), "twice", 2 * loss.item())
        logger.warning("loss %.4f", loss.item())
        return loss

    twins = Twins(small_world(), step, call=lambda world, step, *args: step(world, *args))
    for seed in range(3):
        twins.step(*pair(seed=seed))
    assert_said_alike(capsys, caplog)


TOLD_APART: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "is True": lambda loss, x: (loss > 1).item() is True,
    "is not a number": lambda loss, x: (loss > 1).int().item() is not x.dim(),
    "operator.is_": lambda loss, x: operator.is_((loss > 1).item(), False),
    "type of a power": lambda loss, x: type(2 ** (loss > 1).int().item()),
    "type of a complex power": lambda loss, x: isinstance((loss - 1).item() ** 0.5 + 1, float),
    "type of the largest": lambda loss, x: isinstance(max(1, loss.item()), float),
}


@pytest.mark.parametrize("make", TOLD_APART.values(), ids=TOLD_APART)
def test_what_depends_on_the_value_unseen_is_refused(make: Callable[[Tensor, Tensor], Any]) -> None:
    with pytest.raises(CaptureError, match=r"\.py:\d+: .*known when the step runs"):
        trained(returns(make), captures=0)


def test_numbers_of_a_graph_and_of_python_together() -> None:
    def step(world: World, features: Tensor, targets: Tensor, weight: float) -> float:
        loss = mse_step(world.model, world.optimizer, features, targets)
        return loss.item() * weight + weight

    twins = Twins(small_world(), step, call=lambda world, step, *args: step(world, *args))
    for weight in (0.5, 0.25, 0.125, 2.0):
        twins.step(X, Y, weight)
    assert twins.num_captures == 2


def test_with_waiting_updates_and_dynamic_batches() -> None:
    def step(world: World, features: Tensor, targets: Tensor) -> dict[str, float]:
        return {"loss": mse_step(world.model, world.optimizer, features, targets).item()}

    twins = Twins(small_world(), step, call=lambda world, step, *args: step(world, *args), cross_iteration="all")
    for size in (6, 4, 5, 7):
        twins.step(*pair(size))
    assert twins.num_captures == 2


def test_an_error_of_python_comes_after_the_step_has_run() -> None:
    def step(world: World, features: Tensor, targets: Tensor) -> float:
        return 1 / (mse_step(world.model, world.optimizer, features, targets).item() * 0)

    world = small_world()()
    compiled = wholestep.compile(step)
    before = world.model.first.weight.clone()
    with pytest.raises(ZeroDivisionError):
        compiled(world, X, Y)
    assert not torch.equal(before, world.model.first.weight)


def test_nothing_is_computed_to_capture_a_number_that_is_only_returned() -> None:
    def step(world: World, features: Tensor, targets: Tensor) -> float:
        return mse_step(world.model, world.optimizer, features, targets).item() * 2

    with no_weights():
        world = small_world()()
        compiled = wholestep.compile(step)
        compiled.prepare(world, torch.randn(6, 4), torch.randn(6, 3))
    assert compiled.num_captures == 1


def test_json_takes_numbers_of_python_for_numbers() -> None:
    def step(world: World, features: Tensor, targets: Tensor) -> str:
        mse_step(world.model, world.optimizer, features, targets)
        world.calls["n"] += 1
        return json.dumps(world.calls, default=str)

    def build() -> World:
        world = small_world()()
        world.calls = {"n": 0}
        return world

    trained(step, captures=5, build=build)


TRIED = {
    "exponential": ("math.exp(value * 1e4)", True),
    "division": ("1 / value", True),
    "power": ("value ** 2", True),
    "rounded": ("round(value)", True),
    "product": ("value * 2 + 1", False),
    "share": ("value / 4", False),
    "finite": ("math.isfinite(value)", False),
}


@pytest.mark.parametrize(("expression", "is_refused"), TRIED.values(), ids=TRIED)
def test_computations_that_a_handler_is_there_for(expression: str, is_refused: bool) -> None:
    program = f"""
import contextlib, math
def step(world, features, targets):
    value = mse_step(world.model, world.optimizer, features, targets).item()
    try:
        value = {expression}
    except (OverflowError, ZeroDivisionError):
        value = 0.0
    with contextlib.nullcontext():
        return value, math.exp(-abs(value))
"""
    names: dict[str, Any] = {"mse_step": mse_step, "__name__": "tried"}
    exec(compile(program, "tried.py", "exec"), names)
    if not is_refused:
        trained(names["step"], captures=1)
        return
    with pytest.raises(wholestep.CaptureError, match=r"tried.py:6: .* only known when the step runs"):
        wholestep.compile(names["step"])(small_world()(), X, Y)


def test_numbers_of_arguments_with_numbers_that_change() -> None:
    """What the arguments alone decide is certain; the number that it is computed with is not."""

    def step(world: World, features: Any, targets: Any) -> Any:
        count = (targets > 0).sum().item()
        world.norm = 0.9 * world.norm + 0.1 * max(count, 1)
        world.optimizer.zero_grad()
        loss = (world.model(features) - targets).square().sum() / world.norm
        if count + world.norm > 80:
            loss = loss * 2
        loss.backward()
        world.optimizer.step()
        return loss

    def build() -> World:
        world = small_world()()
        world.norm = 100.0
        return world

    twins = Twins(build, step, call=lambda world, step, *args: step(world, *args))
    for seed in (0, 1, 0, 0, 1, 0):
        twins.step(*pair(seed=seed))
