"""Arguments that require a gradient: it is made or added to, as eager does (S8)."""

import copy

import pytest
import torch
import torch.nn.functional as F
from tests.twins import Twins, momentum, mse_step, pair, small_world
from torch import Tensor, nn
from torch.optim import Optimizer

import wholestep

X, Y = pair()


class Both:
    """Two worlds whose steps get one lasting argument each."""

    def __init__(self, features: Tensor, **options: object) -> None:
        torch.manual_seed(0)
        self.world = small_world()()
        self.twin = copy.deepcopy(self.world)
        self.twin.optimizer = momentum(self.twin.model.parameters())
        self.features = [features, copy.deepcopy(features)]
        if features.grad is not None:
            self.features[1].grad = features.grad.clone()
        self.step = wholestep.compile(mse_step, **options)

    def run(self) -> None:
        eager, compiled = self.features
        mse_step(self.world.model, self.world.optimizer, eager, Y[: len(eager)])
        self.step(self.twin.model, self.twin.optimizer, compiled, Y[: len(compiled)])
        assert eager.grad is not None
        assert compiled.grad is not None
        assert torch.equal(eager.grad, compiled.grad)
        for old, new in zip(self.world.model.parameters(), self.twin.model.parameters(), strict=True):
            assert torch.equal(old, new)


@pytest.mark.parametrize("verify", [0, 4])
def test_the_gradient_of_a_lasting_argument_accumulates(verify: int) -> None:
    both = Both(X.clone().requires_grad_(), verify=verify)
    both.run()
    kept = both.features[1].grad
    for _ in range(3):
        both.run()
    assert both.features[1].grad is kept
    assert both.step.num_captures == 2, both.step.recompile_reasons
    assert "features.grad is set" in both.step.recompile_reasons[0]


def test_a_fresh_argument_after_one_with_a_gradient() -> None:
    first = X.clone().requires_grad_()
    first.grad = torch.ones_like(first)
    both = Both(first)
    both.run()
    for _ in range(2):  # as in adversarial training: a fresh leaf in every call
        both.features = [X.clone().requires_grad_(), X.clone().requires_grad_()]
        both.run()
    assert both.step.num_captures == 2


def test_gradients_of_arguments_with_a_dynamic_batch() -> None:
    both = Both(X.clone().requires_grad_(), dynamic_batch=True)
    for size in (6, 4, 5):
        both.features = [X[:size].clone().requires_grad_(), X[:size].clone().requires_grad_()]
        for _ in range(2):
            both.run()
    assert both.step.num_captures == 2, both.step.recompile_reasons


def test_a_parameter_as_an_argument_is_cleared_like_the_others() -> None:
    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, weight: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(X).square().mean() + weight.square().sum()
        loss.backward()
        optimizer.step()
        return loss

    twins = Twins(
        small_world(), step, call=lambda world, run: run(world.model, world.optimizer, world.model.first.weight)
    )
    twins.steps(3)
    assert twins.num_captures == 1, twins.reasons


def test_verify_looks_at_gradients_of_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    from wholestep.capture.binding import GradOfArgument

    def write(self: GradOfArgument, value: Tensor, leaves: list[Tensor]) -> None:
        leaves[self.index].grad = value + 1

    monkeypatch.setattr(GradOfArgument, "write", write)
    both = Both(X.clone().requires_grad_(), verify=1)
    with pytest.raises(wholestep.VerificationError, match="features"):
        both.run()


def test_a_gradient_asked_for_inside_the_step_stays_in_the_argument() -> None:
    """A gradient penalty: the argument required none before, requires none afterwards, and has one all the same."""

    def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        features.requires_grad_(True)
        loss = F.mse_loss(model(features), targets)
        [gradient] = torch.autograd.grad(loss, features, create_graph=True)
        loss = loss + gradient.square().sum()
        loss.backward()
        features.requires_grad_(False)
        optimizer.step()
        return loss

    twins = Twins(small_world(), step)
    twins.steps(3, X, Y)
    with_gradient = X.clone()
    with_gradient.grad = torch.ones_like(X)
    twins.steps(2, with_gradient, Y)


def test_a_gradient_left_in_a_tensor_from_outside_is_refused() -> None:
    world = small_world()()
    kept = X.clone()

    def step(model: nn.Module, targets: Tensor) -> None:
        kept.requires_grad_(True)
        F.mse_loss(model(kept), targets).backward()
        kept.requires_grad_(False)

    with pytest.raises(wholestep.CaptureError, match=r"leaves a gradient in '.*', a tensor from outside"):
        wholestep.compile(step)(world.model, Y)
    assert kept.grad is None
