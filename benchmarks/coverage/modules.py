"""torch's modules, as its own tests know them: each trained with SGD on the inputs they are tested with."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from tests.twins import World
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.testing._internal.common_modules import ModuleInfo, module_db
from torch.utils import _pytree as pytree

from benchmarks.coverage.cases import Case
from benchmarks.coverage.ops import NUM_STEPS, loss_of, spread

SAMPLES = 3


def cases(samples: int = SAMPLES) -> Iterator[Case]:
    for info in module_db:
        family = info.name
        torch.manual_seed(0)
        try:
            given = info.module_inputs_func(info, "cpu", torch.float32, requires_grad=True, training=True)
        except Exception as error:
            why = f"its samples cannot be made: {type(error).__name__}: {error}"
            yield Case(family, family, World, lambda world: None, [], excluded=why)
            continue
        for index in spread(len(given), samples):
            yield _case(info, f"{family} {index}", given[index])


def _case(info: ModuleInfo, name: str, sample: Any) -> Case:
    args, kwargs = sample.constructor_input.args, sample.constructor_input.kwargs
    forward = (sample.forward_input.args, sample.forward_input.kwargs)
    given, named = pytree.tree_map_only(Tensor, lambda value: value.detach(), forward)

    def build() -> World:
        model = info.module_cls(*copy.deepcopy(args), **copy.deepcopy(kwargs)).train()
        if any(map(is_lazy, model.parameters())):
            model(*copy.deepcopy(given), **copy.deepcopy(named))  # what is made lazily is made beforehand
        parameters = [*model.parameters()] or [torch.nn.Parameter(torch.ones(3))]
        return World(model=model, optimizer=torch.optim.SGD(parameters, lr=0.01))

    def step(world: World, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        world.optimizer.zero_grad()
        own = pytree.tree_map_only(Tensor, _trainable, (given, named))
        returned = world.model(*own[0], **own[1])
        loss = loss_of(returned, world.optimizer.param_groups[0]["params"])
        loss.backward()
        world.optimizer.step()
        gradients = [leaf.grad for leaf in pytree.tree_leaves(own) if isinstance(leaf, Tensor) and leaf.is_leaf]
        return loss.detach(), gradients, pytree.tree_map_only(Tensor, lambda value: value.detach(), returned)

    return Case(info.name, name, build, step, [(given, named)] * NUM_STEPS)


def _trainable(value: Tensor) -> Tensor:
    """An input with a gradient of its own, as in the middle of a network."""
    return value.detach().clone().requires_grad_() if value.is_floating_point() else value
