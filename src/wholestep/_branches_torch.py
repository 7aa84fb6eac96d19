# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false
"""Functions of torch that look at values, as the Python that they stand for. Seen in torch 2.11 to 2.13."""

from __future__ import annotations

import contextlib
import importlib
import operator
from collections.abc import Callable
from types import FunctionType
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch.utils import _pytree


def _assert(condition: Any, message: str) -> None:
    if not condition:
        raise AssertionError(message)


SPLITS = (torch.tensor_split, torch.Tensor.tensor_split)


def with_plain_places(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of `tensor_split`, which reads places that a tensor holds out of its memory, with plain ones."""

    def plain(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dtype is not torch.int64 or value.dim() > 1:
            return value
        places: Any = value.tolist()
        return tuple(map(operator.index, places)) if value.dim() else operator.index(places)

    named = {_PLACES.get(name, name): plain(value) if name != "input" else value for name, value in kwargs.items()}
    if "indices" in named and type(named["indices"]) is int:
        named["sections"] = named.pop("indices")
    return (*args[:1], *map(plain, args[1:])), named


def _opened(function: Any) -> Callable[..., Any]:
    """A function of torch's Python that does not hand itself over to whoever stands between: its parts do."""
    left_out = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    namespace = {**function.__globals__, **dict.fromkeys(left_out, lambda *_: False)}
    opened = FunctionType(function.__code__, namespace, function.__name__, function.__defaults__, function.__closure__)
    opened.__kwdefaults__ = function.__kwdefaults__
    return opened


_PLACES = {"tensor_indices_or_sections": "indices"}
BRANCHES: dict[Any, Callable[..., Any]] = {
    torch._assert: _assert,
    F.gaussian_nll_loss: _opened(F.gaussian_nll_loss),
}


def check_with(kind: type) -> tuple[Any, str, Callable[..., None]]:
    """Where torch keeps what its checks have in common, its name, and one that takes numbers of a kind for truth."""
    original = torch._check_with

    def check(error: type[Exception], condition: Any, message: Callable[[], str] | None) -> None:
        if type(condition) is not kind:
            original(error, condition, cast(Any, message))
        elif not condition:
            raise error("Expected cond to be True, but got False" if message is None else message())

    return torch, "_check_with", check


flattened: Callable[[Any], tuple[list[Any], Any]] = _pytree.tree_flatten
unflattened: Callable[[list[Any], Any], Any] = _pytree.tree_unflatten
seen_by_nobody: Callable[[], Any] = torch._C.DisableTorchFunction
"""Functions of torch that are called inside pass no mode."""
seen_again: Callable[[], Any] = torch._C._EnableTorchFunction
_LOOPS = ("while_loop", "scan", "map")


def loops() -> list[Any]:
    """The functions of torch that run what they are given as the body of a loop."""
    found: list[Any] = []
    for name in _LOOPS:
        with contextlib.suppress(ImportError, AttributeError):
            found.append(getattr(importlib.import_module(f"torch._higher_order_ops.{name}"), name))
    return found
