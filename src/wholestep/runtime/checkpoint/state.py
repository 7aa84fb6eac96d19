"""What of models, optimizers and other objects a checkpoint holds, under which names, and how it gets back into them.

The content is what one would give to `torch.distributed.checkpoint` by hand: `{"model": model.state_dict(), ...}`, with
optimizer state under the names of parameters as `torch.distributed.checkpoint.state_dict` has it. It is taken from the
objects' own `state_dict()`: torch's helper would first take a step of an optimizer that has no state yet.

Getting it back has two moments. `prepare` compares everything that can be compared and raises; what it returns puts the
values in place.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from wholestep.errors import CheckpointError
from wholestep.runtime.pipeline.pipe import Pipe

Objects = Mapping[str, Any]
"""What a user passed, by name: modules, optimizers, pipelines, objects with a state dict, dicts."""
Apply = Callable[[], None]

PER_RANK = "per_rank"
_PIPE_STEPS = "pipeline_steps"
RESERVED = (PER_RANK, _PIPE_STEPS)

_SCALARS = (bool, int, float, complex, str, type(None), torch.Size, torch.dtype, torch.device)
_WHOLE = "wholestep: kept whole"


@dataclass(frozen=True)
class State:
    """The content of a checkpoint as this rank has it.

    `parameters` are the keys of parameters, `optimizers` the names of optimizers: their tensors are the same on all
    ranks that have them.
    """

    content: dict[str, Any]
    parameters: frozenset[str]
    optimizers: tuple[str, ...]

    def is_alike(self, key: str) -> bool:
        """Whether any rank may write an entry. Buffers, such as running means, may differ: the lowest rank's count."""
        return key in self.parameters or key.startswith(tuple(f"{name}.state." for name in self.optimizers))


def collect(objects: Objects) -> State:
    """What is to be saved. Nothing is copied yet."""
    content: dict[str, Any] = {}
    parameters: set[str] = set()
    pipes = {name: value for name, value in objects.items() if isinstance(value, Pipe)}
    for name, value in objects.items():
        if isinstance(value, Optimizer):
            content[name] = _kept(_optimizer_state(value, _names(value, objects), pipes.values()), name)
        elif isinstance(value, nn.Module | Pipe):
            model = _module_of(value)
            state = model.state_dict()
            elsewhere = value.names_elsewhere() if isinstance(value, Pipe) else ()
            content[name] = _kept({key: state[key] for key in state if key not in elsewhere}, name)
            parameters |= {f"{name}.{key}" for key, _ in model.named_parameters(remove_duplicate=False)}
        else:
            content[name] = _kept(_plain_state(value, name), name)
    if pipes:
        content[_PIPE_STEPS] = {name: pipe.num_steps for name, pipe in pipes.items()}
    optimizers = tuple(name for name, value in objects.items() if isinstance(value, Optimizer))
    return State(content, frozenset(parameters), optimizers)


def prepare(objects: Objects, content: Mapping[str, Any]) -> list[Apply]:
    """What to do so that objects have the state that was read; raises `CheckpointError` if it does not fit them."""
    found = {name: _released(value) for name, value in content.items()}
    absent = [name for name in objects if name not in found]
    if absent:
        raise CheckpointError(f"it has no '{absent[0]}'")
    actions: list[Apply] = []
    for name, value in objects.items():
        saved: Any = found[name]
        if isinstance(value, Optimizer | nn.Module | Pipe | dict) and not isinstance(saved, Mapping):
            raise CheckpointError(f"'{name}' is no dict in it")
        if isinstance(value, Optimizer):
            actions.append(_prepare_optimizer(name, value, _names(value, objects), saved))
        elif isinstance(value, nn.Module | Pipe):
            actions.append(_prepare_module(name, _module_of(value), saved))
        elif isinstance(value, dict):
            actions.append(_filling(cast("dict[Any, Any]", value), saved))
        else:
            actions.append(lambda value=value, saved=saved: value.load_state_dict(saved))
        if isinstance(value, Pipe):
            actions.append(_counting(value, found.get(_PIPE_STEPS, {}).get(name, 0)))
    return actions


def names_to_read(objects: Objects) -> list[str]:
    """The parts of a checkpoint that hold the state of these objects."""
    return [*objects, *([_PIPE_STEPS] if any(isinstance(value, Pipe) for value in objects.values()) else [])]


def _plain_state(value: Any, name: str) -> Any:
    if isinstance(value, dict):
        return cast("dict[Any, Any]", value)
    if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        return value.state_dict()
    raise CheckpointError(
        f"{name} is a {type(value).__name__}: a checkpoint holds modules, optimizers, pipelines, objects with "
        "state_dict() and load_state_dict(), and dicts"
    )


def _module_of(value: nn.Module | Pipe) -> nn.Module:
    """The module with the names that the user gave: wrappers put something in front of them."""
    module = value.model if isinstance(value, Pipe) else value
    if isinstance(module, DistributedDataParallel):
        return _module_of(module.module)
    inner = getattr(module, "_orig_mod", None)  # what `torch.compile` made
    return _module_of(inner) if isinstance(inner, nn.Module) else module


def _prepare_module(name: str, module: nn.Module, saved: Mapping[str, Any]) -> Apply:
    state = module.state_dict()
    _refuse_other_names(name, set(state), set(saved))
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and _shape(saved[key]) != value.shape:
            raise CheckpointError(f"{name}.{key} has shape {_shape(saved[key])} in it and {tuple(value.shape)} here")
    state.update(saved)  # what else the state dict carries, the versions of modules, stays
    return lambda: _load_module(module, state)


