"""Function transforms (`torch.func`) inside a step: per-sample gradients, inner loops, Jacobians."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from tests.twins import Twins, pair, small_world
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.optim import Optimizer

import wholestep
from wholestep import CaptureError

X, Y = pair()
Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


def loss_of(model: nn.Module, parameters: dict[str, Tensor], features: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(functional_call(model, parameters, (features,)), targets)


def inner_loop(model: nn.Module, features: Tensor, targets: Tensor) -> Tensor:
    parameters = dict(model.named_parameters())
    gradients = grad(lambda p: loss_of(model, p, features, targets))(parameters)
    adapted = {name: value - 0.1 * gradients[name] for name, value in parameters.items()}
    return loss_of(model, adapted, features, targets)


def pulled_back(model: nn.Module, features: Tensor, targets: Tensor) -> Tensor:
    output, pull = cast(Any, vjp(model, features))
    [cotangent] = pull(targets)
    return output.square().mean() + cotangent.square().mean()


def pushed(model: nn.Module, features: Tensor, targets: Tensor) -> Tensor:
    output, tangent = cast(Any, jvp(model, (features,), (torch.ones_like(features),)))
    return output.square().mean() + tangent.square().mean()


LOSSES: dict[str, Loss] = {
    "vmap": lambda model, x, y: vmap(lambda a, b: F.mse_loss(model(a), b))(x, y).mean(),
    "vmap of a tensor from outside": lambda model, x, y: vmap(lambda a: F.mse_loss(model(a), Y[0]))(x).mean(),
    "inner loop": inner_loop,
    "vjp": pulled_back,
    "jvp": pushed,
    "jacrev": lambda model, x, y: vmap(jacrev(model))(x).square().mean(),
    "jacfwd": lambda model, x, y: vmap(jacfwd(model))(x).square().mean(),
    "hessian": lambda model, x, y: hessian(lambda a: model(a).square().sum())(x[0]).square().mean(),
    "random": lambda model, x, y: vmap(lambda a: model(F.dropout(a, 0.5)), randomness="different")(x).square().mean(),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch's own forward AD
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_every_step_is_eagers(loss: Loss) -> None:
    def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        value = loss(model, features, targets)
        value.backward()
        optimizer.step()
        return value.detach()

    twins = Twins(small_world(), step)
    twins.steps(4, X, Y)
    assert twins.num_captures == 1


def test_a_trace_inside_the_step_is_refused() -> None:
    """Its graph would hold the stand-ins of the step's own trace, and leave them in the gradients."""

    def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        output, push = linearize(model, features)
        value = F.mse_loss(output + push(features), targets)
        value.backward()
        optimizer.step()
        return value

    world = small_world()()
    with pytest.raises(CaptureError, match=r"test_transforms\.py:\d+: the step makes a graph of a function itself"):
        wholestep.compile(step)(world.model, world.optimizer, X, Y)


@pytest.mark.parametrize("detach", [False, True])
def test_gradients_of_each_sample(detach: bool) -> None:
    def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        parameters = {name: value.detach() if detach else value for name, value in model.named_parameters()}
        each = vmap(grad(lambda p, x, y: loss_of(model, p, x, y)), (None, 0, 0))(parameters, features, targets)
        norms = torch.stack([value.flatten(1).norm(dim=1) for value in each.values()]).norm(dim=0)
        scale = (1.0 / norms).clamp(max=1.0).detach()
        for name, parameter in model.named_parameters():
            parameter.grad = torch.einsum("n,n...->...", scale, each[name].detach())
        optimizer.step()
        return norms.detach()

    twins = Twins(small_world(), step)
    twins.steps(4, X, Y)
    assert twins.num_captures == 1
