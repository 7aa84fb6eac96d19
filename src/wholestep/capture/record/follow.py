"""Whose code is followed while a step is traced, and how it is exchanged for instrumented code and back."""

from __future__ import annotations

import functools
import os
import sysconfig
from collections.abc import Callable, Iterator
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
import sympy

from wholestep.capture import source
from wholestep.capture.record.instrument import Instrumenter, UnknownInstruction
from wholestep.errors import CaptureError

_STDLIB = os.path.realpath(sysconfig.get_path("stdlib"))
# Torch's own layers and optimizers read options like anybody's; the rest of torch works on tensors.
_TORCH_FOLLOWED = tuple(os.path.join(source.TORCH_ROOT, *parts) + os.sep for parts in (("nn", "modules"), ("optim",)))
_TORCH_LEFT_OUT = tuple(
    os.path.join(source.TORCH_ROOT, *parts)
    for parts in (("nn", "modules", "module.py"), ("nn", "modules", "lazy.py"), ("optim", "optimizer.py"))
)
# What these do besides reading is done again at each call (output, draws), or is about Python itself.
_STDLIB_LEFT_OUT = tuple(
    os.path.join(_STDLIB, name)
    for name in (
        "logging",
        "warnings.py",
        "random.py",
        "threading.py",
        "importlib",
        "inspect.py",
        "abc.py",
        "enum.py",
        "typing.py",
        "functools.py",
        "linecache.py",
        "tokenize.py",
        "traceback.py",
        "unittest",
        "collections/abc.py",
        "_collections_abc.py",
        "ctypes",
        "re",
    )
)
_LIBRARIES = tuple(os.path.realpath(library.__path__[0]) + os.sep for library in (np, sympy))
_WHOLESTEP = os.path.dirname(os.path.dirname(os.path.realpath(os.path.dirname(__file__))))
_is_followed: dict[str, bool] = {}
_HEAP_TYPE = 1 << 9


def is_followed_file(filename: str) -> bool:
    """Whether functions of a file are followed: the user's, and libraries' that are neither torch nor Python's own."""
    known = _is_followed.get(filename)
    if known is None:
        known = _is_followed[filename] = _decide(filename)
    return known


@functools.cache
def is_of_torch(filename: str) -> bool:
    """Whether a file is one of torch's, whose functions nobody edits while they run."""
    return source.path_of(filename).startswith(source.TORCH_ROOT + os.sep)


def is_of_stdlib(filename: str) -> bool:
    """Whether a file is one of Python's own library."""
    path = source.path_of(filename)
    return path.startswith(_STDLIB + os.sep) and f"{os.sep}site-packages{os.sep}" not in path


def _decide(filename: str) -> bool:
    path = source.path_of(filename)
    if path.startswith(source.TORCH_ROOT + os.sep):
        return path.startswith(_TORCH_FOLLOWED) and not path.startswith(_TORCH_LEFT_OUT)
    if path.startswith(_WHOLESTEP + os.sep):
        return source.is_user_file(filename)
    if path.startswith(_LIBRARIES) or filename.startswith(("<frozen", "<wholestep", "<eval_with_key>")):
        return False
    return not path.startswith(_STDLIB_LEFT_OUT)


class Followers:
    """The functions whose code is exchanged during one trace."""

    instrumenter: Instrumenter

    def __init__(self) -> None:
        self._codes: dict[FunctionType, CodeType] = {}
        self._classes: set[type] = set()

    def follow(self, function: FunctionType) -> bool | None:
        """Exchange a function's code; True if that is new, False if it was before, None if it is not to be followed."""
        code = function.__code__
        if function in self._codes or self.instrumenter.is_instrumented(code):
            return False
        if not is_followed_file(code.co_filename):
            return None
        try:
            instrumented = self.instrumenter.instrumented(code)
        except (UnknownInstruction, AssertionError) as error:  # the latter is how torch's assembler says so
            raise CaptureError(
                f"{function.__qualname__} uses instructions of Python that cannot be followed ({error})",
                location=f"{code.co_filename}:{code.co_firstlineno}",
                advice="Call it outside the step",
            ) from error
        self._codes[function] = code
        function.__code__ = instrumented
        return True

    def code_of(self, function: FunctionType) -> CodeType:
        """The own code of a function that is followed."""
        return self._codes[function]

    def is_followed(self, code: CodeType) -> bool:
        """Whether running code tells, or need not."""
        return self.instrumenter.is_instrumented(code) or not is_followed_file(code.co_filename)

    def operators(self, cls: type) -> Iterator[tuple[type, str, FunctionType]]:
        """Functions that Python calls by itself on objects of a class that has not been seen before, and where."""
        if cls in self._classes or not cls.__flags__ & _HEAP_TYPE:
            return
        self._classes.add(cls)
        for base in cls.__mro__:
            if base.__module__.split(".")[0] in ("torch", "builtins"):
                continue
            for name, member in list(vars(base).items()):
                if isinstance(member, FunctionType) and name.startswith("__") and name.endswith("__"):
                    yield base, name, member

    def remembered(self) -> Callable[[], None]:
        """What forgets all that is followed from here on."""
        codes, classes = {*self._codes}, {*self._classes}

        def forget() -> None:
            for function in [function for function in self._codes if function not in codes]:
                function.__code__ = self._codes.pop(function)
            self._classes.intersection_update(classes)

        return forget

    def restore(self) -> None:
        """Give all functions their own code back."""
        for function, code in self._codes.items():
            function.__code__ = code
        self._codes.clear()


def functions_in(value: Any) -> Iterator[FunctionType]:
    """The functions that a callable consists of: behind methods, partials, decorators, descriptors."""
    seen: set[int] = set()
    pending = [value]
    while pending:
        part = pending.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, FunctionType):
            yield part
            pending += [content for cell in part.__closure__ or () if callable(content := _content(cell))]
        elif isinstance(part, property):
            pending += [part.fget, part.fset, part.fdel]
        elif isinstance(part, (functools.partial, functools.cached_property)):
            pending.append(part.func)  # pyright: ignore[reportUnknownMemberType]
        elif type(part) in _WRAPPING:
            pending.append(getattr(part, "__func__", None) or getattr(part, "__wrapped__", None))


_WRAPPING = (staticmethod, classmethod, MethodType, functools._lru_cache_wrapper)  # pyright: ignore[reportPrivateUsage]


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None
