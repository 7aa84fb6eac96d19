"""What a train step can see: models and optimizers in its arguments, closure, globals and `self`, and plain values.

Models and optimizers found here take part in the capture. Everything else the step reads from outside its arguments is
kept as a `FreeValue`: the graph has it baked in, so a change means a new capture.
"""

from __future__ import annotations

import builtins
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from wholestep import _recording_torch
from wholestep.capture import source, tree
from wholestep.capture.record.late_values import is_late_value
from wholestep.capture.record.numbers import value_of
from wholestep.capture.wrapped_optimizers import inner_optimizers
from wholestep.errors import CaptureError

_MAX_DEPTH = 4
_MAX_ATTRIBUTES = 3
_MOST_NAMES = 8
_SCALARS = (bool, int, float, str, type(None))

_UNASSIGNED = object()


@dataclass(frozen=True)
class Place:
    """Where a value stands: a closure cell, an entry of a namespace, or nowhere but here (`owner` itself)."""

    owner: Any
    key: str | None = None

    def read(self) -> Any:
        if isinstance(self.owner, CellType):
            try:
                return self.owner.cell_contents
            except ValueError:
                return _UNASSIGNED
        return self.owner if self.key is None else self.owner.get(self.key, _UNASSIGNED)

    def write(self, value: Any) -> None:
        if isinstance(self.owner, CellType):
            self.owner.cell_contents = value
        elif self.key is not None and isinstance(self.owner, dict):
            self.owner[self.key] = value


@dataclass(frozen=True)
class FreeValue:
    """Something the step reads from outside: where it stands, and what it was (see `fingerprint`)."""

    place: Place
    value: Any
    print: Any

    @staticmethod
    def of(place: Place) -> FreeValue:
        value = place.read()
        return FreeValue(place, value, fingerprint(value))

    def read(self) -> Any:
        return self.place.read()

    def has_changed(self) -> bool:
        return fingerprint(self.read()) != self.print

    def put_back(self) -> None:
        """Undo a change: the old object, and the old length of a list that was appended to."""
        if isinstance(self.value, list):
            del self.value[len(self.print) - 1 :]
        if self.read() is not self.value:
            self.place.write(self.value)


@dataclass(frozen=True)
class Reachable:
    """What a call of the train step can see, by the name it has there."""

    modules: dict[str, nn.Module]
    optimizers: dict[str, Optimizer]
    free_values: dict[str, FreeValue]
    wrappers: dict[str, list[Optimizer]] = field(default_factory=dict[str, list[Optimizer]])
    """By the name of an optimizer: others that stand for it, with its parameter groups and its state."""

    def prefix_of(self, name: str) -> str:
        """The prefix of a module's FQNs: none for a step with one model."""
        return "" if len(self.modules) == 1 else f"{name}."


def fingerprint(value: Any, depth: int = 3) -> Any:
    """A comparable picture of a value: numbers and text as they are, containers item by item, the rest by identity."""
    value = id(value) if is_late_value(value) else value_of(value)
    if isinstance(value, _SCALARS):
        return (type(value), value)
    if depth and isinstance(value, (list, tuple)):
        return (type(value), *[fingerprint(item, depth - 1) for item in value])
    if depth and isinstance(value, dict):
        return (type(value), *[(key, fingerprint(item, depth - 1)) for key, item in value.items()])
    return id(value)


def reachable(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Reachable:
    """Collect models, optimizers and free values; a module inside another found module is not listed again.

    None at all may be found: those that the step only gets to through other functions are met while it is traced.
    """
    modules: dict[str, nn.Module] = {}
    optimizers: dict[str, Optimizer] = {}
    free_values: dict[str, FreeValue] = {}
    arguments = list(_named_arguments(function, args, kwargs))
    names = _attribute_names(function, [value for _, value in arguments if is_plain_object(value)], _MAX_DEPTH)
    for name, value in arguments:
        _sort(name, value, modules, optimizers)
        if isinstance(value, nn.Module):
            for attribute, place in _optimizers_of(name, value, names):
                _sort(attribute, place.read(), modules, optimizers)
        if is_plain_object(value):
            for attribute, place in _attributes(name, value, names):
                _sort(attribute, place.read(), modules, optimizers)
                free_values[attribute] = FreeValue.of(place)
    for name, place in _free_variables(function, names, _MAX_DEPTH):
        _sort(name, place.read(), modules, optimizers)
        free_values[name] = FreeValue.of(place)
    for module in list(modules.values()):
        for name, place in _hook_variables(module):
            _sort(name, place.read(), modules, optimizers)
    inner = {id(child) for module in modules.values() for child in module.modules() if child is not module}
    modules = {name: module for name, module in modules.items() if id(module) not in inner}
    optimizers, wrappers = inner_optimizers(optimizers)
    return Reachable(modules, optimizers, free_values, wrappers)


def require_any(found: Reachable, function: Callable[..., Any]) -> None:
    """Refuse a step in which no model and no optimizer was found or met: it is no train step."""
    if not found.modules and not found.optimizers:
        raise CaptureError(
            f"no torch.nn.Module is among the arguments, closure or globals of {_name(function)}",
            location=source.location_of(function),
            advice="Pass the model as an argument of the train step",
        )


def with_missed(found: Reachable, owner: nn.Module | Optimizer) -> Reachable:
    """The same with one more model or optimizer."""
    if isinstance(owner, nn.Module):
        return _with_module(found, owner)
    optimizers, wrappers = inner_optimizers({**found.optimizers, f"optimizer{len(found.optimizers)}": owner})
    return replace(found, optimizers=optimizers, wrappers={**found.wrappers, **wrappers})


def tensors(found: Reachable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """All tensors of models and arguments."""
    for module in found.modules.values():
        yield from module.parameters()
        yield from module.buffers()
    leaves, _ = tree.flatten((args, kwargs))
    yield from (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))


def module_names(found: Reachable) -> dict[int, str]:
    """By id: where modules stand in their models."""
    names: dict[int, str] = {}
    for name, module in found.modules.items():
        for path, submodule in module.named_modules():
            names.setdefault(id(submodule), (found.prefix_of(name) + path).rstrip("."))
    return names


def looked_in(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], found: Reachable) -> str:
    """Where models and optimizers were looked for, in words."""
    arguments = [*argument_names(function, len(args)), *kwargs]
    parts = [_listed("arguments", arguments), _listed("what it reads from outside", [*found.free_values])]
    return " and in ".join(part for part in parts if part) or "its arguments, closure and globals"


def _listed(what: str, names: list[str]) -> str:
    shown = ", ".join(names[:_MOST_NAMES]) + (", ..." if len(names) > _MOST_NAMES else "")
    return f"{what} ({shown})" if names else ""


def _with_module(found: Reachable, module: nn.Module) -> Reachable:
    """The same with one more model; those inside it are not listed again."""
    inner = {id(child) for child in module.modules()}
    modules = {name: other for name, other in found.modules.items() if id(other) not in inner}
    name = f"model{len(found.modules)}"
    return replace(found, modules={**modules, name: module})


def argument_names(function: Callable[..., Any], num_args: int) -> list[str]:
    """Names of the positional arguments of a call; those of `*args` are numbered."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return [f"arg{index}" for index in range(num_args)]
    names: list[str] = []
    for parameter in parameters:
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            names += [f"{parameter.name}[{index}]" for index in range(num_args - len(names))]
        elif parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
            names.append(parameter.name)
    names += [f"arg{index}" for index in range(len(names), num_args)]
    return names[:num_args]


def has_argument(function: Callable[..., Any], name: str) -> bool:
    """Whether a function has an argument of this name of its own."""
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


def _sort(name: str, value: Any, modules: dict[str, nn.Module], optimizers: dict[str, Optimizer]) -> None:
    """File a value, or what a container holds, under modules or optimizers."""
    leaves, _ = tree.flatten(value)
    for path, leaf in zip(tree.paths(value, name), leaves, strict=True):
        found: dict[str, Any] | None = None
        if isinstance(leaf, nn.Module):
            found = modules
        elif isinstance(leaf, Optimizer):
            found = optimizers
        if found is not None and not any(leaf is other for other in found.values()):
            found[path] = leaf


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", repr(function))


def _named_arguments(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[str, Any]]:
    names = [*argument_names(function, len(args)), *kwargs]
    for name, value in zip(names, [*args, *kwargs.values()], strict=True):
        leaves, _ = tree.flatten(value)
        yield from zip(tree.paths(value, name), leaves, strict=True)


def _free_variables(function: Callable[..., Any], names: set[str], depth: int) -> Iterator[tuple[str, Place]]:
    """Readers of what a function uses from outside, following helpers of the same module and a bound `self`."""
    if depth == 0:
        return
    if isinstance(function, functools.partial):
        for key, value in [*enumerate(function.args), *function.keywords.items()]:
            yield f"partial[{key!r}]", Place(value)
        yield from _free_variables(function.func, names, depth - 1)
        return
    owner = getattr(function, "__self__", None)
    if isinstance(owner, nn.Module):
        yield "self", Place(owner)
        yield from _optimizers_of("self", owner, names)
    elif isinstance(function, MethodType) and is_plain_object(owner):
        yield from _attributes("self", owner, names)
    plain = _plain_function(function)
    if plain is None:
        if is_plain_object(function):
            yield from _free_variables(function.__call__, names, depth - 1)
        return
    defaults = [*enumerate(plain.__defaults__ or ()), *(plain.__kwdefaults__ or {}).items()]
    yield from ((f"default {key} of {plain.__name__}", Place(value)) for key, value in defaults)
    for name, place in _outer_names(plain):
        value: Any = place.read()
        if not isinstance(value, ModuleType):
            yield name, place
        if _is_namespace(value):
            yield from _attributes(name, value, names)
        if _is_helper(value, plain):
            yield from _free_variables(value, names, depth - 1)  # pyright: ignore[reportArgumentType]


def _attribute_names(function: Callable[..., Any], owners: list[Any], depth: int) -> set[str]:
    """Every name that the code of a step and of its helpers mentions: the attributes of objects it may read.

    Methods of `owners` (objects among the arguments, and the one the step is bound to) count as helpers, and so do
    those of objects that they hold in attributes of these names.
    """
    function = function.func if isinstance(function, functools.partial) else function
    owners = [*owners, *(owner for owner in (getattr(function, "__self__", None), function) if is_plain_object(owner))]
    plain = _plain_function(function) or _plain_function(vars(type(function)).get("__call__"))
    if plain is None or depth == 0:
        return set()
    names = set(_names_in(plain.__code__))
    for _, place in _outer_names(plain):
        value = place.read()
        if is_plain_object(value):
            owners.append(value)
        if _is_helper(value, plain):
            names |= _attribute_names(value, [], depth - 1)
    followed: set[FunctionType] = set()
    while True:
        owners = _with_held(owners, names)
        classes = {cls for owner in owners for cls in type(owner).__mro__}
        members = [vars(cls).get(name) for cls in classes for name in names]
        methods = [member.fget if isinstance(member, property) else member for member in members]
        new = {method for method in methods if isinstance(method, FunctionType)} - followed
        if not new:
            return names
        followed |= new
        names |= {name for method in new for name in _names_in(method.__code__)}


def _with_held(owners: list[Any], names: set[str]) -> list[Any]:
    """Some objects, and the plain ones that they hold in attributes of some names, as deep as attributes are read."""
    known = {id(owner): owner for owner in owners}
    newest = owners
    for _ in range(_MAX_ATTRIBUTES):
        held = [value for owner in newest for name, value in list(vars(owner).items()) if name in names]
        newest = [value for value in held if is_plain_object(value) and id(value) not in known]
        known |= {id(value): value for value in newest}
    return list(known.values())


def _is_helper(value: Any, caller: FunctionType) -> bool:
    """A function defined beside the step, which is followed as if it were part of it."""
    return (
        isinstance(value, (FunctionType, MethodType)) and value.__module__ == caller.__module__ and value is not caller
    )


def _plain_function(function: Any) -> FunctionType | None:
    plain = inspect.unwrap(getattr(function, "__func__", function)) if callable(function) else None
    return plain if isinstance(plain, FunctionType) else None


def is_plain_object(value: Any) -> bool:
    """An object of the user's with attributes, as a trainer or a batch of a class of its own."""
    excluded = (nn.Module, Optimizer, torch.Tensor, type, FunctionType, MethodType, ModuleType, functools.partial)
    return hasattr(value, "__dict__") and not isinstance(value, excluded)


