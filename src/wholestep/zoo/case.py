"""What a zoo entry is: a model, data to feed it and a loss to train it with."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class ZooCase:
    """One model of the zoo.

    `build()` makes the model and seeds nothing: the caller owns the global RNG.
    `make_batch(batch_size, seed)` draws from a generator of its own, never from the global RNG,
    and dimension 0 of every tensor it returns is the batch.
    `loss(model, batch)` runs the forward pass and returns a scalar.
    """

    name: str
    build: Callable[[], nn.Module]
    make_batch: Callable[[int, int], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]


def seeded_generator(seed: int) -> torch.Generator:
    """A CPU generator of its own, so that making data leaves the global RNG alone."""
    return torch.Generator().manual_seed(seed)


def init_normal(model: nn.Module, deviation: float = 0.02) -> None:
    """Draw every linear and embedding weight from a narrow normal and zero the linear biases."""
    for module in model.modules():
        if not isinstance(module, nn.Linear | nn.Embedding):
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if name == "bias":
                nn.init.zeros_(parameter)
            else:
                nn.init.normal_(parameter, mean=0.0, std=deviation)
