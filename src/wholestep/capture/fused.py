"""Fused optimizer kernels while tracing: the functional operator, and its results written back.

The fused kernels take their learning rate as a C++ double, which would bake a traced one into the graph, and their
in-place form cannot be functionalised by torch (it asserts on the empty list that stands for "no amsgrad"). So the
in-place call of the optimizer becomes the functional operator with a tensor learning rate, followed by copies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from wholestep import _torch

FUNCTIONS = _torch.FUSED_OPTIMIZERS


def call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Trace an in-place fused update as its functional twin; gradients are left alone unless they are unscaled."""
    functional = FUNCTIONS[function]
    in_place = _torch.overload_by_name(_torch.packet_name(functional) + "_", "tensor_lr")
    arguments = _torch.schema(functional).arguments
    bound = {argument.name: value for argument, value in zip(arguments, args, strict=False)} | kwargs
    learning_rate = bound["lr"]
    if not isinstance(learning_rate, torch.Tensor):
        bound["lr"] = torch.scalar_tensor(learning_rate, dtype=torch.float64)
    results = functional(**bound)
    written = [argument.name for argument in _torch.schema(in_place).arguments if _torch.is_written(argument)]
    for name, tensors in zip(written, results, strict=True):
        if name == "grads" and bound.get("grad_scale") is None:
            continue
        for old, new in zip(bound[name], tensors, strict=True):
            old.copy_(new)
