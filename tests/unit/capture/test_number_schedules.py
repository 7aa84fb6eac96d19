"""Numbers that change at every step become inputs: a schedule costs two or three captures, not one for each step."""

import copy
import math
from collections.abc import Callable, Iterable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.twins import Twins, World, mse_step, pair, small_world
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import CyclicLR, OneCycleLR

X, Y = pair()
STEPS = 50
MAX_CAPTURES = 3


def set_option(**options: Any) -> Callable[[World], None]:
    return lambda world: world.optimizer.param_groups[0].update(options)


def run(twins: Twins, change: Callable[[int], Callable[[World], Any]], *batch: Any) -> None:
    """Fifty steps, each after a change."""
    for number in range(STEPS):
        twins.change(change(number))
        twins.step(*(batch or (X, Y)))
    assert twins.num_captures <= MAX_CAPTURES


OPTIONS: dict[str, tuple[Callable[..., Optimizer], Callable[[int], dict[str, Any]]]] = {
    "momentum": (partial(SGD, lr=0.01, momentum=0.9), lambda n: {"momentum": 0.85 + 0.002 * n}),
    "momentum, fused": (partial(SGD, lr=0.01, momentum=0.9, fused=True), lambda n: {"momentum": 0.85 + 0.002 * n}),
    "betas": (partial(Adam, lr=0.01), lambda n: {"betas": (0.85 + 0.002 * n, 0.999)}),
    "both betas": (partial(Adam, lr=0.01, foreach=True), lambda n: {"betas": (0.8 + 0.002 * n, 0.95 + 0.0009 * n)}),
    "betas, fused": (partial(Adam, lr=0.01, fused=True), lambda n: {"betas": (0.85 + 0.002 * n, 0.999)}),
    "weight decay": (partial(AdamW, lr=0.01), lambda n: {"weight_decay": 0.01 * (n + 1)}),
    "weight decay, fused": (partial(AdamW, lr=0.01, fused=True), lambda n: {"weight_decay": 0.01 * (n + 1)}),
    "weight decay and rate": (partial(SGD, lr=0.01), lambda n: {"weight_decay": 0.001 * n, "lr": 0.01 / (n + 1)}),
    "eps": (partial(Adam, lr=0.01), lambda n: {"eps": 1e-8 * (n + 1)}),
}


BY_DEFAULT = ("momentum", "betas", "weight decay, fused")


def slow_unless(kinds: Iterable[str], default: Iterable[str]) -> list[Any]:
    return [kind if kind in default else pytest.param(kind, marks=pytest.mark.slow) for kind in kinds]


def test_an_option_after_torch_compile_has_wrapped_the_methods_of_optimizers() -> None:
    torch.compile(nn.Linear(3, 3), backend="eager")(torch.ones(2, 3))
    twins = Twins(small_world(make_optimizer=partial(SGD, lr=0.01, momentum=0.9)), mse_step, compare_kept=False)
    run(twins, lambda number: set_option(momentum=0.85 + 0.002 * number))


@pytest.mark.parametrize("kind", slow_unless(OPTIONS, BY_DEFAULT))
def test_an_option_of_the_optimizer(kind: str) -> None:
    make_optimizer, options = OPTIONS[kind]
    twins = Twins(small_world(make_optimizer=make_optimizer), mse_step, compare_kept=False)
    run(twins, lambda number: set_option(**options(number)))


ONE_CYCLE = partial(OneCycleLR, max_lr=0.1, total_steps=STEPS + 2)
CYCLES: dict[str, tuple[Callable[..., Optimizer], Callable[[Optimizer], Any]]] = {
    "one cycle, momentum": (
        partial(SGD, lr=0.01, momentum=0.9),
        partial(OneCycleLR, max_lr=0.1, total_steps=STEPS + 2),
    ),
    "one cycle, betas": (partial(Adam, lr=0.01), ONE_CYCLE),
    "cyclic": (
        partial(SGD, lr=0.01, momentum=0.9),
        partial(CyclicLR, base_lr=0.001, max_lr=0.1, step_size_up=7),
    ),
}


@pytest.mark.parametrize("kind", slow_unless(CYCLES, ["one cycle, momentum", "one cycle, betas"]))
def test_a_scheduler_that_cycles_the_momentum(kind: str) -> None:
    make_optimizer, make_scheduler = CYCLES[kind]

    def build() -> World:
        world = small_world(make_optimizer=make_optimizer)()
        world.scheduler = make_scheduler(world.optimizer)
        return world

    twins = Twins(build, mse_step, compare_kept=False)
    for _ in range(STEPS):
        twins.step(X, Y)
        twins.change(lambda world: world.scheduler.step())
    assert twins.num_captures <= MAX_CAPTURES


def with_average() -> World:
    world = small_world()()
    world.average = copy.deepcopy(world.model)
    world.settings = SimpleNamespace(decay=0.0, epoch=0, temperature=1.0)
    return world


@pytest.mark.parametrize("form", slow_unless(["lerp", "alpha", "arithmetic"], ["arithmetic"]))
def test_an_average_with_a_changing_decay(form: str) -> None:
    def update(decay: float, kept: list[Tensor], new: list[Tensor]) -> None:
        for old, value in zip(kept, new):
            if form == "lerp":
                old.lerp_(value, 1 - decay)
            elif form == "alpha":
                old.mul_(decay).add_(value, alpha=1 - decay)
            else:
                old.copy_(decay * old + (1 - decay) * value)

    def make(world: World) -> Callable[..., Tensor]:
        average, settings = world.average, world.settings

        def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
            loss = mse_step(model, optimizer, features, targets)
            with torch.no_grad():
                update(settings.decay, list(average.parameters()), list(model.parameters()))
            return loss

        return step

    twins = Twins(with_average, make=make, compare_kept=False)
    run(twins, lambda number: lambda world: setattr(world.settings, "decay", min(0.999, (1 + number) / (10 + number))))


