"""A model whose computation is sleeping: weights and activations are real, and so is all that travels.

More ranks than cores can be measured with it: what they compute does not need a core.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn


def wake_in_time() -> None:
    """Let this thread come first when it wakes: what it stands for is a device that nobody else computes on."""
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))


@cache
def _lateness_s() -> float:
    """How late the system wakes up who sleeps, in the middle."""
    late_s: list[float] = []
    for _ in range(25):
        begin = time.perf_counter()
        time.sleep(0.01)
        late_s.append(time.perf_counter() - begin - 0.01)
    return statistics.median(late_s)


def _sleep(time_us: float) -> None:
    time.sleep(max(0.0, time_us / 1e6 - _lateness_s()))


@torch.library.custom_op("lab::work", mutates_args=())
def work(x: Tensor, weight: Tensor, time_us: float) -> Tensor:
    """What stands in for a layer."""
    _sleep(time_us)
    return x.clone()


@torch.library.custom_op("lab::input_gradient", mutates_args=())
def input_gradient(gradient: Tensor, time_us: float) -> Tensor:
    """The half of its backward that the layer before waits for."""
    _sleep(time_us)
    return gradient.clone()


@torch.library.custom_op("lab::weight_gradient", mutates_args=())
def weight_gradient(gradient: Tensor, weight: Tensor, time_us: float) -> Tensor:
    """The other half."""
    _sleep(time_us)
    return torch.zeros_like(weight)


@work.register_fake
def _(x: Tensor, weight: Tensor, time_us: float) -> Tensor:
    return torch.empty_like(x)


@input_gradient.register_fake
def _(gradient: Tensor, time_us: float) -> Tensor:
    return torch.empty_like(gradient)


@weight_gradient.register_fake
def _(gradient: Tensor, weight: Tensor, time_us: float) -> Tensor:
    return torch.empty_like(weight)


def _set_up(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:
    _, weight, ctx.time_us = inputs
    ctx.save_for_backward(weight)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
    [weight] = ctx.saved_tensors
    gradient = gradient.contiguous()
    return input_gradient(gradient, ctx.time_us), weight_gradient(gradient, weight, ctx.time_us), None


work.register_autograd(_backward, setup_context=_set_up)


class Sleeper(nn.Module):
    """One layer: sleeps for a forward, and again for each half of its backward."""

    def __init__(self, num_weights: int, time_us: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_weights))
        self.time_us = time_us

    def forward(self, x: Tensor) -> Tensor:
        return work(x, self.weight, self.time_us)


def sleepers(num_layers: int, num_weights: int, time_us: float) -> nn.Sequential:
    """Layers in a row."""
    return nn.Sequential(*[Sleeper(num_weights, time_us) for _ in range(num_layers)])


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    """Reads little of either."""
    return (output[:, :1] * target[:, :1]).mean()
