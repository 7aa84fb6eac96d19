"""torch's operators, as its own tests know them: each in a step that trains its float inputs.

The step computes the operator, a loss of all that it returns, gradients, and an update by SGD. Also the variant that
works in place, on a copy of the input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from tests.twins import World
from torch import Tensor, nn
from torch.testing._internal import common_methods_invocations
from torch.utils import _pytree as pytree

from benchmarks.coverage.cases import Case

NUM_STEPS = 3
SAMPLES = 2


# Out of sight of the steps: operators are objects that torch notes things on.
_FUNCTIONS: dict[str, Callable[..., Any]] = {}


def _seeded(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What draws, as a step would do it; that of torch's tests goes past whoever traces."""
    torch.manual_seed(42)
    return function(*args, **kwargs)


def cases(samples: int = SAMPLES) -> Iterator[Case]:
    known: Any = common_methods_invocations
    known.wrapper_set_seed = _seeded
    for info in known.op_db:
        family = f"{info.name}.{info.variant_test_name}" if info.variant_test_name else info.name
        if not info.supports_dtype(torch.float32, "cpu"):
            yield _excluded(family, "has no float32 kernel on the CPU")
            continue
        torch.manual_seed(0)
        try:
            given = [*info.sample_inputs("cpu", torch.float32, requires_grad=info.supports_autograd)]
        except Exception as error:
            yield _excluded(family, f"its samples cannot be made: {type(error).__name__}: {error}")
            continue
        for index in spread(len(given), samples):
            yield _case(family, f"{family} {index}", info.op, given[index])
            if index == 0 and info.inplace_variant is not None:
                yield _case(family, f"{family} in place", _in_place(info.inplace_variant), given[index])


def spread(number: int, most: int) -> list[int]:
    """Some places, evenly spread, the first and the last among them."""
    if number <= most:
        return [*range(number)]
    return sorted({round(place * (number - 1) / (most - 1)) for place in range(most)})


def _excluded(family: str, why: str) -> Case:
    return Case(family, family, World, lambda world: None, [], excluded=why)


def _in_place(function: Callable[..., Any]) -> Callable[..., Any]:
    def computed(first: Tensor, *args: Any, **kwargs: Any) -> Any:
        return function(first.clone(), *args, **kwargs)

    return computed


def _case(family: str, name: str, function: Callable[..., Any], sample: Any) -> Case:
    _FUNCTIONS[name] = function
    leaves, spec = pytree.tree_flatten(((sample.input, *sample.args), dict(sample.kwargs)))
    is_tensor = [isinstance(leaf, Tensor) for leaf in leaves]
    trained = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves]
    batch = tuple([leaf.detach() for leaf, is_one, is_own in zip(leaves, is_tensor, trained) if is_one and not is_own])

    def build() -> World:
        own = [nn.Parameter(leaf.detach().clone()) for leaf, is_own in zip(leaves, trained) if is_own]
        model = nn.ParameterList(own or [nn.Parameter(torch.ones(3))])
        return World(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01))

    def step(world: World, *tensors: Tensor) -> Any:
        world.optimizer.zero_grad()
        parameters, others = iter([*world.model.parameters()]), iter(tensors)
        given = [
            next(parameters) if is_own else next(others) if is_one else leaf
            for leaf, is_own, is_one in zip(leaves, trained, is_tensor, strict=True)
        ]
        args, kwargs = pytree.tree_unflatten(given, spec)
        returned = _FUNCTIONS[name](*args, **kwargs)
        loss = loss_of(returned, world.model.parameters())
        loss.backward()
        world.optimizer.step()
        return loss.detach(), pytree.tree_map_only(Tensor, lambda value: value.detach(), returned)

    return Case(family, name, build, step, [batch] * NUM_STEPS)


def loss_of(returned: Any, parameters: Iterable[Tensor]) -> Tensor:
    total = sum([parameter.sum() * 0.1 for parameter in parameters], torch.zeros(()))
    for value in pytree.tree_leaves(returned):
        if isinstance(value, Tensor) and value.requires_grad:
            real = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
            total = total + real.sin().sum()
    return total
