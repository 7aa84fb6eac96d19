"""What a step prints, logs and warns of is said at every call, with that call's values."""

import logging
import sys
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from tests.twins import mse_step, pair, small_world
from torch import Tensor, nn
from torch.optim import Optimizer

import wholestep

X, Y = pair()
LOGGER = logging.getLogger("world")


class Bar:
    """A progress bar: counts, and draws itself over its own line."""

    def __init__(self, total: int) -> None:
        self.n, self.total, self.note = 0, total, ""

    def set_postfix(self, **items: Any) -> None:
        self.note = ", ".join(f"{name}={item}" for name, item in items.items())

    def update(self, by: int = 1) -> None:
        self.n += by
        sys.stderr.write(f"\r{self.n}/{self.total} [{'#' * self.n}] {self.note}")
        sys.stderr.flush()


def speak_number(state: Any, size: int) -> None:
    state.n += 1
    print(f"step {state.n}: {size} rows", state.name)


def log_number(state: Any, size: int) -> None:
    state.n += 1
    LOGGER.warning("step %d of %s", state.n, state.name)


def draw_bar(state: Any, size: int) -> None:
    state.bar.set_postfix(size=size, name=state.name)
    state.bar.update()


def warn(state: Any, size: int) -> None:
    state.n += 1
    warnings.warn(f"step {state.n}", stacklevel=1)


def write_to_a_file_like(state: Any, size: int) -> None:
    print("rows:", size, file=sys.stderr)


SPEAKERS: dict[str, Callable[[Any, int], None]] = {
    "print": speak_number,
    "logging": log_number,
    "a progress bar": draw_bar,
    "a file": write_to_a_file_like,
}


def run(speak: Callable[[Any, int], None], compile: Callable[..., Any]) -> Any:
    """Four steps, between which a name changes and the batch becomes smaller; returns the step."""
    world = small_world()()
    state = SimpleNamespace(n=0, name="warmup", bar=Bar(4))

    def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
        loss = mse_step(model, optimizer, features, targets)
        speak(state, features.shape[0])
        return loss

    compiled = compile(step)
    for size in (6, 6, 4, 6):
        compiled(world.model, world.optimizer, X[:size], Y[:size])
        state.name = "training"
    return compiled


@pytest.mark.parametrize("kind", SPEAKERS)
def test_it_is_said_at_every_call(
    kind: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    said: list[Any] = []
    for compile in (lambda step: step, wholestep.compile):
        caplog.clear()
        run(SPEAKERS[kind], compile)
        printed = capsys.readouterr()
        logged = [record.getMessage() for record in caplog.records if record.name == "world"]
        said.append((printed.out, printed.err, logged))
    assert said[0] == said[1]
    assert any(said[0])


def test_warnings() -> None:
    said: list[list[str]] = []
    for compile in (lambda step: step, wholestep.compile):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            run(warn, compile)
        said.append([str(each.message) for each in seen])
    assert said[0] == said[1] == ["step 1", "step 2", "step 3", "step 4"]