def _is_namespace(value: Any) -> bool:
    """A plain object, or a class or module of the user's: something whose attributes the step may read."""
    if isinstance(value, (type, ModuleType)):
        root = (value.__module__ if isinstance(value, type) else value.__name__).split(".")[0]
        return root not in ("torch", "wholestep") and root not in sys.stdlib_module_names
    return is_plain_object(value)


def _attributes(name: str, owner: Any, names: set[str], depth: int = _MAX_ATTRIBUTES) -> Iterator[tuple[str, Place]]:
    """Attributes of an object that the step mentions, and those of objects they hold."""
    for attribute, value in list(vars(owner).items()):
        if attribute not in names or depth == 0 or isinstance(value, (FunctionType, ModuleType)):
            continue
        namespace: Any = vars(owner)
        yield f"{name}.{attribute}", Place(namespace, attribute)
        if _is_namespace(value):
            yield from _attributes(f"{name}.{attribute}", value, names, depth - 1)
    for attribute, value in list(vars(owner).items()):
        if attribute in names and depth and isinstance(value, ModuleType) and _is_namespace(value):
            yield from _attributes(f"{name}.{attribute}", value, names, depth - 1)


def _optimizers_of(name: str, module: nn.Module, names: set[str]) -> Iterator[tuple[str, Place]]:
    """Optimizers that a module keeps in attributes which the step mentions."""
    for attribute, value in list(vars(module).items()):
        held = value if isinstance(value, (list, tuple)) else [value]
        if attribute in names and any(isinstance(one, Optimizer) for one in held):
            yield f"{name}.{attribute}", Place(vars(module), attribute)


def _hook_variables(module: nn.Module) -> Iterator[tuple[str, Place]]:
    """What hooks on parameters hold on to: the optimizers of a step that updates inside the backward."""
    for name, parameter in module.named_parameters():
        for hook in _recording_torch.tensor_hooks(parameter):
            yield from ((f"{name} hook {key}", place) for key, place in _free_variables(hook, set(), 2))


def _outer_names(function: FunctionType) -> Iterator[tuple[str, Place]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if Place(cell).read() is not _UNASSIGNED:
            yield name, Place(cell)
    for name in dict.fromkeys(_names_in(function.__code__)):
        if name in function.__globals__ and not hasattr(builtins, name):
            yield name, Place(function.__globals__, name)


def _names_in(code: CodeType) -> Iterator[str]:
    """Names of globals and attributes in a function and the functions defined inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
