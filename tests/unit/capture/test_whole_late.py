"""Functions that look at what the graph computes, as only their own code can tell: they run after it, as they are."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.twins import Twins, World, mse_step, pair, small_world
from torch import Tensor

import wholestep
from wholestep import CaptureError

LIMIT = 0.8
seen: list[float] = []


def distance(left: list[int], right: list[int]) -> int:
    row = list(range(len(right) + 1))
    for i in range(1, len(left) + 1):
        before, row = row, [i, *row[1:]]
        for j in range(1, len(right) + 1):
            row[j] = min(before[j - 1] + (left[i - 1] != right[j - 1]), before[j] + 1, row[j - 1] + 1)
    return row[-1]


def graded(loss: float, limit: float) -> tuple[float, str]:
    if loss > limit:
        return loss, "high"
    return limit, "low"


def report(number: int, loss: float) -> None:
    if loss > LIMIT:
        print("high in", number, loss)
    else:
        print("low")


def named(values: list[float]) -> dict[str, Any]:
    best = 0
    for index, value in enumerate(values):
        if value > values[best]:
            best = index
    return {"best": best, "all": np.array(sorted(values)), "text": "".join("+" if v > 0 else "-" for v in values)}


def found(loss: float) -> tuple[Any, str] | None:
    return (loss, "high") if loss > 1.9 else None


def largest(values: list[float]) -> list[float]:
    return sorted(values, reverse=True)[:2]


def spelled(rows: list[list[float]]) -> list[str]:
    return ["".join("x" if value > 0 else "" for value in row) for row in rows]


def trained(step: Callable[..., Any], **options: Any) -> Twins:
    def build() -> World:
        world = small_world()()
        world.history, world.number = [], 0
        return world

    twins = Twins(build, step, call=lambda world, step, *args: step(world, *args), **options)
    for seed in range(5):
        twins.step(*pair(seed=seed))
    assert twins.compiled.num_eager_calls == 0
    return twins


def of_lists(world: World, features: Tensor, targets: Tensor) -> Any:
    loss = mse_step(world.model, world.optimizer, features, targets)
    output = world.model(features).detach()
    errors = sum(distance(a, b) for a, b in zip((output > 0).int().tolist(), (targets > 0).int().tolist()))
    world.history.append(errors)
    value, grade = graded(loss.item(), LIMIT)
    rows = spelled(output.tolist())
    return errors / 3, value, grade, named(output[0].tolist()), rows, sum(largest(output[0].tolist()))


def test_loops_and_branches() -> None:
    assert trained(of_lists).num_captures <= 3


def saying(world: World, features: Tensor, targets: Tensor) -> None:
    world.number += 1
    print("first")
    loss = mse_step(world.model, world.optimizer, features, targets * (world.number % 2)).item()
    report(world.number, loss)
    print(json.dumps({"loss": loss, "number": world.number, "list": [loss, loss > LIMIT]}))


def test_what_is_said_comes_in_its_place(capsys: pytest.CaptureFixture[str]) -> None:
    twins = trained(saying)
    assert twins.num_captures <= 3
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("recompiled")]
    chunks = [lines[index : index + 3] for index in range(0, len(lines), 3)]
    assert chunks[::2] == chunks[1::2]
    assert {chunk[1][:3] for chunk in chunks} == {"hig", "low"}


class Meter:
    """Knows the best of what it was told."""

    def __init__(self) -> None:
        self.best, self.bound = 9.0, 0.5

    def is_better(self, loss: float) -> str:
        return "better" if loss < self.best - self.bound else "worse"


def test_what_it_reads_may_change() -> None:
    """It runs at each call, so that nothing it reads is guarded."""

    def step(world: World, features: Tensor, targets: Tensor) -> Any:
        return world.meter.is_better(mse_step(world.model, world.optimizer, features, targets).item())

    def build() -> World:
        world = small_world()()
        world.meter = Meter()
        return world

    twins = Twins(build, step, call=lambda world, step, *args: step(world, *args))
    found: set[Any] = set()
    for seed in range(4):
        found.add(twins.step(*pair(seed=seed)))
        twins.change(lambda world: setattr(world.meter, "best", world.meter.best - 4))
    assert twins.num_captures == 1
    assert found == {"better", "worse"}


def with_torch(loss: float) -> float:
    return 1.0 if loss > float(torch.ones(1).sum()) else 0.0


def with_a_draw(loss: float) -> float:
    return random.random() if loss > LIMIT else 0.5


def with_a_write(loss: float) -> float:
    seen.append(1.0 if loss > LIMIT else 0.0)
    return loss


def with_a_written_argument(values: list[float]) -> float:
    values.append(1.0 if values[0] > LIMIT else 0.0)
    return values[0]


def with_a_print_and_a_result(loss: float) -> float:
    print("a result", 1 if loss > LIMIT else 0)
    return loss


def with_what_was_written(world: World, loss: float) -> int:
    return world.number if loss > LIMIT else 0


def with_an_array(array: Any) -> Any:
    if array[0, 0] > 0:
        array[0] = 1
    return array.sum()


def with_a_cache(loss: float, cache: list[float] = []) -> int:  # noqa: B006
    cache.append(1.0 if loss > LIMIT else 0.0)
    return len(cache)


NOT_WHOLE: dict[str, Callable[[World, Tensor, Tensor], Any]] = {
    "torch": lambda world, loss, out: with_torch(loss.item()),
    "draw": lambda world, loss, out: with_a_draw(loss.item()),
    "write": lambda world, loss, out: with_a_write(loss.item()),
    "argument": lambda world, loss, out: with_a_written_argument([loss.item(), 2.0]),
    "cache": lambda world, loss, out: with_a_cache(loss.item()),
    "print": lambda world, loss, out: with_a_print_and_a_result(loss.item()),
    "written before": lambda world, loss, out: with_what_was_written(world, loss.item()),
    "array": lambda world, loss, out: with_an_array(out.numpy()),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("use", NOT_WHOLE.values(), ids=NOT_WHOLE)
def test_what_is_not_safe_is_refused(use: Callable[[World, Tensor, Tensor], Any]) -> None:
    def step(world: World, features: Tensor, targets: Tensor) -> Any:
        world.number += 1
        loss = mse_step(world.model, world.optimizer, features, targets)
        return use(world, loss, world.model(features).detach())

    world = small_world()()
    world.number = 0
    state, length = random.getstate(), len(seen)
    with pytest.raises(CaptureError, match=r"test_whole_late.py:\d+: .*value|array"):
        wholestep.compile(step)(world, *pair())
    assert (random.getstate(), len(seen), world.number) == (state, length, 0)


def make_scaled(factor: float) -> tuple[Callable[[float], float], Callable[[float], None]]:
    def scaled(loss: float) -> float:
        return loss * factor

    def change(value: float) -> None:
        nonlocal factor
        factor = value

    return scaled, change


scaled, change = make_scaled(2.0)


def graded_by_helper(loss: float) -> str:
    return "high" if scaled(loss) > LIMIT else "low"


def test_a_helper_that_the_step_calls_as_well_is_guarded() -> None:
    def step(world: World, features: Tensor, targets: Tensor) -> Any:
        loss = mse_step(world.model, world.optimizer, features, targets)
        return graded_by_helper(loss.item()), scaled(loss.item())

    twins = Twins(small_world(), step, call=lambda world, step, *args: step(world, *args))
    for factor in (2.0, 2.0, 0.5, 0.25):
        change(factor)
        twins.step(*pair())
    change(2.0)


def test_a_result_that_is_branched_on_is_refused() -> None:
    def step(world: World, features: Tensor, targets: Tensor) -> Any:
        loss = mse_step(world.model, world.optimizer, features, targets)
        return 1 if distance([1, 2], [int(loss.item()), 2]) > 1 else 2

    world = small_world()()
    with pytest.raises(CaptureError, match="a comparison needs a value"):
        wholestep.compile(step)(world, *pair())


def test_another_kind_of_result_leaves_the_graph() -> None:
    """The caller goes on by what comes back: where that is of another type, the call is not the graph's."""

    def step(world: World, features: Tensor, targets: Tensor) -> Any:
        loss = mse_step(world.model, world.optimizer, features, targets)
        result = found(loss.item())
        return "nothing" if result is None else result[0]

    twins = Twins(small_world(), step, call=lambda world, step, *args: step(world, *args))
    for scale in (1.0, 3.0, 1.0, 3.0, 1.0):
        twins.step(pair()[0], pair()[1] * scale)
