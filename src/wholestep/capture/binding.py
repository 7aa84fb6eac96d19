"""Where a slot's value lives between calls: how the runtime reads it before a step and writes it after."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from wholestep import _torch


@dataclass(frozen=True, eq=False)
class FixedTensor:
    """A parameter, or a constant from outside the step: always the same object."""

    tensor: torch.Tensor

    def read(self, leaves: list[Any]) -> Any:
        return self.tensor


@dataclass(frozen=True, eq=False)
class BufferOf:
    """A buffer, looked up by name because modules rebind their buffers."""

    module: nn.Module
    name: str

    def read(self, leaves: list[Any]) -> Any:
        return _torch.own_buffers(self.module)[self.name]


@dataclass(frozen=True, eq=False)
class StateOf:
    """An entry of the optimizer state of a parameter; `load_state_dict` exchanges these."""

    optimizer: Optimizer
    parameter: torch.Tensor
    key: str

    def read(self, leaves: list[Any]) -> Any:
        return self.optimizer.state[self.parameter][self.key]

    def write(self, value: Any, leaves: list[Any]) -> None:
        self.optimizer.state[self.parameter][self.key] = value


@dataclass(frozen=True, eq=False)
class GradOf:
    """The gradient of a parameter."""

    parameter: torch.Tensor

    def read(self, leaves: list[Any]) -> Any:
        return self.parameter.grad

    def write(self, value: Any, leaves: list[Any]) -> None:
        self.parameter.grad = value


@dataclass(frozen=True, eq=False)
class GradOfArgument:
    """The gradient of an argument that requires one."""

    index: int

    def read(self, leaves: list[Any]) -> Any:
        return leaves[self.index].grad

    def write(self, value: Any, leaves: list[Any]) -> None:
        leaves[self.index].grad = value


@dataclass(frozen=True, eq=False)
class LearningRate:
    """The learning rate of a parameter group, as a float or as the tensor the user put there."""

    optimizer: Optimizer
    group: int

    def read(self, leaves: list[Any]) -> Any:
        rate = self.optimizer.param_groups[self.group]["lr"]
        return rate if isinstance(rate, torch.Tensor) else float(rate)


@dataclass(frozen=True, eq=False)
class Argument:
    """A leaf of the call's arguments."""

    index: int

    def read(self, leaves: list[Any]) -> Any:
        return leaves[self.index]


@dataclass(frozen=True, eq=False)
class NumberOf:
    """A Python number of this call, computed before the graph runs (see `capture.record.program`)."""

    numbers: dict[str, Any]
    name: str

    def read(self, leaves: list[Any]) -> Any:
        number = self.numbers[self.name]
        return number if type(number) in (int, float) else number.item()


@dataclass(frozen=True, eq=False)
class DrawnTensor:
    """A tensor made of an array that Python draws at each call, or with `is_found` one that stands where it draws."""

    numbers: dict[str, Any]
    name: str
    make: Callable[[Any], Any]
    is_found: bool = False

    def read(self, leaves: list[Any]) -> Any:
        return self.make(self.numbers[self.name])


@dataclass(frozen=True, eq=False)
class AtPlace:
    """A tensor that the step finds in one of the user's objects; another one may stand there at the next call."""

    find: Callable[[], Any]

    def read(self, leaves: list[Any]) -> Any:
        return self.find()


Binding = (
    FixedTensor
    | BufferOf
    | StateOf
    | GradOf
    | GradOfArgument
    | LearningRate
    | Argument
    | NumberOf
    | DrawnTensor
    | AtPlace
)
Rebindable = StateOf | GradOf | GradOfArgument


def may_require_grad(value: Any) -> bool:
    """Whether a value is a tensor that could have a gradient."""
    return isinstance(value, torch.Tensor) and (value.dtype.is_floating_point or value.dtype.is_complex)
