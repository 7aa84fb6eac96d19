"""Whose line is it: the user's file and line behind a traced op or an exception."""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Callable
from types import FrameType, TracebackType

import torch

VALUE_ADVICE = (
    "A captured step cannot look at values while it runs: return the tensor and read it after the call, "
    "or use torch.where / torch.clamp instead of Python branches"
)

TORCH_ROOT = os.path.realpath(torch.__path__[0])

_WHOLESTEP_ROOT = os.path.dirname(os.path.realpath(os.path.dirname(__file__)))
_ZOO_ROOT = os.path.join(_WHOLESTEP_ROOT, "zoo")
_is_user_file: dict[str, bool] = {}


def path_of(filename: str) -> str:
    """A file in its real directory: environments may be linked as a whole, or file by file to a store."""
    directory, name = os.path.split(filename)
    return os.path.join(os.path.realpath(directory), name)


def is_user_file(filename: str) -> bool:
    """Whether a file is the user's: not torch, not Wholestep (whose zoo counts as user code), not generated."""
    known = _is_user_file.get(filename)
    if known is None:
        path = path_of(filename)
        ours = path.startswith(_WHOLESTEP_ROOT + os.sep) and not path.startswith(_ZOO_ROOT + os.sep)
        torchs = path.startswith(TORCH_ROOT + os.sep)
        pythons = filename.startswith("<") or filename == copy.__file__ or f"{os.sep}contextlib.py" in filename
        known = not (ours or torchs or pythons)
        _is_user_file[filename] = known
    return known


def innermost_frame(is_one: Callable[[str], bool], frame: FrameType | None = None) -> FrameType | None:
    """The innermost frame, from some frame on, of a file that is one of those that are looked for."""
    frame = frame or inspect.currentframe()
    while frame is not None and not is_one(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def _innermost_user_frame() -> FrameType | None:
    return innermost_frame(is_user_file)


_READS_BY_NAME = {
    "__bool__": "an `if`, `while`, `and` or bool() on a tensor",
    "_compared": "a comparison",
    "tolist": ".tolist()",
    "__float__": "float()",
    "__int__": "int()",
    "__index__": "use as an index",
    "__complex__": "complex()",
    "__format__": "formatting a number",
    "__repr__": "text made of a number",
    "__str__": "text made of a number",
}


def what_reads(default: str = "use of a number") -> str:
    """How the user has asked for a value: what stands for it has methods that are called on the way."""
    frame, asked = inspect.currentframe(), default
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        asked = _READS_BY_NAME.get(frame.f_code.co_name, asked)
        frame = frame.f_back
    return asked


def current_line() -> str:
    """`name.py:line` of the innermost user frame of the running call, empty when there is none."""
    frame = _innermost_user_frame()
    return "" if frame is None else f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def current_location() -> str | None:
    """Like `current_line`, with the whole path, for error messages."""
    frame = _innermost_user_frame()
    return None if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def raising_line(error: BaseException) -> str | None:
    """`file:line` of the innermost user frame that an exception passed through."""
    location = None
    traceback: TracebackType | None = error.__traceback__
    while traceback is not None:
        filename = traceback.tb_frame.f_code.co_filename
        if is_user_file(filename):
            location = f"{filename}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return location


def has_passed_through(error: BaseException, filename: str) -> bool:
    """Whether an exception came through a file of this folder."""
    path = os.path.join(os.path.dirname(__file__), filename)
    traceback: TracebackType | None = error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == path:
            return True
        traceback = traceback.tb_next
    return False


def first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "no message")
