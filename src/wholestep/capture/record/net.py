"""A net under the recording: no function of the user's may run unseen while a step is traced.

Followed code tells what it calls, and that is followed in turn. But C code calls back (operators of an object,
descriptors, callbacks that nobody handed over in sight), and a function that runs as it is reads and writes without
telling. PyTorch says when any function starts; if it is one that should have been followed, the trace ends before its
first instruction, and is made again with that function followed from the start (`Unseen`).
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.metadata
import logging
import os
import re
import signal
import sys
import sysconfig
import warnings
from collections.abc import Callable, Generator, Iterator
from types import CodeType, FrameType, FunctionType
from typing import Any

from wholestep import _recording_torch
from wholestep.capture import source
from wholestep.capture.record.follow import is_followed_file

_STDLIB = os.path.realpath(sysconfig.get_path("stdlib")) + os.sep
_INSTALLED = tuple({os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("purelib", "platlib")})


class Unseen(BaseException):
    """A function of the user's is about to run as it is."""

    def __init__(self, code: CodeType) -> None:
        super().__init__(code.co_qualname)
        self.code = code

    def functions(self) -> Iterator[FunctionType]:
        """The functions that have this code, and all others of their class, one of which may well be called next."""
        for function in gc.get_referrers(self.code):
            if isinstance(function, FunctionType) and function.__code__ is self.code:
                yield function
                yield from _siblings(function)


def _siblings(function: FunctionType) -> Iterator[FunctionType]:
    owner: Any = function.__globals__
    for name in function.__qualname__.split(".")[:-1]:
        owner = owner.get(name) if isinstance(owner, dict) else vars(owner).get(name)
        if not isinstance(owner, type):
            return
    if isinstance(owner, type):
        yield from (member for member in vars(owner).values() if isinstance(member, FunctionType))


def _may_matter(frame: Any) -> bool:
    """Whether the code of a frame is the user's; generated code is that of the module whose globals it has."""
    filename = frame.f_code.co_filename
    if filename.startswith("<"):
        is_typed_in = frame.f_globals.get("__name__") == "__main__"
        filename = frame.f_globals.get("__file__", filename if is_typed_in else "<frozen>")
    return _is_anybodys(filename)


def _must_be_seen(frame: Any) -> bool:
    """Whether a frame of the user's is there because of the step, and not because torch logs, warns or imports."""
    if _runs_at_any_time(frame.f_code):
        return False
    below: FrameType | None = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]
    while below is not None and not _calls_for_itself(below.f_code.co_filename):
        below = below.f_back
    return below is None


def _runs_at_any_time(code: CodeType) -> bool:
    """Whether a function is called when something is collected or a signal comes, not by the step."""
    handlers = [*gc.callbacks, *map(signal.getsignal, signal.valid_signals())]
    return code.co_name == "__del__" or any(getattr(handler, "__code__", None) is code for handler in handlers)


@functools.cache
def _calls_for_itself(filename: str) -> bool:
    """Handlers and hooks of logging, warnings and imports; what the step itself logs is kept for later (`outside`)."""
    return filename.startswith("<frozen importlib") or filename in (logging.__file__, warnings.__file__)


@functools.cache
def _is_anybodys(filename: str) -> bool:
    """Whether a file's functions must be seen: not Python's own nor torch's, which call them for their own ends."""
    path = source.path_of(filename)
    if not is_followed_file(filename) or path.startswith(source.TORCH_ROOT + os.sep):
        return False
    for root in _INSTALLED:
        if path.startswith(root):
            return path[len(root) :].split(os.sep)[0].removesuffix(".py") not in _torchs_own()
    return not path.startswith(_STDLIB)


@functools.cache
def _torchs_own() -> frozenset[str]:
    """Top-level names of the packages that torch itself needs, and of those that they need."""
    packages: set[str] = set()
    modules: set[str] = set()
    pending = ["torch", "numpy"]
    while pending:
        name = re.split(r"[^\w.-]", pending.pop(), maxsplit=1)[0]
        if name in packages:
            continue
        packages.add(name)
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            package = importlib.metadata.distribution(name)
            modules.update((package.read_text("top_level.txt") or name.lower().replace("-", "_")).split())
            pending += [need for need in package.requires or [] if "extra ==" not in need]
    return frozenset(modules)


@contextlib.contextmanager
def spread(is_instrumented: Callable[[CodeType], bool], is_working: Callable[[], bool]) -> Generator[None]:
    """Raise `Unseen` where a function of the user's starts in this thread, unless the recorder `is_working` itself."""

    def started(frame: Any) -> None:
        if not is_instrumented(frame.f_code) and not is_working() and _must_be_seen(frame):
            raise Unseen(frame.f_code)

    with _recording_torch.when_functions_start(_may_matter, started):
        yield
