# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false
"""What a recording needs of torch's tracing: real calls in the middle of it, sizes as text. As private as `_torch`.

Seen in torch 2.13.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Generator
from typing import Any
from unittest import mock

import torch

from wholestep._torch import outside_modes


@contextlib.contextmanager
def untraced() -> Generator[None]:
    """Run Python for real in the middle of a trace: no mode sees what it calls."""
    with outside_modes(), torch._C.DisableTorchFunction():
        yield


@contextlib.contextmanager
def sizes_are_shown(is_asking: Callable[[Any], bool]) -> Generator[None]:
    """Let the text of a symbolic size be that of its value where `is_asking(frame)`; the size is fixed then.

    Torch would show the symbol, which must not get into the names and messages that a step makes of sizes.
    """

    def shown(original: Callable[..., str]) -> Callable[..., str]:
        def show(size: torch.SymInt, *spec: Any) -> str:
            if not is_asking(sys._getframe(1)):
                return original(size, *spec)
            value = int(size)
            return format(value, *spec)

        return show

    with contextlib.ExitStack() as stack:
        for name in ("__str__", "__repr__", "__format__"):
            original = getattr(torch.SymInt, name)
            stack.enter_context(mock.patch.object(torch.SymInt, name, shown(original)))
        yield
