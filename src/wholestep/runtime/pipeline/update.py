"""The optimizer's part of a pipelined step: gradients clipped over all ranks, and the update as one graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from wholestep.compiler import StepOptions
from wholestep.runtime.runner import StepRunner


def update(model: nn.Module, optimizer: Optimizer) -> None:
    """Apply the gradients that are there, and clear them. Parameters have the names that `model` gives them."""
    optimizer.step()
    optimizer.zero_grad()


class Update:
    """`update` as a graph for the parameters that have gradients: those of this rank's stages."""

    def __init__(self, lower: str) -> None:
        self._compiled = StepRunner(update, StepOptions(dynamic_batch=False, cross_iteration="none", lower=lower))

    def __call__(self, model: nn.Module, optimizer: Optimizer) -> None:
        """A rank whose stages have nothing to train still steps: hooks of the optimizer and schedulers count steps."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        is_trained = any(parameter.grad is not None for parameter in parameters)
        (self._compiled if is_trained else update)(model, optimizer)


def clip_gradients(
    parameters: Iterable[nn.Parameter],
    counted: Sequence[nn.Parameter],
    max_norm: float,
    total: Callable[[torch.Tensor, float], torch.Tensor],
    device: torch.device,
) -> torch.Tensor:
    """Scale gradients down if their norm over all ranks is above `max_norm`; returns that norm.

    Of all ranks of a pipeline, one counts a parameter; `total` adds up a number of each. To be called by all ranks.
    """
    gradients = [parameter.grad for parameter in counted if parameter.grad is not None]
    norm = total(nn.utils.get_total_norm(gradients).to(device).square(), max_norm).sqrt()
    nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm
