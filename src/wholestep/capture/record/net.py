"""A net under the recording: no function of the user's may run unseen while a step is traced.

Followed code tells what it calls, and that is followed in turn. But C code calls back (operators of an object,
descriptors, callbacks that nobody handed over in sight), and a function that runs as it is reads and writes without
telling. Python says when any function starts; if it is one that should have been followed, the trace ends before its
first instruction, and is made again with that function followed from the start (`Unseen`).
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.metadata
import os
import re
import sys
import sysconfig
import threading
from collections.abc import Callable, Generator, Iterator
from types import CodeType, FrameType, FunctionType
from typing import Any

from wholestep import _torch
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


def _must_be_seen(frame: FrameType) -> bool:
    """Whether a frame is the user's, and not there because something is imported for the first time."""
    filename = frame.f_code.co_filename
    if filename.startswith("<"):  # generated: for the module whose globals it has
        is_typed_in = frame.f_globals.get("__name__") == "__main__"
        filename = frame.f_globals.get("__file__", filename if is_typed_in else "<frozen>")
    if not _is_anybodys(filename):
        return False
    below: FrameType | None = frame
    while below is not None and not below.f_code.co_filename.startswith("<frozen importlib"):
        below = below.f_back
    return below is None


@functools.cache
def _is_anybodys(filename: str) -> bool:
    """Whether a file's functions must be seen: not Python's own nor torch's, which call them for their own ends."""
    path = os.path.realpath(filename)
    if not is_followed_file(filename) or path.startswith(_torch.TORCH_ROOT + os.sep):
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

    def check(frame: FrameType) -> None:
        if not is_instrumented(frame.f_code) and not is_working() and _must_be_seen(frame):
            raise Unseen(frame.f_code)

    with _spread_by_monitoring(check) if sys.version_info >= (3, 12) else _spread_by_tracing(check):
        yield


@contextlib.contextmanager
def _spread_by_tracing(check: Callable[[FrameType], None]) -> Generator[None]:
    before = sys.gettrace()

    def started(frame: FrameType, event: Any, about: Any) -> Any:
        filename = frame.f_code.co_filename
        if _is_anybodys(filename) or filename[0] == "<":
            check(frame)
        return None if before is None else before(frame, event, about)

    sys.settrace(started)
    try:
        yield
    finally:
        sys.settrace(before)


@contextlib.contextmanager
def _spread_by_monitoring(check: Callable[[FrameType], None]) -> Generator[None]:
    monitoring: Any = getattr(sys, "monitoring")  # noqa: B009 - there is none before Python 3.12
    free = [number for number in range(6) if monitoring.get_tool(number) is None]
    if not free:  # somebody else has them all
        yield
        return
    thread, event = threading.get_ident(), monitoring.events.PY_START

    def started(code: CodeType, _offset: int) -> Any:
        if not _is_anybodys(code.co_filename) and code.co_filename[0] != "<":
            return monitoring.DISABLE
        if threading.get_ident() == thread:
            check(sys._getframe(1))  # pyright: ignore[reportPrivateUsage]
        return None

    tool = free[-1]
    monitoring.use_tool_id(tool, "wholestep")
    monitoring.register_callback(tool, event, started)
    monitoring.set_events(tool, event)
    try:
        yield
    finally:
        monitoring.set_events(tool, 0)
        monitoring.register_callback(tool, event, None)
        monitoring.free_tool_id(tool)
