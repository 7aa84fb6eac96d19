# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false
"""Checks of torch as the Python that they stand for, which looks at their predicates. Seen in torch 2.13."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch


def _assert(condition: Any, message: str) -> None:
    if not condition:
        raise AssertionError(message)


BRANCHES: dict[Any, Callable[..., Any]] = {torch._assert: _assert}


def check_with(kind: type) -> tuple[Any, str, Callable[..., None]]:
    """Where torch keeps what its checks have in common, its name, and one that takes numbers of a kind for truth."""
    original = torch._check_with

    def check(error: type[Exception], condition: Any, message: Callable[[], str] | None) -> None:
        if type(condition) is not kind:
            original(error, condition, cast(Any, message))
        elif not condition:
            raise error("Expected cond to be True, but got False" if message is None else message())

    return torch, "_check_with", check
