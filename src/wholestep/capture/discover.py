"""Finding the models and optimizers a train step works on: in its arguments, closure, globals and `self`."""

from __future__ import annotations

import builtins
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from wholestep.capture import tree
from wholestep.errors import CaptureError

_MAX_DEPTH = 4


@dataclass(frozen=True)
class FreeValue:
    """A number, string or tensor the step reads from its closure or globals; a change means a new capture."""

    read: Callable[[], Any]
    value: Any


@dataclass(frozen=True)
class Reachable:
    """What a call of the train step can see, by the name it has there."""

    modules: dict[str, nn.Module]
    optimizers: dict[str, Optimizer]
    free_values: dict[str, FreeValue]

    def prefix_of(self, name: str) -> str:
        """The prefix of a module's FQNs: none for a step with one model."""
        return "" if len(self.modules) == 1 else f"{name}."


def reachable(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Reachable:
    """Collect models, optimizers and free values; a module inside another found module is not listed again.

    Raises `CaptureError` when there is no optimizer or model at all: then the function is no train step.
    """
    modules: dict[str, nn.Module] = {}
    optimizers: dict[str, Optimizer] = {}
    free_values: dict[str, FreeValue] = {}
    arguments = [(name, value, None) for name, value in _named_arguments(function, args, kwargs)]
    inside = [item for name, value, _ in arguments if _is_plain_object(value) for item in _attributes(name, value)]
    free = [(name, read(), read) for name, read in [*inside, *_free_variables(function, _MAX_DEPTH)]]
    for name, value, read in [*arguments, *free]:
        if isinstance(value, nn.Module):
            _add(modules, name, value)
        elif isinstance(value, Optimizer):
            _add(optimizers, name, value)
        elif read is not None and isinstance(value, (bool, int, float, str, torch.Tensor)):
            free_values[name] = FreeValue(read, value)
    inner = {id(child) for module in modules.values() for child in module.modules() if child is not module}
    modules = {name: module for name, module in modules.items() if id(module) not in inner}
    if not modules:
        raise CaptureError(
            f"no torch.nn.Module is among the arguments, closure or globals of {_name(function)}",
            location=location_of(function),
            advice="Pass the model as an argument of the train step",
        )
    return Reachable(modules, optimizers, free_values)


def location_of(function: Callable[..., Any]) -> str | None:
    """`file:line` of a function's definition."""
    code: CodeType | None = getattr(inspect.unwrap(function), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else None


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


def _add(found: dict[str, Any], name: str, value: Any) -> None:
    if not any(value is other for other in found.values()):
        found[name] = value


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", repr(function))


def _named_arguments(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[str, Any]]:
    names = [*argument_names(function, len(args)), *kwargs]
    for name, value in zip(names, [*args, *kwargs.values()], strict=True):
        leaves, _ = tree.flatten(value)
        yield from zip(tree.paths(value, name), leaves, strict=True)


def _free_variables(function: Callable[..., Any], depth: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Readers of what a function uses from outside, following helpers of the same module and a bound `self`."""
    if depth == 0:
        return
    if isinstance(function, MethodType) and _is_plain_object(function.__self__):
        yield from _attributes("self", function.__self__)
    plain = inspect.unwrap(getattr(function, "__func__", function))
    if not isinstance(plain, FunctionType):
        return
    for name, read in _outer_names(plain):
        yield name, read
        value = read()
        if (
            isinstance(value, (FunctionType, MethodType))
            and value.__module__ == plain.__module__
            and value is not plain
        ):
            yield from _free_variables(value, depth - 1)


def _is_plain_object(value: Any) -> bool:
    """An object of the user's with attributes, as a trainer or a batch of a class of its own."""
    return hasattr(value, "__dict__") and not isinstance(
        value, (nn.Module, Optimizer, torch.Tensor, type, FunctionType)
    )


def _attributes(name: str, owner: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    for attribute in vars(owner):
        yield f"{name}.{attribute}", functools.partial(vars(owner).get, attribute)


def _outer_names(function: FunctionType) -> Iterator[tuple[str, Callable[[], Any]]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        read = functools.partial(_cell_contents, cell)
        if read() is not _UNASSIGNED:
            yield name, read
    for name in _global_names(function.__code__):
        if name in function.__globals__ and not hasattr(builtins, name):
            yield name, functools.partial(function.__globals__.get, name)


_UNASSIGNED = object()


def _cell_contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _UNASSIGNED


def _global_names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _global_names(constant)
