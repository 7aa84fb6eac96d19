"""Gradients while updates wait: nobody reads an old one, and nobody changes what the update still needs (ITER-5)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.waiting import WORDS, Pair, Side, X, is_pending
from torch import Tensor, nn
from torch.optim import Optimizer

from wholestep import _waiting_torch
from wholestep.errors import WholestepError

pytestmark = pytest.mark.usefixtures("nothing_waits")


def _doubling_step(model: nn.Module, optimizer: Optimizer, x: Tensor, words: Tensor) -> Tensor:
    """Its gradients come with the update, as all that is done to them after the backward moves along."""
    optimizer.zero_grad()
    loss = model(x, words).square().mean()
    loss.backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad = parameter.grad * 2
    optimizer.step()
    return loss


def _plain_step(model: nn.Module, optimizer: Optimizer, x: Tensor, words: Tensor) -> Tensor:
    """Its gradients are there at once, and the update needs them."""
    optimizer.zero_grad()
    loss = model(x, words).square().mean()
    loss.backward()
    optimizer.step()
    return loss


STEPS: dict[str, Callable[..., Tensor]] = {"come with the update": _doubling_step, "are there": _plain_step}


def _unasked_gradient(side: Side) -> Tensor:
    with torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage]
        gradient = side.parameters[0].grad
    assert gradient is not None
    return gradient


@pytest.mark.parametrize("kind", STEPS)
def test_gradients_that_are_written_to_past_torch_functions(kind: str) -> None:
    pair = Pair("momentum", STEPS[kind])
    pair.steps(2)
    for number in range(4):
        pair.step()
        assert is_pending(pair.ours)
        for side in pair.sides:
            _unasked_gradient(side).add_(number)
        assert not is_pending(pair.ours)
        pair.assert_same()


@pytest.mark.parametrize("kind", STEPS)
def test_backward_of_an_older_graph(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd adds to a gradient in C++. As long as there is such a graph nothing waits; it would do no harm."""
    monkeypatch.setattr(_waiting_torch, "is_held_in_cpp", lambda _: False)
    pair = Pair("sgd", STEPS[kind])
    pair.steps(2)
    for _ in range(3):
        extras = [(side.parameters[0] + 1).sum() * 3 for side in pair.sides]
        pair.step()
        assert is_pending(pair.ours)
        for extra in extras:
            extra.backward()
        pair.assert_same()


@pytest.mark.parametrize("kind", STEPS)
def test_a_gradient_that_was_taken_is_never_another_steps(kind: str) -> None:
    pair = Pair("sgd", STEPS[kind])
    for _ in range(3):
        pair.steps(2)
        taken = _unasked_gradient(pair.ours)
        pair.step()
        with pytest.raises(WholestepError, match="the next step began before anybody read it"):
            taken.sum()
        pair.assert_same()


def test_a_step_that_fails_leaves_the_gradients_of_before() -> None:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, words: Tensor) -> Tensor:
        loss = model(x, words).square().mean()
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        optimizer.step()
        return loss

    pair = Pair("sgd", step)
    pair.steps(3)
    for side in pair.sides:
        with pytest.raises(IndexError):
            side.step(side.model, side.optimizer, X, WORDS + 3)
    pair.assert_same()
