# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false
"""Functions of torch that look at values, as the Python that they stand for. Seen in torch 2.11 to 2.13."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, cast

import torch
import torch.nn.functional as F


def _assert(condition: Any, message: str) -> None:
    if not condition:
        raise AssertionError(message)


def _tensor_split(input: torch.Tensor, indices_or_sections: Any = None, dim: int = 0, **named: Any) -> Any:
    """`torch.tensor_split` at places that a tensor holds, which C++ reads out of its memory."""
    given = named.pop("tensor_indices_or_sections", named.pop("indices", named.pop("sections", indices_or_sections)))
    places = given.tolist() if isinstance(given, torch.Tensor) else given
    return _TENSOR_SPLIT(input, tuple(places) if isinstance(places, list) else places, dim, **named)


def _opened(function: Any) -> Callable[..., Any]:
    """A function of torch's Python that does not hand itself over to whoever stands between: its parts do."""
    left_out = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    namespace = {**function.__globals__, **dict.fromkeys(left_out, lambda *_: False)}
    opened = FunctionType(function.__code__, namespace, function.__name__, function.__defaults__, function.__closure__)
    opened.__kwdefaults__ = function.__kwdefaults__
    return opened


_TENSOR_SPLIT: Any = torch.tensor_split
BRANCHES: dict[Any, Callable[..., Any]] = {
    torch._assert: _assert,
    torch.tensor_split: _tensor_split,
    torch.Tensor.tensor_split: _tensor_split,
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
