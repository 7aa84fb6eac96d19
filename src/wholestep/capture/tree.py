"""Taking argument containers apart and putting them together again.

Beyond tuples, lists and dicts this opens what batches come in: named tuples, dataclasses, and mappings that are no
dict (the batches of Hugging Face tokenizers). Anything else is a leaf, and so is a list of texts: another number of
them is no other structure.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any, NamedTuple

import torch


@dataclasses.dataclass(frozen=True)
class Leaf:
    """Where a leaf stood; specs of equal shape compare equal."""


LEAF = Leaf()


class Branch(NamedTuple):
    """A container: its type, its keys and what its children look like. Made and compared at each call of a step."""

    type: type
    keys: tuple[Any, ...]
    children: tuple[Spec, ...]


Spec = Leaf | Branch


def flatten(value: Any) -> tuple[list[Any], Spec]:
    """The leaves of a nested container in order, and a comparable description of its structure."""
    leaves: list[Any] = []
    return leaves, _flatten_into(value, leaves)


def _flatten_into(value: Any, leaves: list[Any]) -> Spec:
    parts = opened(value)
    if parts is None:
        leaves.append(value)
        return LEAF
    keys, children = parts
    return Branch(type(value), keys, tuple([_flatten_into(child, leaves) for child in children]))


def opened(value: Any) -> tuple[tuple[Any, ...], list[Any]] | None:
    """Keys and children of a container, None for a leaf."""
    if is_text(value):
        return None
    if isinstance(value, (list, tuple)):
        return tuple(range(len(value))), list(value)
    if isinstance(value, Mapping):
        return tuple(value.keys()), list(value.values())
    if not isinstance(value, type) and _is_dataclass(type(value)):
        names = tuple(field.name for field in dataclasses.fields(value))
        return names, [getattr(value, name) for name in names]
    return None


def is_text(value: Any) -> bool:
    """Whether a value is a list of texts, as a batch has one for its rows: it holds no input of a graph."""
    return type(value) is list and bool(value) and all(type(item) is str for item in value)


def _is_dataclass(cls: type) -> bool:
    """Like `dataclasses.is_dataclass`, which would call a `__getattr__` of the metaclass."""
    return any("__dataclass_fields__" in vars(base) for base in cls.__mro__)


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """A copy of a nested container with `function` applied to each leaf."""
    parts = opened(value)
    if parts is None:
        return function(value)
    keys, children = parts
    return _close(value, keys, [map_leaves(function, child) for child in children])


def fill(value: Any, leaves: Iterable[Any]) -> Any:
    """A copy of a nested container with other leaves, in order."""
    following = iter(leaves)
    return map_leaves(lambda _: next(following), value)


def _close(value: Any, keys: tuple[Any, ...], children: list[Any]) -> Any:
    """A container like `value` with other children."""
    kind: Any = type(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return kind(*children)
    if kind in (list, tuple):
        return kind(children)
    if kind is dict:
        return dict(zip(keys, children, strict=True))
    if isinstance(value, (torch.Size, SizeTemplate)):
        return torch.Size(children) if all(type(child) is int for child in children) else SizeTemplate(children)
    if isinstance(value, (list, tuple)):
        return kind(children)
    if isinstance(value, Mapping) and not isinstance(value, MutableMapping):
        return _new_mapping(kind, dict(zip(keys, children, strict=True)))
    duplicate: Any = copy.copy(value)
    if isinstance(value, Mapping):
        for key, child in zip(keys, children, strict=True):
            duplicate[key] = child
        return duplicate
    for key, child in zip(keys, children, strict=True):
        object.__setattr__(duplicate, key, child)
    return duplicate


class SizeTemplate(tuple[Any, ...]):
    """A `torch.Size` whose items are no plain numbers (yet)."""

    def numel(self) -> Any:
        return math.prod(self)


def _new_mapping(kind: Any, content: dict[Any, Any]) -> Any:
    """A read-only mapping of the user's class, built the ways mappings usually are."""
    try:
        return kind(content)
    except TypeError:
        return kind(**content)


def paths(value: Any, prefix: str) -> list[str]:
    """A readable path for each leaf, in `flatten`'s order: `batch['x'][0]`."""
    parts = opened(value)
    if parts is None:
        return [prefix]
    keys, children = parts
    is_attribute = not isinstance(value, (list, tuple, Mapping))
    names = [f"{prefix}.{key}" if is_attribute else f"{prefix}[{key!r}]" for key in keys]
    return [path for part, child in zip(names, children, strict=True) for path in paths(child, part)]
