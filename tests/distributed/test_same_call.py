"""Ranks that run something else in one call learn it before the first collective of that call.

Everything they run has been agreed on before: only what is chosen in the odd call differs. Rank 1 is the odd one.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.distributed.ranks import run_ranks
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import wholestep
from wholestep import CaptureError, RankError, VerificationError, WholestepError
from wholestep.runtime import differential
from wholestep.runtime.specialization import Specialization

pytestmark = pytest.mark.distributed

SOON_S = 10.0
CALLS = 7
"""Not one of those (2, 4, 8, ...) in which ranks compare what may change with every call."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 5)
        self.b = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


def train(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def train_otherwise(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    model(x).abs().mean().backward()
    optimizer.step()


def train_clipped(model: nn.Module, optimizer: Optimizer, x: Tensor, clips: bool) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    if clips:
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()


def train_scaled(model: nn.Module, optimizer: Optimizer, x: Tensor, scale: float) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(scale)
    optimizer.step()


def compiled(function: Callable[..., None], cross_iteration: str = "none") -> Any:
    return wholestep.compile(function, data_parallel="replicate", cross_iteration=cross_iteration)


def pair() -> tuple[Net, SGD]:
    model = Net()
    return model, SGD(model.parameters(), lr=0.1, momentum=0.9)


def batch(number: int) -> Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))


def swapped(steps: list[Any], pairs: list[tuple[Net, SGD]]) -> list[Net]:
    """Two kinds of call in turn; in the last turn rank 1 makes the second one first."""
    for number in range(CALLS):
        kinds = list(zip(steps, pairs, strict=True))
        if number == CALLS - 1 and dist.get_rank() == 1:
            kinds.reverse()
        for step, (model, optimizer) in kinds:
            step(model, optimizer, batch(number))
    return [model for model, _ in pairs]


def models_in_another_order(pairs: list[tuple[Net, SGD]]) -> None:
    step = compiled(train, "all")
    swapped([step, step], pairs)


def steps_in_another_order(pairs: list[tuple[Net, SGD]]) -> None:
    swapped([compiled(train), compiled(train_otherwise)], pairs)


def another_optimizer(pairs: list[tuple[Net, SGD]]) -> None:
    (model, optimizer), step = pairs[0], compiled(train)
    other = SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number in range(CALLS):
        is_other = dist.get_rank() == 1 if number == CALLS - 1 else number % 2 == 1
        step(model, other if is_other else optimizer, batch(number))


def clipping_on_one_rank(pairs: list[tuple[Net, SGD]]) -> None:
    (model, optimizer), step = pairs[0], compiled(train_clipped)
    for number in range(CALLS):
        step(model, optimizer, batch(number), dist.get_rank() == 1 if number == CALLS - 1 else number % 2 == 1)


def a_layer_frozen_on_one_rank(pairs: list[tuple[Net, SGD]]) -> None:
    (model, optimizer), step = pairs[0], compiled(train)
    for number in range(CALLS):
        model.a.requires_grad_(dist.get_rank() == 1 if number == CALLS - 1 else number % 2 == 1)
        step(model, optimizer, batch(number))


def another_number(pairs: list[tuple[Net, SGD]]) -> None:
    (model, optimizer), step = pairs[0], compiled(train_scaled, "all")
    for number in range(CALLS):
        step(model, optimizer, batch(number), 1 / (1 + number + (number == CALLS - 1) * dist.get_rank()))


def another_rate(pairs: list[tuple[Net, SGD]]) -> None:
    (model, optimizer), step = pairs[0], compiled(train)
    for number in range(CALLS):
        optimizer.param_groups[0]["lr"] = 0.1 + 0.1 * (number == CALLS - 1) * dist.get_rank()
        step(model, optimizer, batch(number))


def another_constant(pairs: list[tuple[Net, SGD]]) -> None:
    (model, optimizer), scale = pairs[0], torch.tensor(0.5 + dist.get_rank())

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
        train_scaled(model, optimizer, x, scale)  # pyright: ignore[reportArgumentType]

    compiled(step)(model, optimizer, batch(0))


def train_what_is_not_frozen(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = None
    model(x).square().mean().backward()
    optimizer.step()


def another_gradient_of_before_it_was_frozen(pairs: list[tuple[Net, SGD]]) -> None:
    model, optimizer = pairs[0]
    model(batch(0)).square().mean().backward()
    model.a.bias.requires_grad_(False)
    compiled(train_what_is_not_frozen)(model, optimizer, batch(1))


def other_values_in_the_state(pairs: list[tuple[Net, SGD]]) -> None:
    model, optimizer = pairs[0]
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, dist.get_rank())
    compiled(train)(model, optimizer, batch(0))


