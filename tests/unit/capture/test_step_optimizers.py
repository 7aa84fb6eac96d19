"""Optimizers beyond torch's own, and steps that use them in unusual ways."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.twins import Twins, World, adam, mse_step, pair, small_world
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

import wholestep

X, Y = pair()


class Hand(Optimizer):
    """Base of optimizers written by hand: one learning rate, and `update` for each parameter with a gradient."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, parameter.grad, group, self.state[parameter])

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        raise NotImplementedError


class CountingInState(Hand):
    """Keeps its step count as a Python int, and branches on whether there is state."""

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        if not state:
            state["step"], state["average"] = 0, torch.zeros_like(parameter)
        state["step"] += 1
        state["average"].mul_(0.9).add_(gradient, alpha=0.1)
        correction = 1 - 0.9 ** state["step"]
        parameter.add_(state["average"], alpha=-group["lr"] / correction)


class Rebinding(Hand):
    """Replaces its state tensors instead of writing to them."""

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        state["average"] = gradient.clone() if "average" not in state else state["average"] * 0.9 + gradient
        parameter.sub_(state["average"] * group["lr"])


class ThroughData(Hand):
    """The old way of writing to parameters."""

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        parameter.data.mul_(1 - 0.01 * group["lr"])
        parameter.data.add_(gradient.data, alpha=-group["lr"])


class ScaledByRate(Hand):
    """Uses its learning rate in every way but a branch."""

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        rate = group["lr"]
        parameter.mul_(1 - rate * 0.1).add_(
            gradient.clamp(-rate, rate) * rate**2 + gradient.sign() * (rate / (1 + rate))
        )


class Sign(Hand):
    """Lion: two uses of one momentum."""

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        direction = (state["momentum"] * 0.9 + gradient * 0.1).sign_()
        parameter.mul_(1 - group["lr"] * 0.1).add_(direction, alpha=-group["lr"])
        state["momentum"].lerp_(gradient, 0.01)


@pytest.mark.parametrize(
    ("kind", "captures"),
    [(CountingInState, 2), (Rebinding, 2), (ThroughData, 1), (ScaledByRate, 1), (Sign, 2)],
)
def test_optimizers_written_by_hand(kind: type[Hand], captures: int) -> None:
    twins = Twins(small_world(make_optimizer=kind), mse_step)
    twins.steps(5, X, Y)
    assert twins.num_captures == captures
    twins.change(lambda world: world.optimizer.param_groups[0].update(lr=0.03))
    twins.steps(2, X, Y)
    assert twins.num_captures == captures


def test_the_python_count_goes_on() -> None:
    twins = Twins(small_world(make_optimizer=CountingInState), mse_step)
    twins.steps(4, X, Y)
    counts = [entries["step"] for entries in twins.worlds[1].optimizer.state.values()]
    assert counts == [4] * 4
    assert all(type(count) is int for count in counts)


class CountingInGroup(Hand):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        for group in self.param_groups:
            group["count"] = 0

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        group["count"] += 1
        parameter.add_(gradient, alpha=-group["lr"] / group["count"])


class CountingOnSelf(Hand):
    count = 0

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        self.count += 1
        parameter.add_(gradient, alpha=-group["lr"] / self.count)


class ClippingItsRate(Hand):
    """Uses Python's own `min` and `max` of its rate and of a count."""

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        state["step"] = state.get("step", 0) + 1
        parameter.add_(gradient, alpha=-min(max(group["lr"], 1e-3), 1 / max(1, state["step"])))


class BranchingOnItsCount(Hand):
    """Warms up, by a count in its state, and stops when its rate is zero."""

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        state["step"] = state.get("step", 0) + 1
        if group["lr"] > 0:
            factor = 0.1 * state["step"] if state["step"] < 4 else 1.0
            parameter.add_(gradient, alpha=-group["lr"] * factor)


class BranchingOnATensor(Hand):
    """The same with a count that is a tensor, and a tensor that Python makes of it."""

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        if not state:
            state["step"], state["scale"] = torch.tensor(0.0), torch.tensor(1.0)
        state["step"] += 1
        count = state["step"].item()
        if count > 3:
            parameter.mul_(1 - 0.01 * count)
        state["scale"].copy_(torch.tensor(1 / (count + group["lr"])))
        parameter.add_(gradient * state["scale"], alpha=-group["lr"])


