"""`tensor.data = value` in a step: two tensors are in one memory from there on, as in eager."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.twins import Twins, World, adam, momentum, small_world
from torch import Tensor, nn
from torch.optim import Optimizer

import wholestep
from wholestep.errors import CaptureError

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(3))


def loss_of(model: Any) -> Tensor:
    return model(X).square().mean()


def finish(optimizer: Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


def trained(model: Any, optimizer: Optimizer) -> Tensor:
    loss = loss_of(model)
    loss.backward()
    finish(optimizer)
    return loss


def swapped_and_put_back(model: Any, optimizer: Optimizer) -> Any:
    saved = model.first.weight.data
    model.first.weight.data = model.first.weight.data * 2
    loss = loss_of(model)
    loss.backward()
    model.first.weight.data = saved
    finish(optimizer)
    return loss


def used_afterwards(model: Any, optimizer: Optimizer) -> Any:
    loss = loss_of(model)
    loss.backward()
    new = model.first.weight.data * 0.5
    model.first.weight.data = new
    finish(optimizer)
    return loss + new.sum()


def returned(model: Any, optimizer: Optimizer) -> Any:
    loss = loss_of(model)
    loss.backward()
    new = model.first.weight.data * 0.5
    model.first.weight.data = new
    finish(optimizer)
    return loss, new


def old_memory_returned(model: Any, optimizer: Optimizer) -> Any:
    saved = model.first.weight.data
    loss = loss_of(model)
    loss.backward()
    model.first.weight.data = saved + 1
    finish(optimizer)
    return loss, saved


def old_memory_written(model: Any, optimizer: Optimizer) -> Any:
    saved = model.first.weight.detach()
    loss = loss_of(model)
    loss.backward()
    model.first.weight.data = saved + 1
    saved.mul_(3)
    finish(optimizer)
    return loss, saved.sum()


def a_view_of_before(model: Any, optimizer: Optimizer) -> Any:
    view = model.first.weight.detach()[0]
    loss = loss_of(model)
    loss.backward()
    model.first.weight.data = model.first.weight.data * 0.5
    finish(optimizer)
    return loss + view.sum()


def a_view_of_after(model: Any, optimizer: Optimizer) -> Any:
    loss = loss_of(model)
    loss.backward()
    model.first.weight.data = model.first.weight.data * 0.5
    view = model.first.weight.detach()[0]
    finish(optimizer)
    return loss + view.sum()


def behind_the_back_of_a_backward(model: Any, optimizer: Optimizer) -> Any:
    loss = loss_of(model)
    model.second.weight.data = model.second.weight.data * 2
    loss.backward()
    finish(optimizer)
    return loss


def two_exchanged(model: Any, optimizer: Optimizer) -> Any:
    loss = loss_of(model)
    loss.backward()
    first, second = model.first.bias.data, model.other.data
    model.first.bias.data, model.other.data = second, first
    finish(optimizer)
    return loss


def sharpness_aware(model: Any, optimizer: Optimizer) -> Any:
    loss_of(model).backward()
    old = [parameter.data.clone() for parameter in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.add_(parameter.grad, alpha=0.05)
    optimizer.zero_grad()
    loss = loss_of(model)
    loss.backward()
    for parameter, value in zip(model.parameters(), old, strict=True):
        parameter.data = value
    finish(optimizer)
    return loss


def through_a_vector(model: Any, optimizer: Optimizer) -> Any:
    vector = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(vector + 0.01, model.parameters())
    loss = loss_of(model)
    loss.backward()
    nn.utils.vector_to_parameters(vector, model.parameters())
    finish(optimizer)
    return loss


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 3)
        self.other = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)) * self.other)


EXACT = [
    *(swapped_and_put_back, used_afterwards, old_memory_returned, old_memory_written, a_view_of_before),
    *(a_view_of_after, behind_the_back_of_a_backward, two_exchanged, sharpness_aware),
    through_a_vector,
]


@pytest.mark.sample(10)
@pytest.mark.parametrize("make_optimizer", [momentum, adam])
@pytest.mark.parametrize("step", EXACT)
def test_the_step_is_eagers(step: Callable[..., Any], make_optimizer: Any) -> None:
    twins = Twins(small_world(Net, make_optimizer), step)
    twins.steps(4)
    assert twins.num_captures <= 2


def climbed(model: Any, optimizer: Optimizer) -> Any:
    """As sharpness-aware minimisation does it: what was kept in the state of the optimizer becomes the data again."""
    loss_of(model).backward()
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                optimizer.state[p]["old"] = p.data.clone()
                p.add_(p.grad * 0.1)
    optimizer.zero_grad()
    loss = loss_of(model)
    loss.backward()
    for p in model.parameters():
        if p.grad is not None:
            p.data = optimizer.state[p]["old"]
    finish(optimizer)
    return loss


@pytest.mark.parametrize("options", [{}, {"cross_iteration": "all"}, {"memory_budget": 1.0}], ids=str)
def test_data_that_stays_in_the_state_of_an_optimizer(options: dict[str, Any]) -> None:
    twins = Twins(small_world(Net), climbed, **options)
    for _ in range(5):
        twins.step()
        for world in twins.worlds:
            weight = world.model.first.weight
            assert world.optimizer.state[weight]["old"].data_ptr() == weight.data_ptr()
    assert twins.num_captures <= 2, twins.reasons


def test_data_that_stays_in_the_state_and_is_read_there() -> None:
    twins = Twins(small_world(Net), share_with_state_that_is_read)
    twins.step()
    with pytest.raises(CaptureError, match=r"param.first.weight and state.first.weight.kept share memory"):
        twins.compiled(twins.worlds[1].model, twins.worlds[1].optimizer)


def share_with_another(model: Any, optimizer: Optimizer) -> Any:
    model.first.bias.data = model.other.data
    return trained(model, optimizer)


def share_with_state(model: Any, optimizer: Optimizer) -> Any:
    loss = loss_of(model)
    loss.backward()
    kept = model.first.weight.data.clone()
    optimizer.state[model.first.weight]["kept"] = kept.flatten()
    model.first.weight.data = kept
    finish(optimizer)
    return loss


def share_with_state_that_is_read(model: Any, optimizer: Optimizer) -> Any:
    state = optimizer.state[model.first.weight]
    before = state["kept"].sum() if "kept" in state else 0.0
    kept = model.first.weight.data.clone()
    state["kept"] = kept
    model.first.weight.data = kept
    return trained(model, optimizer) + before


def share_with_gradient(model: Any, optimizer: Optimizer) -> Any:
    loss = loss_of(model)
    loss.backward()
    model.first.weight.data = model.first.weight.grad
    return loss


def share_a_part(model: Any, optimizer: Optimizer) -> Any:
    vector = torch.cat([model.first.bias.data, model.other.data])
    model.first.bias.data, model.other.data = vector[:5], vector[4:9]
    return trained(model, optimizer)


def another_order(model: Any, optimizer: Optimizer) -> Any:
    model.first.weight.data = model.first.weight.data.T.contiguous().T
    return trained(model, optimizer)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (share_with_another, "shares its memory with param.other"),
        (share_with_state, r"shares its memory with .*state\['kept'\]"),
        (share_with_gradient, "shares its memory with"),
        (returned, "shares its memory with what the step returns"),
        (share_a_part, "shares its memory with param.other"),
        (another_order, "order in memory"),
    ],
)
def test_what_would_share_memory_afterwards_is_refused(step: Callable[..., Any], message: str) -> None:
    world: World = small_world(Net)()
    before = {name: value.clone() for name, value in world.model.state_dict().items()}
    with pytest.raises(CaptureError, match=message):
        wholestep.compile(step)(world.model, world.optimizer)
    assert all(torch.equal(value, before[name]) for name, value in world.model.state_dict().items())
