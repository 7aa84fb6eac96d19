"""Numbers that Python takes out of the step's tensors and gives back to torch, which computes with each call's."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.twins import Twins, World, adam, pair, small_world
from torch import Tensor, nn
from torch.optim import Optimizer

import wholestep
from wholestep import CaptureError

Step = Callable[..., Any]
Make = Callable[[Any, Any, Tensor], Tensor]


def trained(step: Step, captures: int = 1, build: Callable[[], World] | None = None, **options: Any) -> Twins:
    twins = Twins(build or small_world(), step, **options)
    for seed in range(4):
        twins.step(*pair(seed=seed))
    assert twins.num_captures == captures, twins.reasons
    return twins


def with_loss(make: Make) -> Step:
    def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = make(model, model(features), targets)
        loss.backward()
        optimizer.step()
        return loss

    return step


def filled(out: Tensor) -> Tensor:
    other = torch.zeros_like(out)
    other.fill_(out.norm().item())
    other[0] = out.mean().item()
    other[:, 1].mul_(out.std().item())
    return other


def sums(out: Tensor) -> float:
    row = out[:, 0].tolist()
    return row[1] + sum(row) / len(row)


GIVEN: dict[str, Make] = {
    "scales": lambda m, out, y: out.exp().mean().item() * F.mse_loss(out, y) - out.mean(),
    "divides": lambda m, out, y: F.mse_loss(out, y) / out.norm().item(),
    "tensor": lambda m, out, y: F.mse_loss(out, y) * torch.tensor(out.norm().item() / 3) + torch.tensor(2 / sums(out)),
    "arithmetic": lambda m, out, y: (
        F.mse_loss(out, y) * ((out.norm().item() + m.first.weight.sum().item() * 2) / 3 - math.exp(out.mean().item()))
    ),
    "clipped": lambda m, out, y: F.mse_loss(out, y) * min(1.0, 2.0 / (out.norm().item() + 1e-6)),
    "rounded": lambda m, out, y: F.mse_loss(out, y) * round(out.norm().item(), 2),
    "double": lambda m, out, y: F.mse_loss(out, y) * (out.double().norm().item() * 0.1),
    "bounds": lambda m, out, y: out.clamp(max=out.mean().item()).sum() + F.leaky_relu(out, out.norm().item()).sum(),
    "fills": lambda m, out, y: (filled(out) * out).mean() + torch.full((3,), out.mean().item()).sum(),
    "chooses": lambda m, out, y: torch.where(out > out.mean().item(), out, out.std().item()).sum(),
    "factors": lambda m, out, y: torch.sub(out, y, alpha=out.norm().item()).mean() * sums(out),
    "whole": lambda m, out, y: F.mse_loss(out, y) / (out > 0).sum().item() + torch.tensor((out > 0).sum().item()),
    "whole integers": lambda m, out, y: out.mean() * (torch.arange(3) * int(out.norm().item() + 1)).sum(),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("make", GIVEN.values(), ids=GIVEN)
def test_given_back(make: Make) -> None:
    trained(with_loss(make))


def before_and_after(model: Any, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Any:
    optimizer.zero_grad()
    weight = model.first.weight
    element, first = weight[0, 0].item(), weight.norm().item()
    loss = F.mse_loss(model(features), targets)
    loss.backward()
    optimizer.step()
    second = weight.norm().item()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(first / second)
        weight[0, 0] = element * 0.9
    return loss, first, second, weight.norm().item()


def by_hand(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = F.mse_loss(model(features), targets)
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(0.5 + loss.item())
            parameter.sub_(parameter.grad, alpha=0.1 * parameter.norm().item())
    optimizer.step()
    return loss


def overwritten(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
    optimizer.zero_grad()
    out = model(features)
    other = out.detach().clone()
    first = other[0, 0].item()
    second = other.mul_(2)[0, 0].item()
    third = other.zero_().add_(first).sum().item()
    loss = F.mse_loss(out * first, targets) + (out * other).mean() * second * third
    loss.backward()
    optimizer.step()
    return loss


def twice(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = F.mse_loss(F.dropout(model(features)), targets)
    loss.backward()
    (F.mse_loss(model(features), targets) * loss.item()).backward()
    for group in optimizer.param_groups:
        group["lr"] = 0.01 + 0.01 * loss.item()
    optimizer.step()
    return loss


STEPS: dict[str, Step] = {"before": before_and_after, "hand": by_hand, "overwritten": overwritten, "twice": twice}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "unchanged": {"passes": ""},
    "small": {"memory_budget": 0.0},
    "waiting": {"cross_iteration": "all"},
    "dynamic": {"dynamic_batch": True},
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_around_the_update(step: Step, options: dict[str, Any]) -> None:
    trained(step, build=small_world(make_optimizer=adam) if step is twice else None, **options)


def kept(model: Any, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
    optimizer.zero_grad()
    model.count += 1
    out = model(features)
    mean = out.abs().mean().item()
    model.running = 0.9 * model.running + 0.1 * mean
    corrected = model.running / (1 - 0.9**model.count)
    loss = F.mse_loss(out, targets) / corrected + (model.count * mean) * out.mean()
    loss.backward()
    optimizer.step()
    return loss


def test_kept_for_the_next_step() -> None:
    def build() -> World:
        world = small_world()()
        world.model.count, world.model.running = 0, 1.0
        return world

    trained(kept, captures=1, build=build)


def raises(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
    optimizer.zero_grad()
    out = model(features)
    loss = F.mse_loss(out, targets)
    loss.backward()
    optimizer.step()
    factor = 1 / (features * (1 + 0 * out.detach().mean())).sum().item()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 - factor * 0.01)
    return loss


@pytest.mark.parametrize("cross_iteration", ["none", "all"])
def test_arithmetic_that_raises_loses_no_update(cross_iteration: str) -> None:
    features, targets = pair()
    found: list[dict[str, Tensor]] = []
    for step in (raises, wholestep.compile(raises, cross_iteration=cross_iteration)):
        torch.manual_seed(0)
        world = small_world()()
        for scale in (1, 1, 0, 1):
            try:
                step(world.model, world.optimizer, features * scale, targets)
            except ZeroDivisionError:
                assert scale == 0
        found.append(world.model.state_dict())
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


REFUSED: dict[str, tuple[Make, str]] = {
    "delta": (lambda m, out, y: F.huber_loss(out, y, delta=out.norm().item()), "where torch needs a fixed number"),
    "dropout": (lambda m, out, y: F.dropout(out, out.norm().sigmoid().item()).mean(), "where torch needs a fixed"),
    "size": (lambda m, out, y: out.mean() + torch.ones((out > 0).sum().item()).sum(), "for a size or a place"),
    "range": (lambda m, out, y: out.mean() + torch.arange((out > 0).sum().item()).sum(), "for a size"),
    "floats": (lambda m, out, y: out.mean() + torch.arange(out.norm().item()).sum(), "where torch needs a fixed"),
    "roll": (lambda m, out, y: F.mse_loss(out.roll((out > 0).sum().item()), y), "for a size or a place"),
    "row": (lambda m, out, y: out[out[:, 0].argmax().item()].sum(), "where torch needs a fixed number"),
    "slice": (lambda m, out, y: out[:, : (out > -9).sum().item()].sum(), "only known when the step runs"),
    "two types": (lambda m, out, y: out.mean() * max(0, out.mean().item()), "only known when the step runs"),
    "truth": (lambda m, out, y: out.mean() * (out[0, 0] > 0).item(), "only known when the step runs"),
    "power": (lambda m, out, y: (out.abs() + 1).pow(out.norm().item()).mean(), "only known when it runs"),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(make: Make, message: str) -> None:
    world = small_world()()
    with pytest.raises(CaptureError, match=message):
        wholestep.compile(with_loss(make))(world.model, world.optimizer, *pair())


class Normed(nn.Module):
    """Layers of which one is told how long the result of another is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, features: Tensor) -> Tensor:
        hidden = self.first(features)
        return self.third(torch.tanh(self.second(hidden)) * hidden.norm().item())


def test_no_pipeline() -> None:
    model = Normed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pipe: Any = wholestep.pipeline(model, num_stages=2, num_micro_batches=2, loss_fn=F.mse_loss, optimizer=optimizer)
    with pytest.raises(wholestep.WholestepError, match="computes with a number of its tensors"):
        pipe.step(pair()[0], target=pair()[1])