class KeepingAnEffectiveRate(Hand):
    """Leaves a number of this step in its group, which nobody reads, and a flag."""

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        group["effective"], group["is_used"] = group["lr"] * 0.5, True
        parameter.add_(gradient, alpha=-group["lr"] * 0.5)


@pytest.mark.parametrize(
    ("kind", "captures"),
    [
        (CountingInGroup, 2),
        (CountingOnSelf, 3),
        (ClippingItsRate, 3),
        (BranchingOnItsCount, 3),
        (BranchingOnATensor, 3),
        (KeepingAnEffectiveRate, 1),
    ],
)
def test_optimizers_that_count_in_python(kind: type[Hand], captures: int) -> None:
    twins = Twins(small_world(make_optimizer=kind), mse_step)
    twins.steps(8, X, Y)
    assert twins.num_captures <= captures, twins.reasons
    settled = twins.num_captures
    twins.change(lambda world: world.optimizer.param_groups[0].update(lr=0.03))
    twins.steps(3, X, Y)
    assert twins.num_captures == settled
    twins.change(lambda world: world.optimizer.param_groups[0].update(lr=0.0))
    twins.steps(2, X, Y)
    eager, compiled = (world.optimizer for world in twins.worlds)
    for one, other in zip(eager.param_groups, compiled.param_groups, strict=True):
        for key in set(one) - {"params"}:
            assert (one[key], type(one[key])) == (other[key], type(other[key])), key
    counts = [[entry.get("step") for entry in one.state.values()] for one in (eager, compiled)]
    assert counts[0] == counts[1]
    assert getattr(eager, "count", None) == getattr(compiled, "count", None)


@pytest.mark.parametrize("kind", ["RAdam", "ASGD"])
@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"weight_decay": 0.01}], ids=str)
def test_optimizers_of_torch_that_branch_on_their_count(kind: str, options: dict[str, Any]) -> None:
    given = {**options, **({"t0": 4.0} if kind == "ASGD" else {})}
    build = small_world(make_optimizer=lambda parameters: getattr(torch.optim, kind)(parameters, lr=0.01, **given))
    twins = Twins(build, mse_step)
    twins.steps(12, X, Y)
    assert twins.num_captures <= 3, twins.reasons


class Plain(Hand):
    """Keeps what is neither tensor nor number in its state, and goes by it."""

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        if not state:
            state.update(is_odd=False, name="a", pair=(0, 1.0), last=None, counts=np.zeros(1), size=np.int64(0))
        state["is_odd"] = not state["is_odd"]
        state["name"] = "b" if state["name"] == "a" else "a"
        state["pair"] = (state["pair"][0] + 1, 1.0)
        state["last"] = gradient.clone() if state["last"] is None else None
        state["counts"][0] += 1
        state["size"] = state["size"] + np.int64(1)
        factor = (
            (1 + state["is_odd"]) * (2 if state["name"] == "a" else 1) * (1 + state["pair"][0] + state["counts"][0])
        )
        parameter.add_(gradient, alpha=-0.001 * float(factor + state["size"]))


def test_anything_in_the_state_of_an_optimizer() -> None:
    twins = Twins(small_world(make_optimizer=Plain), mse_step, compare_kept=False)
    for _ in range(5):
        twins.step(X, Y)
        kept = [[{k: v for k, v in s.items() if k != "last"} for s in w.optimizer.state.values()] for w in twins.worlds]
        assert kept[0] == kept[1]
        types = [[[*map(type, s.values())] for s in one] for one in kept]
        assert types[0] == types[1]


class Subtracting(Hand):
    """A factor of a difference that is a rate, or computed from a count."""

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        state["n"] = state.get("n", 0) + 1
        parameter.sub_(gradient, alpha=group["lr"])
        parameter.copy_(torch.sub(parameter, gradient, alpha=0.1 / state["n"]))


class Telling(Hand):
    """Makes text of its rate, and keeps the rate itself."""

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        group["text"], group["kept"] = f"lr {group['lr']} {group['lr']:.3f}" + str(group["lr"]), group["lr"]
        parameter.add_(gradient, alpha=-0.01 * group["lr"])