def _load_module(module: nn.Module, state: Mapping[str, Any]) -> None:
    module.load_state_dict(state)


def _refuse_other_names(name: str, here: set[str], there: set[str]) -> None:
    if here - there:
        raise CheckpointError(f"it has no {name}.{sorted(here - there)[0]}")
    if there - here:
        raise CheckpointError(f"it has {name}.{sorted(there - here)[0]}, which is not here")


def _shape(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None


def _names(optimizer: Optimizer, objects: Objects) -> dict[int, str]:
    """Names of an optimizer's parameters by id: those they have in the first module that has them all.

    Parameters of several modules have the module's name in front; if some are in none, there are no names at all.
    """
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    modules = {key: _module_of(value) for key, value in objects.items() if isinstance(value, nn.Module | Pipe)}
    together: dict[int, str] = {}
    for key, module in modules.items():
        named = {id(parameter): name for name, parameter in module.named_parameters()}
        if own <= named.keys():
            return named
        together = {identity: f"{key}.{name}" for identity, name in named.items()} | together
    return together if own <= together.keys() else {}


def _optimizer_state(optimizer: Optimizer, names: Mapping[int, str], pipes: Iterable[Pipe]) -> dict[str, Any]:
    """The state dict of an optimizer with names in place of numbers, if its parameters have names.

    In a pipeline only ranks with the stage of a parameter change its state, so only they tell it.
    """
    state = optimizer.state_dict()
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    named = {
        number: names[id(parameter)] if names else str(number)
        for number, parameter in zip(numbers, parameters, strict=True)
    }
    elsewhere = frozenset[str]().union(*(pipe.names_elsewhere() for pipe in pipes))
    entries = {named[number]: value for number, value in state["state"].items() if named[number] not in elsewhere}
    groups = state["param_groups"]
    if names:
        groups = [group | {"params": [named[number] for number in group["params"]]} for group in groups]
    return ({"state": entries} if entries else {}) | {"param_groups": groups}


def _prepare_optimizer(name: str, optimizer: Optimizer, names: Mapping[int, str], saved: Mapping[str, Any]) -> Apply:
    """Compare groups, and put what was saved in the order that parameters have here."""
    groups: list[dict[str, Any]] = saved.get("param_groups", [])
    if len(groups) != len(optimizer.param_groups):
        raise CheckpointError(f"{name} has {len(groups)} parameter groups in it and {len(optimizer.param_groups)} here")
    state = dict(saved.get("state", {}))
    ready_groups: list[dict[str, Any]] = []
    for index, (group, own) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
        keys = _keys_in_order(f"{name}.param_groups[{index}]", group["params"], own["params"], names)
        ready_groups.append(_like_here(group, own) | {"params": keys})
        for key, parameter in zip(keys, own["params"], strict=True):
            if key in state:
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
    _refuse_other_names(where, set(keys), set(saved))
    return keys


def _like_here(group: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """The options of a group; those that are tensors (a learning rate may be) on the device they have here."""
    return {
        option: value.to(own[option].device)
        if isinstance(value, torch.Tensor) and isinstance(own.get(option), torch.Tensor)
        else value
        for option, value in group.items()
    }


def _laid_out(value: Any, parameter: torch.Tensor) -> Any:
    """State of the shape of its parameter lies in memory as that does (channels last), as if it had been made there."""
    if not isinstance(value, torch.Tensor) or value.shape != parameter.shape or value.stride() == parameter.stride():
        return value
    return torch.empty_like(parameter, dtype=value.dtype, device="cpu", requires_grad=False).copy_(value)


def _filling(target: dict[Any, Any], saved: Mapping[Any, Any]) -> Apply:
    def fill() -> None:
        target.clear()
        target.update(saved)

    return fill


def _counting(pipe: Pipe, num_steps: int) -> Apply:
    def count() -> None:
        pipe.num_steps = num_steps

    return count


def _kept(value: Any, where: str) -> Any:
    """A value as DCP stores it without loss: it takes dicts apart, makes their keys text, and forgets empty ones.

    Dicts with other keys, and empty ones, are therefore kept whole. Objects of other classes are refused: reading them
    again would mean running their code.
    """
    if isinstance(value, torch.Tensor):
        if isinstance(value, DTensor) or value.layout != torch.strided:
            raise CheckpointError(f"{where} is a sharded or sparse tensor, which these checkpoints do not hold")
        return value
    if isinstance(value, Mapping):
        items = {key: _kept(item, f"{where}.{key}") for key, item in cast("Mapping[Any, Any]", value).items()}
        is_text = bool(items) and all(isinstance(key, str) for key in items)
        return items if is_text else (_WHOLE, value if type(value) in (Counter, OrderedDict) else items)
    if type(value) in (list, tuple):
        return type(value)(_kept(item, f"{where}[{index}]") for index, item in enumerate(value))
    if type(value) in _SCALARS:
        return value
    raise CheckpointError(
        f"{where} is a {type(value).__name__}: a checkpoint holds tensors, numbers, text, and lists, tuples and dicts "
        "of them"
    )


def _released(value: Any) -> Any:
    """What `_kept` was given."""
    if type(value) is tuple:
        items = cast("tuple[Any, ...]", value)
        if len(items) == 2 and isinstance(items[0], str) and items[0] == _WHOLE:
            return items[1] if type(items[1]) in (Counter, OrderedDict) else _released(items[1])
        return tuple(_released(item) for item in items)
    if isinstance(value, list):
        return [_released(item) for item in cast("list[Any]", value)]
    if isinstance(value, dict):
        return {key: _released(item) for key, item in cast("dict[Any, Any]", value).items()}
    return value
