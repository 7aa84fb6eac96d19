"""Models and optimizers that a step only gets to through other functions: an engine that calls an update function."""

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.twins import SmallNet, Twins, World, adam, momentum, pair
from torch import Tensor, nn

import wholestep
from wholestep import CaptureError

X, Y = pair()


class Engine:
    """An update function, found nowhere but in here, and handlers that are called after it."""

    def __init__(self, update: Callable[[Any, Any], Any]) -> None:
        self._update, self.state = update, SimpleNamespace(iteration=0, output=None)
        self.handlers: list[Callable[[Any], Any]] = []

    def run(self, batch: Any) -> Any:
        self.state.iteration += 1
        self.state.output = self._update(self, batch)
        for handler in self.handlers:
            handler(self)
        return self.state.output


def called(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)


def uncalled(model: Any, x: Tensor) -> Tensor:
    return F.linear(torch.tanh(F.linear(x, model.first.weight, model.first.bias)), model.second.weight)


def averaged(model: nn.Module, x: Tensor) -> Tensor:
    return model(x) + sum(p.mean() for p in itertools.islice(model.parameters(), 1))


def engine_world(forward: Callable[[Any, Tensor], Tensor], is_cleared_first: bool, make_optimizer: Any) -> World:
    model = SmallNet()
    head = nn.Parameter(torch.ones(3))
    optimizer, other = make_optimizer(model.parameters()), torch.optim.SGD([head], lr=0.1)

    def update(engine: Any, batch: Any) -> Any:
        x, y = batch
        if is_cleared_first:
            optimizer.zero_grad()
            other.zero_grad()
        loss = F.mse_loss(forward(model, x), y)
        if not is_cleared_first:
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if is_cleared_first:
            head.grad = loss.detach() * torch.ones(3)
            other.step()
        return loss.item()

    world = World(model=model, optimizer=optimizer, other=other, engine=Engine(update))
    world.engine.handlers.append(lambda engine: setattr(engine.state, "last", engine.state.output))
    return world


@pytest.mark.parametrize("make_optimizer", [momentum, adam])
@pytest.mark.parametrize("is_cleared_first", [False, True])
@pytest.mark.parametrize("forward", [called, uncalled, averaged])
def test_an_update_function_of_an_engine(forward: Any, is_cleared_first: bool, make_optimizer: Any) -> None:
    twins = Twins(
        lambda: engine_world(forward, is_cleared_first, make_optimizer),
        lambda engine, *batch: engine.run(batch),
        call=lambda world, step, *batch: step(world.engine, *batch),
    )
    twins.steps(4, X, Y)
    assert twins.num_captures <= 2
    assert not twins.compiled.num_eager_calls


def test_parameters_in_a_dict_and_no_model() -> None:
    def step(params: dict[str, Tensor], optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(torch.tanh(x @ params["first"]) @ params["second"], y)
        loss.backward()
        optimizer.step()
        return loss

    def build() -> World:
        params = {"first": torch.randn(4, 5, requires_grad=True), "second": torch.randn(5, 3, requires_grad=True)}
        return World(params=params, optimizer=adam(params.values()))

    twins = Twins(build, step, call=lambda world, step, *args: step(world.params, world.optimizer, *args))
    twins.steps(4, X, Y)
    assert twins.num_captures == 1


def test_a_wrapped_model_that_is_met() -> None:
    def build() -> World:
        model = SmallNet()
        wrapped, optimizer = nn.DataParallel(model), adam(model.parameters())

        def update(engine: Any, batch: Any) -> Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(wrapped(batch[0]), batch[1])
            loss.backward()
            optimizer.step()
            return loss

        return World(model=model, optimizer=optimizer, engine=Engine(update))

    world = build()
    step = wholestep.compile(lambda engine, *batch: engine.run(batch))
    with pytest.raises(CaptureError, match=r"wrapped in DataParallel.*Pass the plain module"):
        step(world.engine, X, Y)
    assert world.engine.state.iteration == 0