@pytest.mark.parametrize("kind", [Subtracting, Telling])
@pytest.mark.parametrize("rate", [0.1, 1])
def test_rates_as_factors_and_texts(kind: type[Hand], rate: float) -> None:
    twins = Twins(small_world(make_optimizer=partial(kind, lr=rate)), mse_step)
    twins.steps(2, X, Y)
    for value in (0.5, 2, 3.0):
        twins.change(lambda world, value=value: world.optimizer.param_groups[0].update(lr=value))
        twins.steps(2, X, Y)
    groups = [world.optimizer.param_groups[0] for world in twins.worlds]
    for key in set(groups[0]) - {"params"}:
        eager, compiled = (group[key] for group in groups)
        assert (eager, type(eager)) == (compiled, type(compiled))


@pytest.mark.parametrize("rate", [None, "auto", [0.1]])
def test_rates_that_are_no_numbers(rate: Any) -> None:
    class Fixed(Hand):
        def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
            parameter.add_(gradient, alpha=-0.1 if group["lr"] is None else -0.2)

    twins = Twins(small_world(make_optimizer=partial(Fixed, lr=rate)), mse_step)
    twins.steps(2, X, Y)
    twins.change(lambda world: world.optimizer.param_groups[0].update(lr=None if rate else 0.1))
    twins.steps(2, X, Y)


def test_state_of_no_parameter_is_refused() -> None:
    class Shared(Hand):
        def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
            self.state["all"]["n"] = 1  # pyright: ignore[reportArgumentType]

    world = small_world(make_optimizer=Shared)()
    with pytest.raises(wholestep.CaptureError, match="an entry that belongs to none of its parameters"):
        wholestep.compile(mse_step)(world.model, world.optimizer, X, Y)
    assert not world.optimizer.state
    assert next(world.model.parameters()) is world.optimizer.param_groups[0]["params"][0]


class Slow(Optimizer):
    """Wraps another optimizer and shares its groups, in which it counts; every third step it looks back."""

    def __init__(self, base: Optimizer) -> None:
        self.base = base
        super().__init__(base.param_groups, {})
        self.param_groups = base.param_groups
        for group in self.param_groups:
            group["slow_step"] = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.base.step()
        for group in self.base.param_groups:
            group["slow_step"] += 1
            if group["slow_step"] % 3 == 0:
                for parameter in group["params"]:
                    state = self.base.state[parameter]
                    if "slow" not in state:
                        state["slow"] = torch.zeros_like(parameter)
                    state["slow"].lerp_(parameter, 0.5)
                    parameter.copy_(state["slow"])


def test_an_optimizer_that_counts_in_groups_it_shares() -> None:
    build = small_world(make_optimizer=lambda parameters: Slow(Adam(parameters, lr=0.01)))
    twins = Twins(build, mse_step)
    twins.steps(12, X, Y)
    assert twins.num_captures <= 6, twins.reasons
    assert [world.optimizer.param_groups[0]["slow_step"] for world in twins.worlds] == [12, 12]


class Warming(Hand):
    """Sets its own learning rate."""

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        group["lr"] = group["lr"] * 0.5
        parameter.add_(gradient, alpha=-group["lr"])


def test_an_optimizer_that_sets_its_rate() -> None:
    """Of its own group, and by way of one that shares it."""
    for make in (Warming, lambda parameters: Slow(Warming(parameters))):
        twins = Twins(small_world(make_optimizer=make), mse_step)
        twins.steps(7, X, Y)
        assert twins.num_captures <= 5, twins.reasons


