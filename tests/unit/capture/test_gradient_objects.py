"""Gradients are objects: each parameter has its own, and one that exists is added to in place, as eager does."""

from collections.abc import Callable
from typing import Any

import torch
from tests.twins import SmallNet, pair, small_world
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import wholestep
from wholestep import CaptureError

X, Y = pair()


def test_parameters_with_equal_gradients_have_one_each() -> None:
    """The two biases of an LSTM: whoever scales all gradients in place would otherwise scale one twice."""

    def step(model: nn.Module, optimizer: Optimizer, features: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(features)[0].square().mean()
        loss.backward()
        optimizer.step()
        return loss

    model = nn.LSTM(4, 3)
    compiled = wholestep.compile(step)
    compiled(model, SGD(model.parameters(), lr=0.1), X.unsqueeze(1))
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert len(gradients) == 4
    assert len({id(gradient) for gradient in gradients}) == 4
    assert len({gradient.untyped_storage().data_ptr() for gradient in gradients}) == 4


def accumulate(model: nn.Module, features: Tensor, targets: Tensor) -> Tensor:
    loss = (model(features) - targets).square().mean()
    loss.backward()
    return loss


def test_a_gradient_that_exists_is_added_to_in_place() -> None:
    torch.manual_seed(0)
    eager, model = SmallNet(), SmallNet()
    model.load_state_dict(eager.state_dict())
    for side, step in ((eager, accumulate), (model, wholestep.compile(accumulate))):
        accumulate(side, X, Y)
        kept = [parameter.grad for parameter in side.parameters()]
        for _ in range(3):
            step(side, X, Y)
        assert all(parameter.grad is old for parameter, old in zip(side.parameters(), kept))
    assert all(same(one.grad, two.grad) for one, two in zip(eager.parameters(), model.parameters()))


def test_gradients_that_are_views_of_one_buffer() -> None:
    """Flat gradients, which are cleared, filled and read in one piece: eager's values, or a refusal."""

    def step(model: nn.Module, optimizer: Optimizer, flat: Tensor, features: Tensor, targets: Tensor) -> Any:
        flat.zero_()
        loss = accumulate(model, features, targets)
        optimizer.step()
        return loss, flat.norm()

    seen: list[list[Tensor]] = []
    for compile in (lambda function: function, compiled_or_eager):
        torch.manual_seed(0)
        world = small_world()()
        flat = torch.zeros(sum(parameter.numel() for parameter in world.model.parameters()))
        offset = 0
        for parameter in world.model.parameters():
            parameter.grad = flat[offset : offset + parameter.numel()].view_as(parameter)
            offset += parameter.numel()
        compiled = compile(step)
        outputs = [compiled(world.model, world.optimizer, flat, X, Y) for _ in range(3)]
        seen.append([flat, *(value for output in outputs for value in output), *world.model.parameters()])
    assert all(same(one, two) for one, two in zip(*seen))


def compiled_or_eager(step: Callable[..., Any]) -> Callable[..., Any]:
    compiled = wholestep.compile(step)

    def call(*args: Any) -> Any:
        try:
            return compiled(*args)
        except CaptureError:
            return step(*args)

    return call


def same(one: Tensor | None, two: Tensor | None) -> bool:
    return one is not None and two is not None and torch.equal(one, two)