def train_by_own_loss(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(loss.detach())
    optimizer.step()


def an_update_by_the_own_loss(pairs: list[tuple[Net, SGD]]) -> None:
    compiled(train_by_own_loss)(*pairs[0], batch(0))


SCENARIOS: dict[Callable[[list[tuple[Net, SGD]]], None], list[str]] = {
    models_in_another_order: ["the models", "a.weight"],
    steps_in_another_order: ["the compiled steps", "'train ", "'train_otherwise "],
    another_optimizer: ["the optimizers"],
    clipping_on_one_rank: ["clipping and updates"],
    a_layer_frozen_on_one_rank: ["the gradients", "a.weight"],
    another_number: ["numbers that updates are made with", "0.125"],
    another_rate: ["numbers that updates are made with", "0.2"],
    another_constant: ["tensors that updates are made with", "0.5", "1.5"],
    another_gradient_of_before_it_was_frozen: ["tensors that updates are made with", "grad.a.bias"],
    other_values_in_the_state: ["state of a.weight['momentum_buffer']"],
    an_update_by_the_own_loss: ["test_same_call.py", "the update of a.weight is computed from this rank's own batch"],
}


@dataclass(frozen=True)
class Ending:
    text: str
    parameters: list[Tensor]


def endings() -> dict[str, Ending]:
    """All scenarios, one after another: a group whose ranks have heard each other in time can be used again."""
    found: dict[str, Ending] = {}
    for scenario in SCENARIOS:
        torch.manual_seed(0)
        pairs = [pair(), pair()]
        text = ""
        try:
            scenario(pairs)
        except (RankError, CaptureError) as error:
            text = str(error)
        found[scenario.__name__] = Ending(text, [p.detach().clone() for model, _ in pairs for p in model.parameters()])
    return found


def test_ranks_that_run_something_else() -> None:
    first, second = run_ranks(endings, 2)
    for scenario, named in SCENARIOS.items():
        mine, other = first[scenario.__name__], second[scenario.__name__]
        for word in named:
            assert word in mine.text, (scenario, mine.text)
            assert word in other.text, (scenario, other.text)
        assert all(map(torch.equal, mine.parameters, other.parameters)), scenario


FAILING, CLIPPING = 3, 5
"""Numbers of calls in which rank 1 cannot compile its batch, and in which it alone clips."""


def _calls_of_one_rank(odd: list[int], *, leaves_out: bool = False) -> tuple[list[Any], float, list[Tensor]]:
    """The odd calls are refused on all ranks, or left out; training goes on with the next one."""
    torch.manual_seed(0)
    model, optimizer = pair()
    step = compiled(train_clipped, "all")
    refused: list[Any] = []
    started = time.monotonic()
    for number in range(CALLS):
        is_odd = dist.get_rank() == 1 and number in odd
        if number in odd and leaves_out:
            continue
        x = batch(number)[:, :3] if is_odd and number == FAILING else batch(number)
        try:
            step(model, optimizer, x, is_odd and number == CLIPPING)
        except WholestepError as error:
            refused.append((number, type(error).__name__, str(error)))
    return refused, time.monotonic() - started, [parameter.detach().clone() for parameter in model.parameters()]


def _calls_with_none_odd(odd: list[int]) -> Any:
    return _calls_of_one_rank(odd, leaves_out=True)


@pytest.mark.parametrize("odd", [[FAILING], pytest.param([FAILING, CLIPPING], marks=pytest.mark.slow)])
def test_all_go_on_after_a_call_that_one_rank_could_not_make(odd: list[int]) -> None:
    """It says so instead of its word: ranks whose words are counted differently would wait for each other."""
    both = run_ranks(_calls_of_one_rank, 2, odd)
    kinds = {FAILING: ["RankError", "CaptureError"], CLIPPING: ["RankError", "RankError"]}
    texts = {FAILING: ["rank 1 could not compile the step", ""], CLIPPING: ["rank 1 has something new to agree on"] * 2}
    for rank, (refused, seconds, _) in enumerate(both):
        assert [(number, kind) for number, kind, _ in refused] == [(number, kinds[number][rank]) for number in odd]
        assert all(texts[number][rank] in text for number, _, text in refused), refused
        assert seconds < SOON_S
    for _, _, expected in run_ranks(_calls_with_none_odd, 2, odd):
        for _, _, found in both:
            assert all(map(torch.equal, found, expected))


def _difference_on_rank_1() -> tuple[list[tuple[int, bool]], list[Tensor]]:
    """Rank 1 finds a difference in its second call; the link is measured, with another default dtype there."""
    model, optimizer = pair()
    step = wholestep.compile(train, data_parallel="replicate", verify=3)
    refused: list[tuple[int, bool]] = []
    compare, is_odd = differential.compare, dist.get_rank() == 1
    torch.set_default_dtype(torch.float64 if is_odd else torch.float32)
    try:
        for number in range(5):
            if is_odd and number == 1:
                differential.compare = lambda expected, found: {"param.a.weight": 1e-3}
            try:
                step(model, optimizer, batch(number).float())
            except VerificationError as error:
                refused.append((number, "on rank 1" in str(error)))
            differential.compare = compare
    finally:
        torch.set_default_dtype(torch.float32)
        differential.compare = compare
    return refused, [parameter.detach().clone() for parameter in model.parameters()]


def test_the_verdict_of_a_check_is_one_for_all_ranks() -> None:
    """The state before the call is back everywhere. Ranks may have other default dtypes."""
    (refused, mine), (refused_too, other) = run_ranks(_difference_on_rank_1, 2)
    assert refused == refused_too == [(1, True)]
    assert all(map(torch.equal, mine, other))


def _raise(*_: object, **__: object) -> None:
    raise KeyError


def _num_threads_by_life() -> list[int]:
    """Threads of this process after each life of a group that a step has run on, the last call of which has raised."""
    found: list[int] = []
    for _ in range(3):
        group: Any = dist.new_group()
        model = Net()
        optimizer = SGD(model.parameters(), lr=0.1)
        step = wholestep.compile(train, data_parallel=group)
        for _ in range(2):
            step(model, optimizer, torch.ones(2, 4))
        with mock.patch.object(Specialization, "run", _raise), pytest.raises(KeyError):
            step(model, optimizer, torch.ones(2, 4))
        dist.destroy_process_group(group)
        del step, model, optimizer, group
        gc.collect()
        found.append(len(os.listdir("/proc/self/task")))
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_what_ranks_talk_through_goes_with_the_group() -> None:
    for first, *others in run_ranks(_num_threads_by_life, 2):
        assert others == [first, first]
