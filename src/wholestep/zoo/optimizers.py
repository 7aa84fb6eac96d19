"""Optimizers to train the zoo with, in every implementation PyTorch offers."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn, optim
from torch.optim.optimizer import Optimizer, ParamsT

MakeOptimizer = Callable[[ParamsT], Optimizer]

_SGD = partial(optim.SGD, lr=0.05, momentum=0.9, weight_decay=1e-4)
_ADAM = partial(optim.Adam, lr=1e-2, weight_decay=1e-4)
_ADAMW = partial(optim.AdamW, lr=1e-2, weight_decay=1e-2)
_ADAGRAD = partial(optim.Adagrad, lr=1e-2, weight_decay=1e-4)
_RMSPROP = partial(optim.RMSprop, lr=1e-3, momentum=0.9, weight_decay=1e-4)

# foreach is always spelt out because its default depends on the device.
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": partial(_SGD, foreach=False),
    "sgd_nesterov": partial(_SGD, nesterov=True, foreach=False),
    "sgd_foreach": partial(_SGD, foreach=True),
    "sgd_fused": partial(_SGD, fused=True),
    "sgd_plain": partial(optim.SGD, lr=0.05, foreach=False),
    "adam": partial(_ADAM, foreach=False),
    "adam_foreach": partial(_ADAM, foreach=True),
    "adam_fused": partial(_ADAM, fused=True),
    "adamw": partial(_ADAMW, foreach=False),
    "adamw_foreach": partial(_ADAMW, foreach=True),
    "adamw_fused": partial(_ADAMW, fused=True),
    "adamw_amsgrad": partial(_ADAMW, amsgrad=True, foreach=False),
    "adamw_maximize": partial(_ADAMW, maximize=True, foreach=False),
    "adamw_fused_amsgrad": partial(_ADAMW, amsgrad=True, fused=True),
    "adagrad": partial(_ADAGRAD, foreach=False),
    "adagrad_fused": partial(_ADAGRAD, fused=True),
    "rmsprop": partial(_RMSPROP, foreach=False),
    "rmsprop_foreach": partial(_RMSPROP, foreach=True),
    "adafactor": partial(optim.Adafactor, lr=1e-2, weight_decay=1e-2, foreach=False),
    "nadam": partial(optim.NAdam, lr=2e-3, weight_decay=1e-4, foreach=False),
    "radam": partial(optim.RAdam, lr=1e-2, weight_decay=1e-4, foreach=False),
}
"""Factories by name; each takes parameters, or parameter groups, and returns an optimizer."""


def two_groups(model: nn.Module, *, lr: float = 1e-2, weight_decay: float = 1e-2) -> list[dict[str, Any]]:
    """Split the parameters into matrices, which decay, and the rest, which do not and go slower."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in parameters if parameter.ndim >= 2]
    vectors = [parameter for parameter in parameters if parameter.ndim < 2]
    return [
        {"params": matrices, "lr": lr, "weight_decay": weight_decay},
        {"params": vectors, "lr": lr / 2, "weight_decay": 0.0},
    ]
