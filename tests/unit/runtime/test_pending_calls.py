"""Calls while updates wait: failing ones, those of other steps, the last one; and what one is told (ITER-5, ITER-6)."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.parity import differences, snapshot
from tests.waiting import MAKERS, ROWS, WORDS, Pair, X, is_anything_waiting, is_pending, train_step
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile

import wholestep

pytestmark = pytest.mark.usefixtures("nothing_waits")


# Steps that fail


@pytest.mark.sample(9)
@pytest.mark.parametrize("passes", [None, "simplify,cse", ""])
@pytest.mark.parametrize("where", ["in the middle of the forward", "behind it"])
@pytest.mark.parametrize("name", MAKERS)
def test_a_step_that_fails_half_way(name: str, where: str, passes: str | None) -> None:
    """What was pending has been applied, once, as it would have been in eager; then it goes on."""
    pair = Pair(name, passes=passes)
    beyond = torch.tensor([0, 99])
    bad = (X, WORDS.where(WORDS < 3, 99), ROWS) if "middle" in where else (X, WORDS, beyond)
    for num_steps in (3, 1, 2):
        for _ in range(num_steps):
            pair.step(X, WORDS, ROWS)
        for side in pair.sides:
            with pytest.raises(IndexError):
                side.step(side.model, side.optimizer, *bad)
        assert not is_pending(pair.ours)
        for expected, found in zip(pair.eager.memory, pair.ours.memory, strict=True):
            assert torch.equal(expected, found)
        pair.both(lambda _, optimizer: optimizer.state_dict())
    assert pair.compiled.num_captures == 1
    pair.step(X, WORDS, ROWS)
    pair.assert_same()


def test_a_call_that_cannot_be_captured_loses_nothing() -> None:
    pair = Pair()
    pair.steps(2)
    for side in pair.sides:  # the error is eager's own
        with pytest.raises(RuntimeError, match="6x7"):
            side.step(side.model, side.optimizer, torch.ones(6, 7), WORDS)
    pair.assert_same()
    pair.steps(2)
    pair.assert_same()


# Several steps


def other_step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = F.l1_loss(model(x), torch.zeros(len(x), 3))
    loss.backward()
    optimizer.step()
    return loss


def test_two_steps_share_a_model() -> None:
    pair = Pair()
    other = wholestep.compile(other_step, cross_iteration="all")
    for _ in range(3):
        pair.step()
        for _ in range(2):
            loss = other_step(pair.eager.model, pair.eager.optimizer, X)
            assert torch.equal(other(pair.ours.model, pair.ours.optimizer, X), loss)
    pair.assert_same()
    assert (pair.compiled.recompile_reasons, other.recompile_reasons) == ((), ())


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)

    def forward(self, noise: Tensor) -> Tensor:
        return torch.tanh(self.body(noise))


class Adversaries:
    """A generator and a critic, each with an optimizer and a step of its own that reads the other one."""

    def __init__(self, compile: Callable[[Callable[..., Tensor]], Callable[..., Tensor]]) -> None:
        torch.manual_seed(1)
        self.generator = Generator()
        self.critic = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
        self.of_generator = torch.optim.AdamW(self.generator.parameters(), foreach=False)
        self.of_critic = torch.optim.SGD(self.critic.parameters(), lr=0.1, momentum=0.9)
        self.train_generator = compile(_train_generator)
        self.train_critic = compile(_train_critic)

    def round(self) -> list[Tensor]:
        losses = [
            self.train_critic(self.generator, self.critic, self.of_critic, X),
            self.train_generator(self.generator, self.critic, self.of_generator, X),
        ]
        return [*losses, self.train_generator(self.generator, self.critic, self.of_generator, X)]

    def seen(self) -> dict[str, Any]:
        return snapshot(self.generator, self.of_generator) | {
            f"critic.{name}": value for name, value in snapshot(self.critic, self.of_critic).items()
        }


def _train_generator(generator: nn.Module, critic: nn.Module, optimizer: Optimizer, noise: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = -critic(generator(noise)).mean()
    loss.backward()
    optimizer.step()
    return loss


def _train_critic(generator: nn.Module, critic: nn.Module, optimizer: Optimizer, noise: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = critic(generator(noise).detach()).mean() - critic(noise).mean()
    loss.backward()
    optimizer.step()
    return loss


def test_two_optimizers_train_against_each_other() -> None:
    eager = Adversaries(lambda step: step)
    ours = Adversaries(lambda step: wholestep.compile(step, cross_iteration="all"))
    for number in range(4):
        for expected, found in zip(eager.round(), ours.round(), strict=True):
            assert torch.equal(expected, found)
        assert is_anything_waiting()
        if number % 2:
            assert differences(eager.seen(), ours.seen()) == []


def _accumulate(model: nn.Module, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    return loss


def _apply_and_clear(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    loss = model(x).abs().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def test_a_step_that_accumulates_and_one_that_applies() -> None:
    pair = Pair("momentum")
    accumulate = wholestep.compile(_accumulate, cross_iteration="all")
    apply = wholestep.compile(_apply_and_clear, cross_iteration="all")
    eager, ours = pair.sides
    for _ in range(4):
        for _ in range(2):
            assert torch.equal(_accumulate(eager.model, X), accumulate(ours.model, X))
        expected = _apply_and_clear(eager.model, eager.optimizer, X)
        assert torch.equal(apply(ours.model, ours.optimizer, X), expected)
        assert is_anything_waiting()
    pair.assert_same()


def test_two_models_share_a_step() -> None:
    first, second = Pair(), Pair()
    second.compiled = second.ours.step = first.compiled
    for _ in range(3):
        first.step()
        second.step()
    first.assert_same()
    second.assert_same()


def test_a_step_that_is_gone_still_applies() -> None:
    pair = Pair()
    pair.steps(3)
    gone = weakref.ref(pair.compiled)
    del pair.compiled, pair.ours.step
    gc.collect()
    assert gone() is None
    assert is_pending(pair.ours)
    pair.assert_same()
    pair.assert_applied()


# Endings


def test_last_leaves_nothing() -> None:
    pair = Pair()
    for num_steps in (0, 1, 3):
        pair.steps(num_steps)
        loss = train_step(pair.eager.model, pair.eager.optimizer, X, WORDS)
        assert torch.equal(pair.compiled(pair.ours.model, pair.ours.optimizer, X, WORDS, last=True), loss)
        pair.assert_applied()


def test_max_iters_leaves_nothing() -> None:
    pair = Pair(max_iters=3)
    for _ in range(2):  # each loop over that many steps overlaps (F10)
        for is_last in (False, False, True):
            pair.step()
            assert is_pending(pair.ours) != is_last
        pair.assert_applied()


def test_leaving_the_block_applies() -> None:
    pair = Pair()
    with pair.compiled as entered:
        assert entered is pair.compiled
        pair.steps(3)
        assert is_pending(pair.ours)
    pair.assert_applied()
    with pytest.raises(KeyError):
        _fail_inside(pair)
    pair.assert_applied()


def _fail_inside(pair: Pair) -> None:
    with pair.compiled:
        pair.step()
        raise KeyError


def test_an_argument_called_last_is_the_users() -> None:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, words: Tensor, last: bool = False) -> Tensor:
        optimizer.zero_grad()
        loss = model(x, words).square().mean() * (2 if last else 1)
        loss.backward()
        optimizer.step()
        return loss

    pair = Pair(step=step)
    for last in (False, True, True):
        pair.step(last=last)
        assert is_pending(pair.ours)
    pair.assert_same()


# What one is told


def test_looking_after_every_step_is_remarked_once(caplog: pytest.LogCaptureFixture) -> None:
    pair = Pair()
    with caplog.at_level(logging.WARNING, "wholestep"):
        for number in range(12):
            pair.step()
            assert bool(caplog.messages) == (number >= 8)
            pair.ours.model.last.bias.sum().item()
    [message] = caplog.messages
    assert message.startswith("after each of the last 8 steps, ")
    assert "test_pending_calls.py:" in message
    assert "cross_iteration='none'" in message


def test_looking_now_and_then_is_not_remarked(caplog: pytest.LogCaptureFixture) -> None:
    pair = Pair()
    with caplog.at_level(logging.WARNING, "wholestep"):
        for _ in range(10):
            pair.steps(2)
            pair.ours.model.last.bias.sum().item()
    assert caplog.messages == []


def test_verified_steps(caplog: pytest.LogCaptureFixture) -> None:
    pair = Pair(verify=10)
    with caplog.at_level(logging.WARNING, "wholestep"):
        pair.steps(10)
        pair.assert_same()
        pair.steps(3)
    assert is_pending(pair.ours)
    pair.assert_same()
    assert caplog.messages == [], "it was not the user who looked"


def test_the_graphs_of_the_loop_are_readable() -> None:
    pair = Pair()
    pair.steps(2)
    graphs = pair.compiled.iteration
    assert is_pending(pair.ours), "printing applies nothing"
    for graph in (graphs.setup, graphs.main, graphs.cleanup, graphs.flush):
        compile(str(graph), "graph", "exec")
        graph.verify()
    assert "carry_" not in str(graphs.setup).partition("return")[0]
    assert all("carry_" in str(graph).partition("return")[0] for graph in (graphs.main, graphs.cleanup, graphs.flush))
    assert "'carry." in str(graphs.main)
    assert "'carry." not in str(graphs.cleanup)
    assert str(pair.compiled.graph) == str(graphs.main)


def test_the_profiler_names_the_calls() -> None:
    pair = Pair()
    model, optimizer = pair.ours.model, pair.ours.optimizer
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(3):
            pair.compiled(model, optimizer, X, WORDS)
        pair.compiled.flush()
        for is_last in (False, True, True):
            pair.compiled(model, optimizer, X, WORDS, last=is_last)
    names = [event.name for event in profiler.events() or () if event.name.startswith("wholestep::")]
    kinds = ["setup", "main", "main", "flush", "setup", "cleanup", "step"]
    assert names == [f"wholestep::{kind}" for kind in kinds]
