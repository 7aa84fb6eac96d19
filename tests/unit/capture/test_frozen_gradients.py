"""A parameter frozen after a backward still has its gradient: eager's optimizers and clipping go on using it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.parity import differences, snapshot
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import wholestep

X = torch.arange(12.0).view(4, 3) / 10

Step = Callable[[nn.Module, Optimizer], Tensor]


def loss_of(model: nn.Module) -> Tensor:
    loss = model(X).square().mean()
    loss.backward()
    return loss


def set_to_zero(model: nn.Module, optimizer: Optimizer) -> Tensor:
    optimizer.zero_grad(set_to_none=False)
    loss = loss_of(model)
    optimizer.step()
    return loss


def accumulate(model: nn.Module, optimizer: Optimizer) -> Tensor:
    loss = loss_of(model)
    optimizer.step()
    return loss


def clip(model: nn.Module, optimizer: Optimizer) -> Tensor:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = None
    loss = loss_of(model)
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()
    return loss


def give(model: nn.Module, optimizer: Optimizer) -> Tensor:
    """The step itself gives a frozen parameter a gradient."""
    optimizer.zero_grad()
    loss = loss_of(model)
    frozen = model.get_parameter("0.bias")
    frozen.grad = torch.full_like(frozen, 0.5)
    optimizer.step()
    return loss


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda parameters: SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: AdamW(parameters, lr=0.1),
}


@pytest.mark.parametrize(("optimizer", "cross_iteration"), [("sgd", "all"), ("adamw", "none")])
@pytest.mark.parametrize("step", [set_to_zero, accumulate, clip, give])
def test_a_gradient_of_before_it_was_frozen(step: Step, optimizer: str, cross_iteration: str) -> None:
    seen: list[list[dict[str, Tensor]]] = []
    for side in (step, wholestep.compile(step, cross_iteration=cross_iteration)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
        made = OPTIMIZERS[optimizer](model.parameters())
        loss_of(model)
        seen.append([])
        for number in range(4):
            model.get_parameter("0.bias").requires_grad_(number == 1)
            if number == 3:
                model.get_parameter("0.bias").grad = None
            side(model, made)
            seen[-1].append(snapshot(model, made))
    for eager, compiled in zip(*seen, strict=True):
        assert not differences(eager, compiled)
