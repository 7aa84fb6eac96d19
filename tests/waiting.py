"""The same training in eager and compiled, where everything that can wait is left for the next call."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tests.parity import differences, snapshot
from tests.raw_memory import raw_memory
from tests.twins import named_values
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import wholestep
from wholestep import _waiting_torch
from wholestep.runtime import pending
from wholestep.runtime.held import GuardedParameter, GuardedTensor, HeldParameters

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
WORDS = torch.tensor([0, 1, 2, 3, 4, 0])
ROWS = torch.tensor([0, 2])


class Net(nn.Module):
    """A layer, an embedding that may fail, another layer: updates are applied before, at and behind the failure."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.words = nn.Embedding(5, 5)
        self.last = nn.Linear(5, 3)

    def forward(self, x: Tensor, words: Tensor = WORDS) -> Tensor:
        return self.last(torch.tanh(self.first(x)) * self.words(words))


def train_step(model: nn.Module, optimizer: Optimizer, x: Tensor, words: Tensor, rows: Tensor = ROWS) -> Tensor:
    optimizer.zero_grad()
    loss = model(x, words).index_select(0, rows).square().mean()
    loss.backward()
    optimizer.step()
    return loss


MAKERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": partial(SGD, lr=0.1),
    "momentum": partial(SGD, lr=0.1, momentum=0.9, foreach=True),
    "adamw": partial(AdamW, lr=0.01, foreach=False),
    "adamw fused": partial(AdamW, lr=0.01, fused=True),
}


class Side:
    def __init__(self, make: Callable[..., Optimizer], step: Callable[..., Any]) -> None:
        torch.manual_seed(0)
        self.model = Net()
        self.optimizer = make(self.model.parameters())
        self.step = step
        self.parameters = list(self.model.parameters())
        self.memory = [raw_memory(parameter) for parameter in self.parameters]


class Pair:
    """The same training in eager and compiled, all that can wait moved into the next call."""

    def __init__(self, optimizer: str = "adamw fused", step: Callable[..., Any] = train_step, **options: Any) -> None:
        self.compiled: Any = wholestep.compile(step, **{"cross_iteration": "all", **options})
        self.eager = Side(MAKERS[optimizer], step)
        self.ours = Side(MAKERS[optimizer], self.compiled)
        self.sides = (self.eager, self.ours)

    def step(self, *args: Any, **kwargs: Any) -> None:
        given = args or (X, WORDS)
        losses = [side.step(side.model, side.optimizer, *copy.deepcopy(given), **kwargs) for side in self.sides]
        assert torch.equal(*losses)

    def steps(self, number: int) -> None:
        for _ in range(number):
            self.step()

    def both(self, look: Callable[[nn.Module, Optimizer], Any]) -> None:
        """Look at both sides and compare what there is to be seen."""
        seen = [named_values("seen", look(side.model, side.optimizer)) for side in self.sides]
        assert differences(*seen) == []

    def assert_same(self) -> None:
        assert differences(*(snapshot(side.model, side.optimizer) for side in self.sides)) == []

    def assert_applied(self) -> None:
        """Everything is in memory already, and no guard is left."""
        assert not is_pending(self.ours)
        for expected, found in zip(self.eager.memory, self.ours.memory, strict=True):
            assert torch.equal(expected, found)
        self.assert_same()


def is_pending(side: Side) -> bool:
    """Whether guards are on: all of them, or none."""
    tensors = [value for state in side.optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    kinds = {type(value) for value in (*side.parameters, *tensors)}
    marks = {_waiting_torch.is_marked(value) for value in (*side.parameters, *tensors)}
    owns = {type(vars(module)["_parameters"]) for module in side.model.modules() if vars(module)["_parameters"]}
    if kinds <= {GuardedParameter, GuardedTensor}:
        assert marks == {True}
        assert owns == {HeldParameters}
        return True
    assert kinds <= {nn.Parameter, Tensor}
    assert marks == {False}
    assert owns == {dict}
    assert not is_anything_waiting()
    return False


def is_anything_waiting() -> bool:
    """Whether anything in this process waits."""
    return bool(pending._waiting)  # pyright: ignore[reportPrivateUsage]
