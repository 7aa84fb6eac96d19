"""What steps read and write through `super()`, partials and caches, also with numbers that have changed before."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.twins import Twins, World, pair, small_world
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

X, Y = pair()


def scaled(world: World, compute: Callable[[], Any]) -> Callable[..., Tensor]:
    """A step whose loss is scaled by what `compute` says."""

    def step() -> Tensor:
        world.optimizer.zero_grad()
        loss = (world.model(X) - Y).square().mean() * compute()
        loss.backward()
        world.optimizer.step()
        return loss

    return step


def twins_of(make: Callable[[World], Callable[[], Any]]) -> Twins:
    return Twins(small_world(), make=lambda world: scaled(world, make(world)), call=lambda _, step: step())


def family(world: World) -> tuple[Any, Any]:
    """A class and one derived from it, which are this world's own."""

    class Base:
        factor = 1.0
        factors = [1.0]  # noqa: RUF012
        stats = {"n": 0}  # noqa: RUF012
        history: list[Tensor] = []  # noqa: RUF012
        kept = property(lambda self: self.inner)

        def __init__(self) -> None:
            self.inner = 1.0

        def weight(self) -> float:
            return 2.0

        @classmethod
        def made(cls) -> float:
            return cls.factor

    class Derived(Base):
        factor = 5.0
        factors = [7.0]  # noqa: RUF012

        def number(self) -> float:
            return super().factor

        def by_arguments(self) -> float:
            return super(Derived, self).factor  # noqa: UP008

        def items(self) -> float:
            return sum(super().factors)

        def called(self) -> float:
            return super().weight()

        def of_class(self) -> float:
            return super().made()

        def by_property(self) -> float:
            return super().kept

        def counted(self) -> float:
            super().stats["n"] += 1
            return 1.0

        def collected(self) -> float:
            super().history.append(world.model(X).detach().sum())
            return 1.0

    return Base, Derived


CHANGES: dict[str, Callable[[Any, Any], Any]] = {
    "number": lambda base, _: setattr(base, "factor", base.factor + 1),
    "by_arguments": lambda base, _: setattr(base, "factor", base.factor + 1),
    "items": lambda base, _: base.factors.append(2.0),
    "called": lambda base, _: setattr(base, "weight", lambda self: 3.0),
    "of_class": lambda _, one: setattr(type(one), "factor", type(one).factor + 1),
    "by_property": lambda _, one: setattr(one, "inner", one.inner + 1),
    "counted": lambda base, _: None,
    "collected": lambda base, _: None,
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_super_finds(name: str) -> None:
    def make(world: World) -> Callable[[], Any]:
        world.base, derived = family(world)
        world.one = derived()
        return getattr(world.one, name)

    twins = twins_of(make)
    for _ in range(4):
        twins.step()
        twins.change(lambda world: CHANGES[name](world.base, world.one))
    eager, compiled = (world.base for world in twins.worlds)
    assert eager.stats == compiled.stats
    assert [*map(float, eager.history)] == [*map(float, compiled.history)]
    assert {type(value) for value in compiled.history} <= {Tensor}


class Meter:
    """Counts what it is told, and returns it with a gain."""

    def __init__(self) -> None:
        self.n, self.total, self.gain, self.value = 0, 0.0, 1.0, 1.0
        self.told = functools.partial(self.update, "loss")

    def update(self, _: str, value: float) -> float:
        self.n += 1
        self.total += value
        return value * self.gain

    def __call__(self, value: float) -> float:
        return self.update("loss", value)


@pytest.mark.parametrize("way", ["told", "__call__"])
def test_objects_that_are_called_with_a_changing_number(way: str) -> None:
    def make(world: World) -> Callable[[], Any]:
        world.meter = meter = Meter()
        return lambda: (meter.told if way == "told" else meter)(meter.value)

    twins = twins_of(make)
    for number in range(6):
        twins.change(lambda world, number=number: vars(world.meter).update(value=1.0 + number, gain=1.0 + number // 3))
        twins.step()
    eager, compiled = (world.meter for world in twins.worlds)
    assert (eager.n, eager.total) == (compiled.n, compiled.total) == (6, 21.0)


class Cached:
    """Functions with a cache that take a changing number, or read one."""

    def __init__(self) -> None:
        self.value = 1.0
        self.full = functools.cache(lambda size, value: torch.full((size,), value).sum())
        self.scaled = functools.cache(lambda size: self.value * size)


@pytest.mark.parametrize("name", ["full", "scaled"])
def test_caches_that_meet_a_changing_number(name: str) -> None:
    caches: list[Cached] = []

    def make(_: World) -> Callable[[], Any]:
        caches.append(cached := Cached())
        return lambda: cached.full(3, cached.value) if name == "full" else cached.scaled(3)

    twins = twins_of(make)
    for value in (1.0, 2.0, 3.0, 3.0, 2.0, 4.0):
        for cached in caches:
            cached.value = value
        twins.step()
    for value in (1.0, 2.0, 3.0):
        eager, compiled = (one.full(3, value) if name == "full" else one.scaled(3) for one in caches)
        assert type(eager) is type(compiled)
        assert eager == compiled


class Fitted(nn.Module):
    """A module that holds its own optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 2)
        self.optimizer = AdamW(self.net.parameters(), lr=0.01)

    def fit(self, features: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.net(features).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss


def test_a_method_of_a_module_that_holds_its_optimizer() -> None:
    def build() -> World:
        model = Fitted()
        return World(model=model, optimizer=model.optimizer)

    features = torch.randn(3, 4)
    twins = Twins(build, make=lambda world: world.model.fit, call=lambda _, step, *args: step(*args))
    twins.steps(3, features)
    assert twins.num_captures == 1


class KeepingObjects(Optimizer):
    """Keeps lists, dicts and numbers of its own in its state."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["info"] = {"n": 0, "average": torch.zeros_like(parameter)}
                    state["window"], state["name"] = [torch.zeros_like(parameter)], "first"
                state["info"]["n"] += 1
                state["info"]["average"].mul_(0.9).add_(parameter.grad)
                state["window"][0].lerp_(parameter.grad, 0.1)
                state["rates"] = [group["lr"]]
                parameter.add_(state["info"]["average"] + state["window"][0], alpha=-group["lr"] / state["info"]["n"])


@pytest.mark.parametrize("is_warm", [False, True])
def test_objects_in_the_state_of_an_optimizer(is_warm: bool) -> None:
    def build() -> World:
        world = small_world(make_optimizer=KeepingObjects)()
        if is_warm:
            scaled(world, lambda: 1.0)()
        return world

    def look(world: World) -> list[Any]:
        states = world.optimizer.state.values()
        return [
            (s["info"]["n"], s["rates"], s["name"], {key: type(s[key]) for key in s}, s["info"]["average"].tolist())
            for s in states
        ]

    twins = Twins(build, make=lambda world: scaled(world, lambda: 1.0), call=lambda _, step: step())
    for number in range(5):
        twins.step()
        eager, compiled = map(look, twins.worlds)
        assert eager == compiled
        twins.change(lambda world, number=number: world.optimizer.param_groups[0].update(lr=0.1 / (1 + number)))
    assert twins.num_captures <= 4
