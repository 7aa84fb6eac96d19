"""Optimizers inside optimizers: their state is found where it is, or the step is refused (S6)."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.twins import SmallNet, Twins, World, mse_step, pair
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

import wholestep

X, Y = pair()


class Copying(Optimizer):
    """As Lightning Fabric does: the attributes of the other one are copied, its state and groups shared."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.__dict__ = {k: v for k, v in vars(optimizer).items() if k not in ("state_dict", "step")}
        self._optimizer = optimizer

    def step(self, closure: Any = None) -> Any:
        return self._optimizer.step(closure)


class Delegating(Optimizer):
    """As Accelerate does: properties that ask the other one."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: Any) -> None:
        self.optimizer.param_groups = groups

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)


class Both(Optimizer):
    """Two optimizers as one, with the groups of both."""

    def __init__(self, *optimizers: Optimizer) -> None:
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        super().__init__(groups, {})
        self.optimizers = optimizers
        self.param_groups = groups

    def step(self, closure: Any = None) -> None:
        for optimizer in self.optimizers:
            optimizer.step(closure)


class Averaging(Optimizer):
    """Shares the groups of another one, and keeps an average of the parameters in a state of its own."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer.param_groups, {})
        self.base = optimizer
        self.param_groups = optimizer.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.base.step()
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                average = state.get("average", torch.zeros_like(parameter))
                state["average"] = average.lerp(parameter, 0.1)


def build(wrap: Callable[[nn.Module], Optimizer]) -> Callable[[], World]:
    def make() -> World:
        model = SmallNet()
        optimizer = wrap(model)
        inner: Any = getattr(optimizer, "_optimizer", None) or getattr(optimizer, "optimizer", optimizer)
        return World(model=model, optimizer=optimizer, inner=inner)

    return make


WRAPPERS: dict[str, Callable[[Any], Optimizer]] = {
    "copying": lambda model: Copying(AdamW(model.parameters(), lr=0.01)),
    "delegating": lambda model: Delegating(AdamW(model.parameters(), lr=0.01)),
    "twice": lambda model: Delegating(Copying(AdamW(model.parameters(), lr=0.01))),
    "both": lambda model: Both(
        AdamW(model.first.parameters(), lr=0.01), SGD(model.second.parameters(), lr=0.1, momentum=0.9)
    ),
    "averaging": lambda model: Averaging(SGD(model.parameters(), lr=0.1, momentum=0.9)),
}


@pytest.mark.parametrize(("name", "verify"), [*((name, 0) for name in WRAPPERS), ("copying", 2)])
def test_state_is_found_through_the_wrapper(name: str, verify: int) -> None:
    twins = Twins(build(WRAPPERS[name]), mse_step, verify=verify)
    for seed in range(4):
        twins.step(*pair(seed=seed))
    assert twins.num_captures <= 2, twins.reasons
    optimizers = [twins.worlds[1].inner, *getattr(twins.worlds[1].optimizer, "optimizers", ())]
    for optimizer in optimizers:
        for entries in optimizer.state.values():
            assert all(type(value) is torch.Tensor for value in entries.values())


def test_learning_rates_of_a_wrapped_optimizer_are_inputs() -> None:
    twins = Twins(build(WRAPPERS["copying"]), mse_step)
    for rate in (0.1, 0.01, 0.001):
        twins.change(lambda world, rate=rate: world.optimizer.param_groups[0].update(lr=rate))
        twins.step(X, Y)
    assert twins.num_captures == 1, twins.reasons


class Hiding:
    """Hides an optimizer where nobody looks."""

    __slots__ = ("_hidden",)

    def __init__(self, optimizer: Optimizer) -> None:
        self._hidden = {0: [[[[[[optimizer]]]]]]}

    def zero_grad(self) -> None:
        self._hidden[0][0][0][0][0][0][0].zero_grad()

    def step(self) -> None:
        self._hidden[0][0][0][0][0][0][0].step()


def hidden_world() -> World:
    model = SmallNet()
    optimizer = AdamW(model.parameters(), lr=0.01)
    return World(model=model, optimizer=optimizer, hiding=Hiding(optimizer))


def test_an_optimizer_that_is_hidden_is_found_when_it_steps() -> None:
    twins = Twins(hidden_world, mse_step, call=lambda world, step, *args: step(world.model, world.hiding, *args))
    twins.steps(3, X, Y)
    assert twins.num_captures == 1, twins.reasons

    def hide_another(world: World) -> None:
        world.optimizer = AdamW(world.model.parameters(), lr=0.05)
        world.hiding._hidden[0][0][0][0][0][0][0] = world.optimizer

    twins.change(hide_another)
    twins.steps(2, X, Y)


def test_an_optimizer_that_the_step_makes_is_refused() -> None:
    def step(model: nn.Module, features: torch.Tensor, targets: torch.Tensor) -> None:
        mse_step(model, AdamW(model.parameters()), features, targets)

    with pytest.raises(wholestep.CaptureError, match=r"AdamW that it has made itself, .* \(model, features, targets\)"):
        wholestep.compile(step)(SmallNet(), X, Y)
