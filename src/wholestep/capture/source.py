"""Whose line is it: the user's file and line behind a traced op or an exception."""

from __future__ import annotations

import copy
import functools
import inspect
import os
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FrameType, TracebackType
from typing import Any

import torch

VALUE_ADVICE = (
    "A captured step cannot look at values while it runs: return the tensor and read it after the call, "
    "or use torch.where / torch.clamp instead of Python branches"
)

TORCH_ROOT = os.path.realpath(torch.__path__[0])

_WHOLESTEP_ROOT = os.path.dirname(os.path.realpath(os.path.dirname(__file__)))
_OPEN_ROOMS = tuple(os.path.join(_WHOLESTEP_ROOT, name) + os.sep for name in ("zoo", "integrations"))
"""What is of Wholestep, and yet traced as if the user had written it."""
_is_user_file: dict[str, bool] = {}


def path_of(filename: str) -> str:
    """A file in its real directory: environments may be linked as a whole, or file by file to a store."""
    directory, name = os.path.split(filename)
    return os.path.join(os.path.realpath(directory), name)


def is_user_file(filename: str) -> bool:
    """Whether a file is the user's: not torch, not Wholestep (but for its zoo and integrations), not generated."""
    known = _is_user_file.get(filename)
    if known is None:
        path = path_of(filename)
        ours = path.startswith(_WHOLESTEP_ROOT + os.sep) and not path.startswith(_OPEN_ROOMS)
        torchs = path.startswith(TORCH_ROOT + os.sep)
        pythons = filename.startswith("<") or filename == copy.__file__ or f"{os.sep}contextlib.py" in filename
        known = not (ours or torchs or pythons)
        _is_user_file[filename] = known
    return known


def is_own_file(filename: str) -> bool:
    """Whether a file is Wholestep's (but for its zoo)."""
    return path_of(filename).startswith(_WHOLESTEP_ROOT + os.sep) and not path_of(filename).startswith(_OPEN_ROOMS[0])


_LIBRARY_ROOTS = tuple(
    os.path.realpath(path) + os.sep
    for path in dict.fromkeys(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
)
_is_library_file: dict[str, bool] = {}


def is_library_file(filename: str) -> bool:
    """Whether a file was installed: the standard library, or a package that is not the user's to change."""
    known = _is_library_file.get(filename)
    if known is None:
        path = path_of(filename)
        is_in_environment = any(f"{os.sep}{name}{os.sep}" in path for name in ("site-packages", "dist-packages"))
        is_ours = path.startswith(_OPEN_ROOMS[1])
        known = _is_library_file[filename] = is_in_environment or is_ours or path.startswith(_LIBRARY_ROOTS)
    return known


class Location(str):
    """`file:line` of the user's own code; `library` is the line of an installed package that it has led to, if any."""

    __slots__ = ("is_of_library", "library")

    library: str | None
    is_of_library: bool

    @classmethod
    def of(cls, frames: Iterable[tuple[str, int]]) -> Location | None:
        """The place that some frames, innermost first, show; that of a library where none is the user's own."""
        library: tuple[str, int] | None = None
        for filename, line in frames:
            if not is_user_file(filename):
                continue
            if not is_library_file(filename):
                return cls.at(filename, line, library)
            library = library or (filename, line)
        if library is None:
            return None
        made = cls.at(*library)
        made.is_of_library = True
        return made

    @classmethod
    def at(cls, filename: str, line: int, library: tuple[str, int] | None = None) -> Location:
        made = cls(f"{filename}:{line}")
        made.library = None if library is None else f"{_short(library[0])}:{library[1]}"
        made.is_of_library = False
        return made


def _short(filename: str) -> str:
    """The path of a library's file as one imports it: `transformers/trainer.py`."""
    path = path_of(filename)
    roots = [root for root in _LIBRARY_ROOTS if path.startswith(root)]
    return path[len(max(roots, key=len)) :] if roots else path


class Line(str):
    """`name.py:line`, as it stands next to an op; `location` is what an error says."""

    __slots__ = ("location",)

    location: Location | None


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
    is_compared = False
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        asked = _READS_BY_NAME.get(frame.f_code.co_name, asked)
        is_compared |= frame.f_code.co_name == "_truth_of_comparison"
        frame = frame.f_back
    return "a comparison" if is_compared else asked


def current_line() -> str:
    """`name.py:line` of the innermost user frame of the running call, empty when there is none."""
    frame = _innermost_user_frame()
    if frame is None:
        return ""
    line = Line(f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}")
    line.location = Location.of(_outwards(frame))
    return line


def current_location() -> Location | None:
    """Like `current_line`, with the whole path, for error messages."""
    return Location.of(_outwards(inspect.currentframe()))


def location_of_line(line: str | None) -> str | None:
    """What an error says about an op's line."""
    return getattr(line, "location", line) or None


def _outwards(frame: FrameType | None) -> Iterator[tuple[str, int]]:
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back


def raising_line(error: BaseException, function: Callable[..., Any] | None = None) -> Location | None:
    """The innermost user frame that an exception passed through, or else where `function` is defined or called."""
    passed = list(frames_of(error))
    frames = [(frame.f_code.co_filename, line) for frame, line in reversed(passed)]
    inside = Location.of(frames)
    if inside is not None and not inside.is_of_library:
        return inside
    defined = None if function is None else definition(function)
    if defined is not None and is_user_file(defined[0]) and not is_library_file(defined[0]):
        return Location.of([*frames, defined])
    caller = passed[0][0].f_back if passed else inspect.currentframe()
    return Location.of([*frames, *_outwards(caller)]) or location_of(function)


def definition(function: Any) -> tuple[str, int] | None:
    """File and line where a function is defined, or what is called when an object is."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    called = function if hasattr(function, "__code__") else vars(type(function)).get("__call__")
    code = getattr(called, "__code__", None)
    return (code.co_filename, code.co_firstlineno) if isinstance(code, CodeType) else None


def location_of(function: Any) -> Location | None:
    """`file:line` of a function's definition."""
    defined = definition(function)
    return None if defined is None else Location.at(*defined)


def frames_of(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    """The frames that an exception passed through, outermost first, with their lines."""
    traceback: TracebackType | None = error.__traceback__
    while traceback is not None:
        yield traceback.tb_frame, traceback.tb_lineno
        traceback = traceback.tb_next


def has_passed_through(error: BaseException, filename: str) -> bool:
    """Whether an exception came through a file of this folder."""
    path = os.path.join(os.path.dirname(__file__), filename)
    return any(frame.f_code.co_filename == path for frame, _ in frames_of(error))


def first_line(error: BaseException) -> str:
    """The first line of an error's text, as part of a sentence of ours."""
    line = next(iter(str(error).splitlines()), "").rstrip(".!")
    return re.sub(r"\.\s+(?=[A-Z])", "; ", line) or "no message"


def kind_of(error: BaseException) -> str:
    """The name of an error's class, or of the public one that it is a kind of."""
    public = [kind for kind in type(error).__mro__ if not kind.__module__.startswith("torch._")]
    return public[0].__name__
