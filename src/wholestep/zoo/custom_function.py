"""A model whose activations carry a hand-written backward that autograd would not derive."""

from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from wholestep.zoo import mlp
from wholestep.zoo.case import Batch, ZooCase

GRADIENT_GAIN = 3.0
ROUNDING_LEVELS = 4.0


class AmplifiedTanh(torch.autograd.Function):
    """tanh whose gradient is `GRADIENT_GAIN` times too large, so that losing it is a smooth error."""

    @staticmethod
    def forward(ctx: Any, features: Tensor) -> Tensor:
        activated = torch.tanh(features)
        ctx.save_for_backward(activated)
        return activated

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        (activated,) = ctx.saved_tensors
        return GRADIENT_GAIN * grad_outputs[0] * (1.0 - activated * activated)


class StraightThroughRound(torch.autograd.Function):
    """Rounding that passes the gradient straight through within [-1, 1]; autograd would give zero."""

    @staticmethod
    def forward(features: Tensor, levels: float) -> Tensor:
        return torch.round(features * levels) / levels

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        (features,) = ctx.saved_tensors
        return grad_outputs[0] * (features.abs() <= 1.0), None


def amplified_tanh(features: Tensor) -> Tensor:
    """`AmplifiedTanh` with a type."""
    return cast(Tensor, AmplifiedTanh.apply(features))  # pyright: ignore[reportUnknownMemberType]


def straight_through_round(features: Tensor, levels: float = ROUNDING_LEVELS) -> Tensor:
    """`StraightThroughRound` with a type."""
    return cast(Tensor, StraightThroughRound.apply(features, levels))  # pyright: ignore[reportUnknownMemberType]


@dataclass(frozen=True)
class QuantizedConfig:
    """Sizes of a `QuantizedClassifier`."""

    features: int = 16
    width: int = 32
    classes: int = 10
    dropout: float = 0.1


class QuantizedClassifier(nn.Module):
    """An MLP that squashes with `AmplifiedTanh` and quantizes with `StraightThroughRound`."""

    def __init__(self, config: QuantizedConfig) -> None:
        super().__init__()
        self.first = nn.Linear(config.features, config.width)
        self.second = nn.Linear(config.width, config.width)
        self.classifier = nn.Linear(config.width, config.classes)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, features: Tensor) -> Tensor:
        squashed = amplified_tanh(self.first(features))
        quantized = straight_through_round(self.second(self.dropout(squashed)))
        return self.classifier(self.dropout(quantized))


def make_batch(config: QuantizedConfig, batch_size: int, seed: int) -> Batch:
    """Normal features with uniform labels."""
    sizes = mlp.MLPConfig(features=config.features, classes=config.classes)
    return mlp.make_batch(sizes, batch_size, seed)


def make_case(name: str, config: QuantizedConfig) -> ZooCase:
    """A zoo case that trains a `QuantizedClassifier` of these sizes."""
    return ZooCase(name, partial(QuantizedClassifier, config), partial(make_batch, config), mlp.loss)
