"""Operators of torch that look at values in C++, or that its tracing gets wrong, trained beside eager."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.twins import Twins, small_world
from torch import Tensor, nn

import wholestep

PLACES = torch.tensor([1, 3])
Loss = Callable[[nn.Module, Tensor], Tensor]


def step_of(loss_of: Loss) -> Callable[..., Any]:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, features: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, features)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def batches(number: int, size: int = 5) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(size, 4, generator=generator) for _ in range(number)]


def in_place_of_a_part(model: nn.Module, features: Tensor) -> Tensor:
    hidden = model(features).abs().add(1)
    hidden[:, :2].polygamma_(1)
    return hidden.sum()


LOSSES: dict[str, Loss] = {
    "tensor_split": lambda m, x: m(torch.tensor_split(x, PLACES)[1]).sum(),
    "tensor_split, made here": lambda m, x: m(torch.tensor_split(x, torch.tensor([1, 3]))[1]).sum(),
    "tensor_split, method, named": lambda m, x: m(x.tensor_split(tensor_indices_or_sections=PLACES, dim=0)[1]).sum(),
    "tensor_split, sections": lambda m, x: m(torch.tensor_split(x, torch.tensor(2))[1]).sum(),
    "tensor_split, numbers": lambda m, x: m(torch.cat([*x.tensor_split(sections=2), *x.tensor_split((1, 2))])).sum(),
    "tensor_split, list of a tensor": lambda m, x: m(torch.tensor_split(x, PLACES.tolist())[1]).sum(),
    "polygamma_": lambda m, x: m(x).square().add_(1).polygamma_(2).sum(),
    "polygamma_, a part": in_place_of_a_part,
    "gaussian_nll_loss": lambda m, x: F.gaussian_nll_loss(m(x), x[:, :3], m(x).square() + 0.1),
    "gaussian_nll_loss, a number": lambda m, x: F.gaussian_nll_loss(m(x), x[:, :3], 0.3, full=True, reduction="sum"),
    "cov": lambda m, x: torch.cov(m(x).t(), aweights=m(x)[:, 0].abs()).sum(),
}


@pytest.mark.parametrize("loss_of", LOSSES.values(), ids=LOSSES.keys())
def test_operators_that_look_are_traced(loss_of: Loss) -> None:
    twins = Twins(small_world(), step_of(loss_of))
    for features in batches(4):
        twins.step(features)
    assert (twins.num_captures, twins.compiled.num_eager_calls) == (1, 0)


def test_lstsq() -> None:
    """Its kernel rounds as memory lies, in eager too."""
    step = step_of(lambda m, x: torch.linalg.lstsq(x, m(x)).solution.square().mean())
    worlds = [small_world()(), small_world()()]
    worlds[1].model.load_state_dict(worlds[0].model.state_dict())
    compiled = wholestep.compile(step)
    for features in batches(3):
        expected, found = (run(w.model, w.optimizer, features) for run, w in zip((step, compiled), worlds, strict=True))
        torch.testing.assert_close(found, expected)
    assert compiled.num_captures == 1


def test_places_of_the_batch_are_asked_for() -> None:
    def loss_of(model: nn.Module, features: Tensor) -> Tensor:
        count = (features[:, 0] > 0).sum().reshape(1)
        return sum(
            (model(part).sum() * index for index, part in enumerate(torch.tensor_split(features, count))), PLACES.sum()
        )

    twins = Twins(small_world(), step_of(loss_of))
    for features in batches(6):
        twins.step(features)


@pytest.mark.parametrize("places", [torch.tensor([0.5]), torch.ones(2, 2, dtype=torch.int64)], ids=["floats", "matrix"])
def test_places_that_eager_does_not_take_are_its_own_error(places: Tensor) -> None:
    step = step_of(lambda model, x: model(torch.tensor_split(x, places)[0]).sum())
    world = small_world()()
    with pytest.raises(RuntimeError, match="tensor_split expected") as eagers:
        step(world.model, world.optimizer, *batches(1))
    with pytest.raises(RuntimeError, match="tensor_split expected") as ours:
        wholestep.compile(step)(world.model, world.optimizer, *batches(1))
    assert str(ours.value) == str(eagers.value)


def test_places_that_the_step_computes_are_refused() -> None:
    step = step_of(lambda model, x: model(torch.tensor_split(x, (model(x)[:, 0] > 0).sum().reshape(1))[0]).sum())
    world = small_world()()
    with pytest.raises(wholestep.CaptureError, match="needs a value that is only known when the step runs"):
        wholestep.compile(step)(world.model, world.optimizer, *batches(1))


def test_a_check_of_weights_that_fails_is_eagers_error() -> None:
    """`cov` asks in C++ whether trained weights are all positive: where they are not, eager raises."""
    twins = Twins(small_world(), step_of(lambda m, x: torch.cov(m(x).t(), aweights=m(x)[:, 0] + x[0, 0]).sum()))
    positive = torch.cat([torch.full((1, 4), 50.0), torch.ones(4, 4)])
    twins.steps(2, positive)
    before = twins.compiled.num_eager_calls
    for step in (twins.eager, twins.compiled):
        world = twins.worlds[0 if step is twins.eager else 1]
        with pytest.raises(RuntimeError, match="aweights cannot be negative"):
            step(world.model, world.optimizer, -positive)
    assert twins.compiled.num_eager_calls == before + 1
    twins.steps(2, positive)


def test_variances_that_are_negative_are_eagers_error() -> None:
    twins = Twins(small_world(), step_of(lambda m, x: F.gaussian_nll_loss(m(x), x[:, :3], m(x).square() + x[0, 0])))
    positive = torch.ones(5, 4)
    twins.steps(2, positive)
    for step in (twins.eager, twins.compiled):
        world = twins.worlds[0 if step is twins.eager else 1]
        with pytest.raises(ValueError, match="var has negative"):
            step(world.model, world.optimizer, -positive * 100)
    twins.steps(2, positive)


def test_a_branch_on_equality_is_the_steps_own() -> None:
    step = step_of(lambda m, x: m(x).sum() * (2 if torch.equal(m(x)[0, 0], x[0, 0]) else 1))
    world = small_world()()
    with pytest.raises(wholestep.CaptureError, match=r"equal\(\)|only known when"):
        wholestep.compile(step)(world.model, world.optimizer, *batches(1))