class EqualState(Hand):
    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        if not state:
            state["first"], state["second"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        state["first"].add_(gradient)
        state["second"].add_(gradient)
        parameter.sub_(state["first"] * state["second"] * group["lr"])


def test_two_state_tensors_that_start_equal() -> None:
    twins = Twins(small_world(make_optimizer=EqualState), mse_step)
    twins.steps(3, X, Y)


class WithoutRate(Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"scale": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad * group["scale"])


def test_an_optimizer_without_a_learning_rate() -> None:
    Twins(small_world(make_optimizer=WithoutRate), mse_step).steps(3, X, Y)


class AssigningData(Hand):
    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        parameter.data = parameter.data - group["lr"] * gradient


def test_assigning_to_data() -> None:
    twins = Twins(small_world(make_optimizer=AssigningData), mse_step)
    twins.steps(3, X, Y)
    assert twins.num_captures == 1


def test_data_updates_without_an_optimizer() -> None:
    def step(model: nn.Module, features: Tensor, targets: Tensor) -> Tensor:
        model.zero_grad()
        loss = F.mse_loss(model(features), targets)
        loss.backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.data.mul_(0.99)
            parameter.data -= 0.1 * parameter.grad
        return loss

    twins = Twins(small_world(), step, call=lambda world, step, *args: step(world.model, *args))
    twins.steps(3, X, Y)
    assert twins.num_captures == 1


def test_updates_of_gradients_without_backward() -> None:
    def step(model: nn.Module, features: Tensor, targets: Tensor) -> Tensor:
        loss = F.mse_loss(model(features), targets)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= 0.1 * gradient
        return loss

    twins = Twins(small_world(), step, call=lambda world, step, *args: step(world.model, *args))
    twins.steps(3, X, Y)
    assert twins.num_captures == 1


@pytest.mark.parametrize("options", [{}, {"nesterov": False, "weight_decay": 0.1}, {"foreach": True}])
def test_sgd_with_dampening_starts_differently(options: dict[str, Any]) -> None:
    make_optimizer = partial(SGD, lr=0.1, momentum=0.9, dampening=0.5, **options)
    twins = Twins(small_world(make_optimizer=make_optimizer), mse_step)
    twins.steps(5, X, Y)
    assert twins.num_captures == 2
    assert twins.reasons == ("the state of optimizer has other entries than before",)


TORCH: dict[str, Callable[..., Optimizer]] = {
    "adadelta": partial(torch.optim.Adadelta, lr=0.1),
    "adadelta_foreach": partial(torch.optim.Adadelta, lr=0.1, foreach=True),
    "adamax": partial(torch.optim.Adamax, lr=0.01),
    "adamax_foreach": partial(torch.optim.Adamax, lr=0.01, foreach=True),
    "rprop": partial(torch.optim.Rprop, lr=0.01),
    "nadam_foreach": partial(torch.optim.NAdam, lr=0.01, foreach=True),
    "nadam_decoupled": partial(torch.optim.NAdam, lr=0.01, decoupled_weight_decay=True, weight_decay=0.1),
    "rmsprop_centered": partial(torch.optim.RMSprop, lr=0.01, centered=True, weight_decay=0.1),
    "adagrad_foreach": partial(torch.optim.Adagrad, lr=0.01, lr_decay=0.1, foreach=True),
    "adam_amsgrad_foreach": partial(Adam, lr=0.01, amsgrad=True, foreach=True, maximize=True),
    "sgd_maximize_fused": partial(SGD, lr=0.01, momentum=0.9, nesterov=True, maximize=True, fused=True),
    "adamw_no_decay": partial(AdamW, lr=0.01, weight_decay=0.0),
    "adafactor": partial(torch.optim.Adafactor, lr=0.01),
}


@pytest.mark.parametrize("name", TORCH)
def test_more_of_torchs_optimizers(name: str) -> None:
    twins = Twins(small_world(make_optimizer=TORCH[name]), mse_step)
    twins.steps(4, X, Y)
    assert twins.num_captures == 1


@pytest.mark.parametrize("fused", [False, True])
def test_an_optimizer_step_twice_in_one_step(fused: bool) -> None:
    def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Any:
        return [mse_step(model, optimizer, part, wanted) for part, wanted in zip(features.chunk(2), targets.chunk(2))]

    twins = Twins(small_world(make_optimizer=partial(AdamW, lr=0.01, fused=fused)), step)
    twins.steps(3, X, Y)
    assert twins.num_captures == 1


def test_an_optimizer_step_with_a_closure() -> None:
    def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Any:
        def closure() -> float:
            optimizer.zero_grad()
            loss = F.mse_loss(model(features), targets)
            loss.backward()
            return loss  # pyright: ignore[reportReturnType]

        return optimizer.step(closure)

    Twins(small_world(), step).steps(3, X, Y)


def test_optimizer_hooks_that_change_gradients() -> None:
    def build() -> World:
        world = small_world()()

        def halve(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad.mul_(0.5)

        world.optimizer.register_step_pre_hook(halve)
        return world

    Twins(build, mse_step).steps(3, X, Y)


def test_state_made_under_another_default_is_refused() -> None:
    """It is made beforehand, under the defaults of the call."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, features: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(features).square().mean()
        loss.backward()
        with torch.device("meta"):
            optimizer.step()
        return loss

    world = small_world(make_optimizer=adam)()
    with pytest.raises(
        wholestep.CaptureError, match=r"Adam.step\(\) runs under a default dtype or device that the step itself"
    ):
        wholestep.compile(step)(world.model, world.optimizer, pair()[0])