# An epoch that the step reads


def by_epoch(epoch: Any, loss: Tensor) -> Tensor:
    """A weight that decays, and one that warms up: no branch."""
    return loss * 0.97**epoch + loss.square() * epoch / STEPS


def epoch_step(model: nn.Module, optimizer: Optimizer, epoch: int) -> Tensor:
    optimizer.zero_grad()
    loss = by_epoch(epoch, F.mse_loss(model(X), Y))
    loss.backward()
    optimizer.step()
    return loss


@pytest.mark.parametrize("kind", [int, pytest.param(float, marks=pytest.mark.slow)])
def test_an_epoch_as_an_argument(kind: type) -> None:
    twins = Twins(small_world(), epoch_step, compare_kept=False)
    for epoch in range(STEPS):
        twins.step(kind(epoch))
    assert twins.num_captures <= MAX_CAPTURES


@pytest.mark.slow
def test_an_epoch_as_a_keyword() -> None:
    def call(world: World, step: Callable[..., Any], epoch: int) -> Any:
        return step(world.model, world.optimizer, epoch=epoch)

    twins = Twins(small_world(), epoch_step, call=call, compare_kept=False)
    for epoch in range(STEPS):
        twins.step(epoch)
    assert twins.num_captures <= MAX_CAPTURES


def test_an_epoch_in_an_attribute() -> None:
    def make(world: World) -> Callable[..., Tensor]:
        settings = world.settings
        return lambda model, optimizer, *_: epoch_step(model, optimizer, settings.epoch)

    twins = Twins(with_average, make=make, compare_kept=False)
    run(twins, lambda number: lambda world: setattr(world.settings, "epoch", number))


EPOCH = 0


def step_with_global(model: nn.Module, optimizer: Optimizer) -> Tensor:
    return epoch_step(model, optimizer, EPOCH)


def test_an_epoch_in_a_global(monkeypatch: pytest.MonkeyPatch) -> None:
    twins = Twins(small_world(), step_with_global, compare_kept=False)
    for epoch in range(STEPS):
        monkeypatch.setitem(globals(), "EPOCH", epoch)
        twins.step()
    assert twins.num_captures <= MAX_CAPTURES


class Scheduled(nn.Module):
    """A forward that reads a number of its own module."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.temperature = 1.0

    def forward(self, features: Tensor) -> Tensor:
        return self.linear(features) / self.temperature


def test_a_temperature_of_the_model() -> None:
    twins = Twins(small_world(Scheduled), mse_step, compare_kept=False)
    run(twins, lambda number: lambda world: setattr(world.model, "temperature", 1.0 + math.cos(number) / 2))


def test_a_dropout_rate_that_grows() -> None:
    class Dropped(Scheduled):
        def forward(self, features: Tensor) -> Tensor:
            return F.dropout(self.linear(features), p=self.temperature, training=self.training)

    # Torch's dropout takes a plain number: each rate is a capture of its own.
    twins = Twins(small_world(Dropped), mse_step, compare_kept=False)
    for number in range(4):
        twins.change(lambda world, rate=0.1 + number / 10: setattr(world.model, "temperature", rate))
        twins.step(X, Y)
    assert twins.num_captures == 4


@pytest.mark.slow
def test_several_numbers_at_once() -> None:
    def make(world: World) -> Callable[..., Tensor]:
        settings = world.settings

        def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(features) / settings.temperature, targets)
            loss = loss + settings.decay * sum(p.square().sum() for p in model.parameters())
            loss.backward()
            optimizer.step()
            return loss * (1 + settings.epoch)

        return step

    def change(number: int) -> Callable[[World], Any]:
        return lambda world: vars(world.settings).update(temperature=1 + number / 9, decay=number / 999, epoch=number)

    run(Twins(with_average, make=make, compare_kept=False), change)


def test_a_counter_for_the_log() -> None:
    def make(world: World) -> Callable[..., Any]:
        state = world.state = SimpleNamespace(n=0, lines=[])

        def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Any:
            state.n += 1
            state.lines.append(("step", state.n))
            return mse_step(model, optimizer, features, targets), state.n

        return step

    twins = Twins(small_world(), make=make, compare_kept=False)
    run(twins, lambda number: lambda world: None)
    assert twins.worlds[1].state.n == STEPS


def test_a_counter_that_decides_every_tenth_step() -> None:
    """`if n % 10 == 0` is a branch with two sides."""

    def make(world: World) -> Callable[..., Any]:
        state = world.state = SimpleNamespace(n=0, kept=None)

        def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
            loss = mse_step(model, optimizer, features, targets)
            state.n += 1
            if state.n % 10 == 0:
                state.kept = loss.detach()
            return loss

        return step

    run(Twins(small_world(), make=make, compare_kept=False), lambda number: lambda world: None)


def test_a_number_with_three_values_in_turn() -> None:
    """What comes back is not captured again."""
    twins = Twins(small_world(), epoch_step, compare_kept=False)
    for number in range(12):
        twins.step(number % 3)
    assert twins.num_captures <= MAX_CAPTURES
    captured = twins.num_captures
    for number in range(6):
        twins.step(number % 3)
    assert twins.num_captures == captured
