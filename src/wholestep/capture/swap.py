"""Lending the trace the user's model and optimizer: traced twins inside, and everything put back afterwards."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from wholestep import _torch
from wholestep.capture.entries import Entries
from wholestep.capture.optimizer_state import State


@contextlib.contextmanager
def lent_module(
    root: nn.Module, twin_of: Callable[[torch.Tensor], torch.Tensor]
) -> Generator[dict[nn.Module, dict[str, Any]]]:
    """Put twins into the parameter and buffer dicts of every submodule; on leaving, restore all their attributes.

    Attributes are restored whole (not just the tensors), so that a cache the forward leaves on the module does not keep
    traced tensors alive. Yields them as they were.
    """
    kept = [
        (module, dict(vars(module)), dict(_torch.own_parameters(module)), dict(_torch.own_buffers(module)))
        for module in root.modules()
    ]
    for module, _, parameters, buffers in kept:
        _torch.own_parameters(module).update(
            {k: cast(nn.Parameter, twin_of(p)) for k, p in parameters.items() if p is not None}
        )
        _torch.own_buffers(module).update({name: twin_of(b) for name, b in buffers.items() if b is not None})
    try:
        yield {module: attributes for module, attributes, _, _ in kept}
    finally:
        for module, attributes, parameters, buffers in kept:
            _refill(vars(module), attributes)
            _refill(_torch.own_parameters(module), parameters)
            _refill(_torch.own_buffers(module), buffers)


@contextlib.contextmanager
def lent_optimizer(
    optimizer: Optimizer,
    state: State,
    twin_of: Callable[[torch.Tensor], torch.Tensor],
    lift_state: Callable[[torch.Tensor, str, Any], Any],
    lift_rate: Callable[[int, Any], Any],
    lent_groups: dict[int, list[torch.Tensor]],
    wrappers: Sequence[Optimizer] = (),
) -> Generator[None]:
    """Give the optimizer twins of its parameters, of `state` and of its learning rates; restore it on leaving.

    `lent_groups` has the parameters of groups that were given twins already: optimizers may share their groups.
    `wrappers` stand for the optimizer, and may have attributes of theirs for its state.
    """
    kept_groups, kept_state = [dict(group) for group in optimizer.param_groups], optimizer.state
    groups, kept_order = optimizer.param_groups, [*optimizer.param_groups]
    kept_attributes = dict(vars(optimizer))
    traced_state: defaultdict[Any, Entries] = defaultdict(Entries)
    own: list[tuple[dict[str, Any], dict[str, Any]]] = []
    kept_wrappers = [(vars(wrapper), dict(vars(wrapper))) for wrapper in wrappers]
    try:
        for index, group in enumerate(optimizer.param_groups):
            parameters: list[torch.Tensor] = lent_groups.get(id(group)) or group["params"]
            for p in parameters:
                if p in state:
                    traced_state[twin_of(p)] = Entries({k: lift_state(p, k, value) for k, value in state[p].items()})
            if id(group) in lent_groups:
                continue
            lent_groups[id(group)] = parameters
            own.append((group, kept_groups[index]))
            group["params"] = [twin_of(p) for p in parameters]
            if "lr" in group:
                group["lr"] = lift_rate(index, group["lr"])
        for attributes, kept in kept_wrappers:
            if kept.get("state") is kept_state:
                attributes["state"] = traced_state
        optimizer.state = traced_state
        yield
    finally:
        for group, kept in own:
            _refill(group, kept)
            del lent_groups[id(group)]
        for attributes, kept in kept_wrappers:
            _refill(attributes, kept)
        _refill(vars(optimizer), kept_attributes)
        groups[:] = kept_order
        optimizer.state = kept_state


def _refill(target: dict[str, Any], content: dict[str, Any]) -> None:
    target.clear()
    target.update(content)
