"""Optimizer state in a checkpoint: under the names of parameters, compared with what the optimizer here would have."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from wholestep.capture.optimizer_state import initial_state
from wholestep.errors import CheckpointError

Groups = list[dict[str, Any]]


def class_name(optimizer: Optimizer) -> str:
    """The class of an optimizer, by which a checkpoint knows it."""
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def refuse_other_class(name: str, optimizer: Optimizer, saved: Any) -> None:
    """Adam and AdamW have the same options and state, and do not do the same with them. Plain torch tells no class."""
    if saved is not None and saved != class_name(optimizer):
        raise CheckpointError(f"{name} is a {saved} in it and a {class_name(optimizer)} here")


def refuse_other_names(name: str, here: set[str], there: set[str]) -> None:
    """Raise unless both sides have the same names."""
    if here - there:
        raise CheckpointError(f"it has no {name}.{sorted(here - there)[0]}")
    if there - here:
        raise CheckpointError(f"it has {name}.{sorted(there - here)[0]}, which is not here")


def optimizer_state(optimizer: Optimizer, names: Mapping[int, str], elsewhere: frozenset[str]) -> dict[str, Any]:
    """The state dict of an optimizer with names in place of numbers, if its parameters have names.

    In a pipeline only ranks with the stage of a parameter change its state, so only they tell it; `elsewhere` are
    those of other ranks.
    """
    state = optimizer.state_dict()
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    named = {
        number: names[id(parameter)] if names else str(number)
        for number, parameter in zip(numbers, parameters, strict=True)
    }
    entries = {named[number]: value for number, value in state["state"].items() if named[number] not in elsewhere}
    groups = state["param_groups"]
    if names:
        groups = [group | {"params": [named[number] for number in group["params"]]} for group in groups]
    return ({"state": entries} if entries else {}) | {"param_groups": groups}


def prepare_optimizer(
    name: str, optimizer: Optimizer, names: Mapping[int, str], saved: Mapping[str, Any]
) -> Callable[[], None]:
    """Compare groups, options and state, and put what was saved in the order that parameters have here."""
    groups: Groups = saved.get("param_groups", [])
    if len(groups) != len(optimizer.param_groups):
        raise CheckpointError(f"{name} has {len(groups)} parameter groups in it and {len(optimizer.param_groups)} here")
    state = dict(saved.get("state", {}))
    ready_groups: Groups = []
    for index, (group, own) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
        where = f"{name}.param_groups[{index}]"
        keys = _keys_in_order(where, group["params"], own["params"], names)
        options = _options(where, group, own, optimizer)
        ready_groups.append(options | {"params": keys})
        for key, parameter in zip(keys, own["params"], strict=True):
            if key in state:
                _refuse_other_state(f"{name}.state.{key}", state[key], _fresh_state(optimizer, options, parameter))
                state[key] = {entry: _laid_out(value, parameter) for entry, value in state[key].items()}
    return lambda: optimizer.load_state_dict({"state": state, "param_groups": ready_groups})


def _keys_in_order(where: str, saved: list[Any], own: list[torch.Tensor], names: Mapping[int, str]) -> list[str]:
    """What each parameter of a group is called in the checkpoint: by its name, or by its number."""
    if len(saved) != len(own):
        raise CheckpointError(f"{where} has {len(saved)} parameters in it and {len(own)} here")
    if all(isinstance(key, int) for key in saved):
        return [str(key) for key in saved]
    if not names:
        raise CheckpointError(f"{where} names its parameters: pass the model they belong to as well")
    keys = [names[id(parameter)] for parameter in own]
    refuse_other_names(where, set(keys), set(saved))
    return keys


def _options(where: str, group: dict[str, Any], own: dict[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """The options of a group; those that are tensors (a learning rate may be) on the device they have here.

    Versions of torch add options, which then stay as they are here, and drop some. An optimizer that has options which
    were not saved, and lacks some that were, is another one.
    """
    missing = [option for option in optimizer.defaults if option not in group]
    unknown = [option for option in group if option not in own and option not in _OF_SCHEDULES]
    if missing and unknown:
        raise CheckpointError(
            f"{where} has no '{missing[0]}' in it and '{unknown[0]}' instead: it was saved from another optimizer than "
            f"{type(optimizer).__name__}"
        )
    kept = {option: own[option] for option in missing if option in own}
    return kept | {
        option: value.to(own[option].device)
        if isinstance(value, torch.Tensor) and isinstance(own.get(option), torch.Tensor)
        else value
        for option, value in group.items()
    }


_OF_SCHEDULES = ("initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr")
"""What schedulers of torch leave in groups; they need not have been made yet."""


def _fresh_state(optimizer: Optimizer, options: dict[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
    """The state that this optimizer would make for a parameter with these options; empty if that is not known."""
    twin = copy.copy(optimizer)
    twin.state = defaultdict(dict)
    twin.param_groups = [options | {"params": [parameter]}]
    try:
        return initial_state(twin).get(parameter, {})
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"its options do not suit {type(optimizer).__name__}: {error}") from error


def _refuse_other_state(where: str, saved: Mapping[str, Any], fresh: Mapping[str, Any]) -> None:
    for entry, value in fresh.items():
        if entry not in saved:
            raise CheckpointError(f"it has no {where}.{entry}")
        found = saved[entry]
        if isinstance(value, torch.Tensor) and isinstance(found, torch.Tensor) and found.shape != value.shape:
            raise CheckpointError(f"{where}.{entry} has shape {tuple(found.shape)} in it and {tuple(value.shape)} here")


def _laid_out(value: Any, parameter: torch.Tensor) -> Any:
    """State of the shape of its parameter lies in memory as that does (channels last), as if it had been made there."""
    if not isinstance(value, torch.Tensor) or value.shape != parameter.shape or value.stride() == parameter.stride():
        return value
    return torch.empty_like(parameter, dtype=value.dtype, device="cpu", requires_grad=False).copy_(value)
