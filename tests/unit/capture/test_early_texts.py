"""Text that Python makes of numbers known before the graph runs: counters in a print cost no capture per call."""

from __future__ import annotations

import json
import types
from typing import Any

import pytest
from tests.twins import Twins, World, mse_step, pair, small_world

FREE = {
    "f-string": 'print(f"iter {world.n:4d} at {world.n / 7:.3f} {world.n!s}|")',
    "format": 'print("iter {:d} {x!r}".format(world.n, x=world.n))',
    "percent": 'print("iter %d of %d, %5.1f|%s" % (world.n, 100, world.n / 3, world.n))',
    "kept": 'world.log.append(f"n{world.n}")',
    "attribute": 'setattr(world, "name", f"run-{world.n}")',
    "with the loss": 'print(f"{world.n}: {loss.item():.4f}" + " %d" % world.n)',
    "of a draw": 'print(f"{random.random():.3f} {random.randint(0, 9)}")',
}
LOOKED_INTO = {
    "key": 'world.seen.update({f"n{world.n}": loss.item()})',
    "item": 'world.seen.__setitem__(f"n{world.n}", world.n)',
    "length": 'world.log.append(len(f"{10 ** world.n}"))',
    "comparison": 'world.log.append(f"{world.n}" == "3")',
    "getattr": 'world.log.append(getattr(world, f"n{world.n}", None))',
    "zfill": "world.log.append(str(world.n).zfill(5))",
    "padding of text": 'world.log.append("{!s:>9}".format(world.n))',
    "padding of an object": 'world.log.append("{!s:>40}".format(types.SimpleNamespace(a=world.n)))',
    "padding by percent": 'world.log.append("%12s|%5d" % (world.n, world.n))',
    "padding of objects by percent": 'world.log.append("%40s" % types.SimpleNamespace(a=3) + str(world.n))',
    "padding in an f-string": 'print(f"{world.n!s:>5}|")',
    "json": "world.log.append(json.dumps({'n': world.n}))",
    "conversion": 'world.log.append(f"{str(world.n)!r}")',
    "split": 'world.log.append(f"a-{world.n}".split("-"))',
    "int": "world.log.append(int(str(world.n)) + 1)",
}
PROGRAM = """
def step(world, features, targets):
    loss = mse_step(world.model, world.optimizer, features, targets)
    EXPRESSION
    world.n += 1
    return loss
"""


def step_of(expression: str) -> Any:
    module = types.ModuleType("early_text")
    import random

    vars(module).update(mse_step=mse_step, json=json, types=types, random=random)
    exec(compile(PROGRAM.replace("EXPRESSION", expression), "early_text.py", "exec"), vars(module))
    return vars(module)["step"]


def build() -> World:
    world = small_world()()
    world.n, world.log, world.seen, world.name = 0, [], {}, ""
    return world


def trained(expression: str, capsys: pytest.CaptureFixture[str]) -> Twins:
    said: list[str] = []

    def call(world: World, step: Any, *args: Any) -> Any:
        returned = step(world, *args)
        said.append(capsys.readouterr().out)
        return returned

    twins = Twins(build, step_of(expression), call=call)
    twins.steps(6, *pair())
    assert said[::2] == said[1::2]
    return twins


@pytest.mark.parametrize("expression", FREE.values(), ids=FREE)
def test_text_of_a_counter_costs_no_capture(expression: str, capsys: pytest.CaptureFixture[str]) -> None:
    twins = trained(expression, capsys)
    assert twins.num_captures <= 2, twins.reasons


@pytest.mark.sample(4)
@pytest.mark.parametrize("expression", LOOKED_INTO.values(), ids=LOOKED_INTO)
def test_text_that_is_looked_into_is_that_of_each_call(expression: str, capsys: pytest.CaptureFixture[str]) -> None:
    trained(expression, capsys)
