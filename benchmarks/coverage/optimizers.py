"""torch's optimizers: each with the options that torch tests it with, and in the company that training gives it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tests.twins import World, pair
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.testing._internal.common_optimizers import OptimizerInfo, optim_db

from benchmarks.coverage.cases import Case

NUM_STEPS = 20
MOST_CAPTURES = 3
_BATCHES = [pair(seed=seed) for seed in range(NUM_STEPS)]
_CLIPS: dict[str, Callable[[Any], Any]] = {
    "clipped by norm": lambda p: nn.utils.clip_grad_norm_(p, 0.5),
    "clipped by norm, one by one": lambda p: nn.utils.clip_grad_norm_(p, 0.5, foreach=False),
    "clipped by largest": lambda p: nn.utils.clip_grad_norm_(p, 0.1, norm_type=float("inf")),
    "clipped by value": lambda p: nn.utils.clip_grad_value_(p, 0.01),
}


class Net(nn.Module):
    """What optimizers tell apart: matrices, a kernel, biases, a scale and one number."""

    def __init__(self, *, only_matrices: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6, bias=not only_matrices)
        self.second = nn.Linear(6, 3, bias=not only_matrices)
        self.only_matrices = only_matrices
        if not only_matrices:
            self.norm = nn.LayerNorm(6)
            self.kernel = nn.Conv1d(1, 2, 3, padding=1)
            self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, features: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(features))
        if self.only_matrices:
            return self.second(hidden)
        hidden = self.kernel(self.norm(hidden).unsqueeze(1)).sum(1)
        return self.second(torch.tanh(hidden)) * self.temperature


class Sparse(nn.Module):
    """Rows of a table whose gradient is a sparse tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3, sparse=True)

    def forward(self, features: Tensor) -> Tensor:
        return self.table((features[:, 0] > 0).long())


def cases() -> Iterator[Case]:
    for info in optim_db:
        kind: Any = info.optim_cls
        name = kind.__name__
        for given in info.optim_inputs_func(device="cpu"):
            for way in _ways(info, given.kwargs):
                label = ", ".join([given.desc, *[f"{key}={value}" for key, value in way.items()]])
                yield _case(info, f"{name}: {label}", {**given.kwargs, **way})
        yield _case(info, f"{name}: two groups and a schedule", {}, num_groups=2, between=scheduled)
        for clip, function in _CLIPS.items():
            yield _case(info, f"{name}: {clip}", {}, clip=function)


def _ways(info: OptimizerInfo, options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield {}
    if "foreach" in info.supported_impls:
        yield {"foreach": True}
        yield {"foreach": False}
    if "fused" in info.supported_impls and "cpu" in info.supports_fused_on:
        yield {"fused": True}
    if info.has_capturable_arg:
        yield {"capturable": True}


def scheduled(world: World, *, number: int) -> None:
    """Another rate before each step, and zero once."""
    for group in world.optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].mul_(0.9)
        else:
            group["lr"] = 0.0 if number == 11 else 0.01 / (1 + number)


def _case(
    info: OptimizerInfo,
    name: str,
    options: dict[str, Any],
    *,
    num_groups: int = 1,
    clip: Callable[[Any], Any] | None = None,
    between: Callable[..., None] | None = None,
) -> Case:
    kind: Any = info.optim_cls
    only_matrices = kind is torch.optim.Muon
    make_model = Sparse if info.only_supports_sparse_grads else functools.partial(Net, only_matrices=only_matrices)

    def build() -> World:
        model = make_model()
        own = {key: value.clone() if isinstance(value, Tensor) else value for key, value in options.items()}
        return World(model=model, optimizer=kind(groups(model, num_groups), **own))

    step = closure_step if info.step_requires_closure else step_of(clip)
    family = kind.__name__
    return Case(family, name, build, step, _BATCHES, between=between, most_captures=MOST_CAPTURES)


def groups(model: nn.Module, number: int) -> Any:
    parameters = [*model.parameters()]
    if number == 1:
        return parameters
    return [{"params": parameters[0::2]}, {"params": parameters[1::2], "lr": 0.003, "weight_decay": 0.01}]


def step_of(clip: Callable[[Any], Any] | None = None) -> Callable[..., Tensor]:
    def step(world: World, features: Tensor, targets: Tensor) -> Tensor:
        world.optimizer.zero_grad()
        loss = nn.functional.mse_loss(world.model(features), targets)
        loss.backward()
        if clip is not None:
            clip(world.model.parameters())
        world.optimizer.step()
        return loss.detach()

    return step


def closure_step(world: World, features: Tensor, targets: Tensor) -> Tensor:
    def closure() -> Tensor:
        world.optimizer.zero_grad()
        loss = nn.functional.mse_loss(world.model(features), targets)
        loss.backward()
        return loss

    return world.optimizer.step(closure)


def second_order_step(world: World, features: Tensor, targets: Tensor) -> Tensor:
    world.optimizer.zero_grad()
    loss = nn.functional.mse_loss(world.model(features), targets)
    loss.backward(create_graph=True)
    world.optimizer.step()
    return loss.detach()


def optimizer_of(make: Callable[[nn.Module], Optimizer]) -> Callable[[], World]:
    """A builder of a world around an optimizer that is made of the model."""

    def build() -> World:
        model = Net()
        return World(model=model, optimizer=make(model))

    return build
