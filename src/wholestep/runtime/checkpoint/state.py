"""What of models, optimizers and other objects a checkpoint holds, under which names, and how it gets back into them.

The content is what one would give to `torch.distributed.checkpoint` by hand: `{"model": model.state_dict(), ...}`, with
optimizer state under the names of parameters as `torch.distributed.checkpoint.state_dict` has it. It is taken from the
objects' own `state_dict()`: torch's helper would first take a step of an optimizer that has no state yet.

Getting it back has two moments. `prepare` compares everything that can be compared and raises; what it returns puts the
values in place: first what may still refuse them, an object's own `load_state_dict`, and can be undone.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from wholestep import _loading_torch
from wholestep.errors import CheckpointError
from wholestep.runtime.checkpoint.optimizers import (
    class_name,
    optimizer_state,
    prepare_optimizer,
    refuse_other_class,
    refuse_other_names,
)
from wholestep.runtime.pipeline.pipe import Pipe

logger = logging.getLogger(__name__)

Objects = Mapping[str, Any]
"""What a user passed, by name: modules, optimizers, pipelines, objects with a state dict, dicts."""
Apply = Callable[[], None]


@dataclass(frozen=True)
class Change:
    """What puts values in place. With `undo` it may fail, and is made before all that cannot."""

    apply: Apply
    undo: Apply | None = None


PER_RANK = "per_rank"
_PIPE_STEPS = "pipeline_steps"
_CLASSES = "optimizer_classes"
RESERVED = (PER_RANK, _PIPE_STEPS, _CLASSES)

_SCALARS = (bool, int, float, complex, str, type(None), torch.Size, torch.dtype, torch.device)
_WHOLE = "wholestep: kept whole"


@dataclass(frozen=True)
class State:
    """The content of a checkpoint as this rank has it.

    `parameters` are the keys of parameters, `optimizers` the names of optimizers: their tensors are the same on all
    ranks that have them. `whole` are the names of all other objects but modules: every rank has all of each.
    """

    content: dict[str, Any]
    parameters: frozenset[str]
    optimizers: tuple[str, ...]
    whole: frozenset[str] = frozenset()

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
            elsewhere = frozenset[str]().union(*(pipe.names_elsewhere() for pipe in pipes.values()))
            content[name] = _kept(optimizer_state(value, _names(value, objects), elsewhere), name)
        elif isinstance(value, nn.Module | Pipe):
            model = _module_of(value)
            state = model.state_dict()
            absent = value.names_elsewhere() if isinstance(value, Pipe) else ()
            content[name] = _kept({key: state[key] for key in state if key not in absent}, name)
            parameters |= {f"{name}.{key}" for key, _ in model.named_parameters(remove_duplicate=False)}
        else:
            content[name] = _kept(_plain_state(value, name), name)
    if pipes:
        content[_PIPE_STEPS] = {name: pipe.num_steps for name, pipe in pipes.items()}
    optimizers = tuple(name for name, value in objects.items() if isinstance(value, Optimizer))
    if optimizers:
        content[_CLASSES] = {name: class_name(objects[name]) for name in optimizers}
    whole = {name for name, value in objects.items() if not isinstance(value, Optimizer | nn.Module | Pipe)}
    return State(content, frozenset(parameters), optimizers, frozenset(whole))


def prepare(objects: Objects, content: Mapping[str, Any]) -> list[Change]:
    """What to do so that objects have the state that was read; raises `CheckpointError` if it does not fit them."""
    found = {name: _released(value) for name, value in content.items()}
    absent = [name for name in objects if name not in found]
    if absent:
        raise CheckpointError(f"it has no '{absent[0]}'")
    changes: list[Change] = []
    for name, value in objects.items():
        saved: Any = found[name]
        if isinstance(value, Optimizer | nn.Module | Pipe | dict) and not isinstance(saved, Mapping):
            raise CheckpointError(f"'{name}' is no dict in it")
        if isinstance(value, Optimizer):
            refuse_other_class(name, value, found.get(_CLASSES, {}).get(name))
            apply = prepare_optimizer(name, value, _names(value, objects), saved)
            changes.append(Change(apply, _restoring(value)))
        elif isinstance(value, nn.Module | Pipe):
            changes.append(_prepare_module(name, _module_of(value), saved))
        elif isinstance(value, dict):
            changes.append(Change(_filling(cast("dict[Any, Any]", value), saved)))
        else:
            changes.append(_loading(value, saved))
        if isinstance(value, Pipe):
            changes.append(Change(_counting(value, found.get(_PIPE_STEPS, {}).get(name, 0))))
    return changes


def make(changes: Sequence[Change]) -> Apply:
    """Make those changes that may fail, none if one does; returns what makes the others, which do not."""
    undone: list[Apply] = []
    try:
        for change in changes:
            if change.undo is not None:
                undone.append(change.undo)
                change.apply()
    except Exception:
        _undo_all(undone)
        raise

    def finish() -> None:
        for change in changes:
            if change.undo is None:
                change.apply()

    return finish


def unmake(changes: Sequence[Change]) -> None:
    """Undo what `make` has done: another rank could not."""
    _undo_all([change.undo for change in changes if change.undo is not None])


def _undo_all(undone: Sequence[Apply]) -> None:
    """What an object of the user's refuses to take back keeps none of the others from getting theirs."""
    for undo in reversed(undone):
        try:
            undo()
        except Exception as error:
            logger.error("after a checkpoint could not be loaded, an object refused to be put back: %s", error)


