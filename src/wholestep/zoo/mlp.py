"""A multilayer perceptron classifier with dropout."""

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wholestep.zoo.case import Batch, ZooCase, seeded_generator


@dataclass(frozen=True)
class MLPConfig:
    """Sizes of an `MLP`."""

    features: int = 16
    width: int = 32
    hidden_layers: int = 2
    classes: int = 10
    dropout: float = 0.1


class MLP(nn.Module):
    """Linear, ReLU and dropout, repeated, then a linear classifier."""

    def __init__(self, config: MLPConfig) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        width_in = config.features
        for _ in range(config.hidden_layers):
            layers += [nn.Linear(width_in, config.width), nn.ReLU(), nn.Dropout(config.dropout)]
            width_in = config.width
        self.hidden = nn.Sequential(*layers)
        self.classifier = nn.Linear(width_in, config.classes)

    def forward(self, features: Tensor) -> Tensor:
        return self.classifier(self.hidden(features))


def make_batch(config: MLPConfig, batch_size: int, seed: int) -> Batch:
    """Normal features with uniform labels."""
    generator = seeded_generator(seed)
    return {
        "features": torch.randn(batch_size, config.features, generator=generator),
        "labels": torch.randint(config.classes, (batch_size,), generator=generator),
    }


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy of the class logits."""
    logits: Tensor = model(batch["features"])
    return F.cross_entropy(logits, batch["labels"])


def make_case(name: str, config: MLPConfig) -> ZooCase:
    """A zoo case that trains an `MLP` of these sizes."""
    return ZooCase(name, partial(MLP, config), partial(make_batch, config), loss)
