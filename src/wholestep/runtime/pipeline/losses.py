"""Where the loss of a model is: computed from its output and a target, or somewhere in the output itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from wholestep.errors import PipelineError

LossFunction = Callable[[Any, Any], torch.Tensor]


def loss_of(output: Any, target: Any, loss_fn: LossFunction | None, where: str | int | None) -> torch.Tensor:
    """The loss of one micro-batch.

    With `loss_fn` it is `loss_fn(output, target)`. Without, it is the entry `where` of the output (a key, an attribute
    or a position), by default its `loss`; a tensor is the loss itself.
    """
    if loss_fn is not None:
        return _checked(loss_fn(output, target), "loss_fn returned")
    if target is not None:
        raise PipelineError("this pipeline was given a target and has no loss_fn that would read it")
    if isinstance(output, torch.Tensor):
        return _checked(output, "the model returned")
    return _checked(_entry(output, "loss" if where is None else where), f"the output's {where or 'loss'} is")


def _entry(output: Any, where: str | int) -> Any:
    if isinstance(where, str) and not isinstance(output, Mapping):
        if hasattr(output, where):
            return getattr(output, where)
        raise PipelineError(
            f"the model returned a {type(output).__name__} without '{where}'; give loss_fn=, or loss= as a key"
        )
    try:
        return output[where]
    except (KeyError, IndexError, TypeError):
        there = f"keys {', '.join(map(str, output))}" if isinstance(output, Mapping) else f"{len(output)} entries"
        raise PipelineError(f"the model's output has no {where!r} to be the loss; it has {there}") from None


def _checked(loss: Any, text: str) -> torch.Tensor:
    if isinstance(loss, torch.Tensor) and not loss.dim():
        return loss
    what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
    raise PipelineError(f"a loss is one number for each micro-batch, and {text} {what}; take its mean")
