"""Copies of compiled steps, alone and with what holds them: as functions and methods are copied."""

from __future__ import annotations

import copy

import torch
from tests.twins import square_step
from torch import Tensor, nn

import wholestep


class Trainer:
    """Holds a model and a step, which is a compiled method of its own."""

    def __init__(self) -> None:
        self.model = nn.Linear(3, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.step = wholestep.compile(self.advance)

    def advance(self, batch: Tensor) -> Tensor:
        return square_step(self.model, self.optimizer, batch)


def test_a_step_of_a_function_is_its_own_copy() -> None:
    step = wholestep.compile(square_step)
    held = {"step": step, "model": nn.Linear(3, 2)}
    assert copy.copy(step) is step
    assert copy.deepcopy(held)["step"] is step


def test_a_copied_trainer_trains_its_own_model() -> None:
    torch.manual_seed(0)
    batch = torch.randn(4, 3)
    first = Trainer()
    first.step(batch)
    second = copy.deepcopy(first)
    before = first.model.weight.detach().clone()
    second.step(batch)
    assert torch.equal(first.model.weight, before)
    assert not torch.equal(second.model.weight, before)
    first.step(batch)
    assert torch.equal(first.model.weight, second.model.weight)


def test_the_step_of_a_trainer_can_be_copied_alone() -> None:
    first = Trainer()
    copied = copy.deepcopy(first.step)
    before = first.model.weight.detach().clone()
    copied(torch.randn(4, 3))
    assert torch.equal(first.model.weight, before)
