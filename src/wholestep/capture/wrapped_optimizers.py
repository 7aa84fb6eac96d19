"""Optimizers that hold other optimizers: Fabric's and Accelerate's wrappers, SAM, combinations of two.

What counts is who owns the state that `step()` reads. A wrapper without parameter groups and state of its own only
stands for what it holds; one with state of its own (SAM) is an optimizer beside it, though they share their groups.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import FunctionType, MethodType
from typing import Any

from torch.optim import Optimizer

from wholestep.capture import tree

_MAX_DEPTH = 4


def inner_optimizers(found: dict[str, Optimizer]) -> tuple[dict[str, Optimizer], dict[str, list[Optimizer]]]:
    """Every optimizer that has state of its own, by name, and for each those that merely stand for it.

    An optimizer inside another has the outer one's name if it is alone there, with its attribute otherwise.
    """
    owners: dict[str, Optimizer] = {}
    wrappers: dict[str, list[Optimizer]] = {}
    everything = {id(outer): (name, outer) for name, outer in found.items()}
    inside = {id(outer): dict(_held(outer, _MAX_DEPTH)) for outer in found.values()}
    for name, outer in found.items():
        for path, inner in inside[id(outer)].items():
            alone = len(inside[id(outer)]) == 1 and _stands_for(outer, [inner])
            everything.setdefault(id(inner), (name if alone else f"{name}{path}", inner))
    for name, optimizer in everything.values():
        held = list(inside.get(id(optimizer), dict(_held(optimizer, _MAX_DEPTH))).values())
        if not (held and _stands_for(optimizer, held)):
            owners.setdefault(name, optimizer)
    for name, owner in owners.items():
        around = [outer for _, outer in everything.values() if outer is not owner]
        wrappers[name] = [outer for outer in around if any(owner is inner for _, inner in _held(outer, _MAX_DEPTH))]
    return owners, wrappers


def _stands_for(outer: Optimizer, held: list[Optimizer]) -> bool:
    """Whether an optimizer has no parameter groups and no state but those of the ones that it holds."""
    own_groups = {id(group) for inner in held for group in inner.param_groups}
    if any(id(group) not in own_groups for group in getattr(outer, "param_groups", [])):
        return False
    state = getattr(outer, "state", None)
    return state is None or any(state is inner.state for inner in held)


def _held(owner: Any, depth: int) -> Iterator[tuple[str, Optimizer]]:
    """Optimizers in the attributes of another, in containers and in what its functions hold; with their paths."""
    seen: set[int] = {id(owner)}
    for name, value in list(vars(owner).items()):
        yield from _found_in(f".{name}", value, seen, depth)


def _found_in(path: str, value: Any, seen: set[int], depth: int) -> Iterator[tuple[str, Optimizer]]:
    if depth == 0 or id(value) in seen:
        return
    if isinstance(value, Optimizer):
        seen.add(id(value))
        yield path, value
        for name, item in list(vars(value).items()):
            yield from _found_in(f"{path}.{name}", item, seen, depth - 1)
    elif isinstance(value, (list, tuple)) or type(value) is dict:
        leaves, _ = tree.flatten(value)
        optimizers = [
            item for item in zip(tree.paths(value, path), leaves, strict=True) if isinstance(item[1], Optimizer)
        ]
        for inner_path, item in optimizers:
            yield from _found_in(inner_path, item, seen, depth - 1)
    elif isinstance(value, (FunctionType, MethodType, functools.partial)):
        for name, item in _variables(value):
            yield from _found_in(f"{path}.{name}", item, seen, depth - 1)


def _variables(function: Any) -> Iterator[tuple[str, Any]]:
    """What a function holds on to: its object, its closure, the arguments of a partial."""
    if isinstance(function, functools.partial):
        yield from ((str(index), item) for index, item in enumerate((function.func, *function.args)))
        yield from function.keywords.items()
        return
    if isinstance(function, MethodType):
        yield "__self__", function.__self__
        function = function.__func__
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not assigned yet
            continue