def names_to_read(objects: Objects) -> list[str]:
    """The parts of a checkpoint that hold the state of these objects."""
    kinds = {_PIPE_STEPS: Pipe, _CLASSES: Optimizer}
    return [*objects, *(name for name, kind in kinds.items() if any(isinstance(one, kind) for one in objects.values()))]


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


def _prepare_module(name: str, module: nn.Module, saved: Mapping[str, Any]) -> Change:
    """A module loads itself; torch's own code for that does not refuse what has the right names and shapes."""
    state = module.state_dict()
    refuse_other_names(name, set(state), set(saved))
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and _shape(saved[key]) != value.shape:
            raise CheckpointError(f"{name}.{key} has shape {_shape(saved[key])} in it and {tuple(value.shape)} here")
    state.update(saved)  # what else the state dict carries, the versions of modules, stays

    def load() -> None:
        module.load_state_dict(state)

    return Change(load, _restoring_module(module) if _loading_torch.runs_own_code(module) else None)


def _restoring_module(module: nn.Module) -> Apply:
    """Put attributes, values and extra state of a module back; costs a copy of it in the memory of the host."""
    parts = [_restoring(part) for part in module.modules()]
    tables = [(table, dict(table)) for part in module.modules() for table in _loading_torch.tensor_tables(part)]
    tensors = {id(t): t for _, table in tables for t in table.values() if t is not None}
    values = {key: tensor.detach().to("cpu", copy=True) for key, tensor in tensors.items()}
    extras = [
        (part, copy.deepcopy(part.get_extra_state()))
        for part in module.modules()
        if _loading_torch.has_extra_state(part)
    ]

    def restore() -> None:
        for part in parts:
            part()
        for table, before in tables:
            table.clear()
            table.update(before)
        with torch.no_grad():
            for key, tensor in tensors.items():
                tensor.detach().copy_(values[key])
        for part, extra in extras:
            with contextlib.suppress(Exception):  # it may be the one that refused, and changed nothing
                part.set_extra_state(extra)

    return restore


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


def _restoring(value: Any) -> Apply:
    """Put an object's attributes back; `load_state_dict` of an optimizer makes new ones."""
    before = dict(vars(value))

    def restore() -> None:
        vars(value).clear()
        vars(value).update(before)

    return restore


def _loading(value: Any, saved: Any) -> Change:
    """An object of the user's loads itself; if that fails, or something after it, it gets back what it had."""
    before = copy.deepcopy(value.state_dict())
    return Change(lambda: value.load_state_dict(saved), lambda: value.load_state_dict(before))


def _filling(target: dict[Any, Any], saved: Mapping[Any, Any]) -> Apply:
    def fill() -> None:
        target.clear()
        target.update(saved)

    return fill


def _counting(pipe: Pipe, num_steps: int) -> Apply:
    def count() -> None:
        pipe.num_steps = num_steps

    return count


def _kept(value: Any, where: str, *, is_part: bool = False) -> Any:
    """A value as DCP stores it without loss: it takes dicts apart, makes their keys text, and forgets empty ones.

    Dicts with other keys, empty ones, and within an object those of classes that it forgets (a `Counter`) are therefore
    kept whole; those with tensors come back as plain dicts. Objects of other classes are refused: reading them again
    would mean running their code.
    """
    if isinstance(value, torch.Tensor):
        if isinstance(value, DTensor) or value.layout != torch.strided:
            raise CheckpointError(f"{where} is a sharded or sparse tensor, which these checkpoints do not hold")
        if value.device.type == "meta":
            raise CheckpointError(f"{where} is a tensor on the meta device, which has no values to save")
        return value
    if isinstance(value, Mapping):
        items = {
            key: _kept(item, f"{where}.{key}", is_part=True) for key, item in cast("Mapping[Any, Any]", value).items()
        }
        is_text = bool(items) and all(isinstance(key, str) for key in items)
        is_odd = type(value) in (Counter, OrderedDict)
        if is_text and not (is_odd and is_part and not _has_tensors(value)):
            return items
        return _WHOLE, value if is_odd else items
    if type(value) in (list, tuple):
        parts = [_kept(item, f"{where}[{index}]", is_part=True) for index, item in enumerate(value)]
        if type(value) is list:
            return parts
        return (_WHOLE, parts) if _is_whole(value) else tuple(parts)
    if type(value) in _SCALARS:
        return value
    raise CheckpointError(
        f"{where} is a {type(value).__name__}: a checkpoint holds tensors, numbers, text, and lists, tuples and dicts "
        "of them"
    )


def _has_tensors(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_tensors, cast("Mapping[Any, Any]", value).values()))
    if isinstance(value, (list, tuple)):
        return any(map(_has_tensors, cast("list[Any]", value)))
    return isinstance(value, torch.Tensor)


def _is_whole(value: Any) -> bool:
    """Whether a value is what `_kept` makes of something that it keeps whole, or looks like it."""
    return type(value) is tuple and len(value) == 2 and isinstance(value[0], str) and value[0] == _WHOLE


def _released(value: Any) -> Any:
    """What `_kept` was given."""
    if _is_whole(value):
        inner: Any = value[1]
        if type(inner) is list:  # a tuple that looked like something kept whole
            return tuple(_released(item) for item in cast("list[Any]", inner))
        return inner if type(inner) in (Counter, OrderedDict) else _released(inner)
    if type(value) is tuple:
        return tuple(_released(item) for item in cast("tuple[Any, ...]", value))
    if isinstance(value, list):
        return [_released(item) for item in cast("list[Any]", value)]
    if isinstance(value, dict):
        return {key: _released(item) for key, item in cast("dict[Any, Any]", value).items()}
    return value
