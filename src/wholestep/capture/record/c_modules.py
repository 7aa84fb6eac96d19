"""C functions by the modules that they are from: which depend on nothing but what they are given, which are refused."""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any

from wholestep import _recording_torch
from wholestep.capture.record.places import Step

if TYPE_CHECKING:
    from wholestep.capture.record.recorder import Recorder

# Functions of these modules depend on nothing but what they are given.
_PURE_MODULES = frozenset(
    [
        "builtins",
        "math",
        "cmath",
        "_operator",
        "operator",
        "itertools",
        "_functools",
        "_collections",
        "_abc",
        "_struct",
        "_json",
        "_sre",
        "_heapq",
        "_bisect",
        "_weakref",
        "_thread",
        "_warnings",
        "numpy",
        "torch",
        "_statistics",
        "_string",
        "_datetime",
        "array",
        "binascii",
        "zlib",
        "_codecs",
        "unicodedata",
        "_typing",
        "_contextvars",
        "copyreg",
        "_signal",
        "errno",
        "marshal",
        "_imp",
        "_ast",
        "_symtable",
    ]
)
_CLOCKS = ("time",)
# What these tell about the process, or do to it, but for what a step may ask and do unseen.
_PROCESS = {
    "sys": frozenset(
        ["intern", "getsizeof", "exc_info", "exception", "_getframe", "_getframemodulename", "audit", "is_finalizing"]
    ),
    "gc": frozenset(["collect"]),
}


def scripted(
    recorder: Recorder, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> types.FunctionType | None:
    """The Python function that `torch.jit.script` was given: TorchScript's interpreter looks past the trace.

    None for anything else, and where a container is passed, which TorchScript would copy.
    """
    if type(function) is not _recording_torch.ScriptFunction:
        return None
    if any(isinstance(value, (list, dict)) for value in (*args, *kwargs.values())):
        return None
    recorder.root(function)
    recorder.note(
        function, Step.ATTRIBUTE, _recording_torch.SCRIPTED, getattr(function, _recording_torch.SCRIPTED, None)
    )
    return getattr(function, _recording_torch.SCRIPTED, None)


def refuse_effects(recorder: Recorder, function: Any, module: types.ModuleType | None) -> None:
    """C functions that look at the world, or that nobody knows."""
    name = str(getattr(function, "__module__", None) or (module.__name__ if module else "builtins"))
    root = name.split(".")[0]
    if root in _CLOCKS:
        recorder.refuse(
            f"asks the clock ({name}.{function.__name__})", "Measure time outside the step: it returns before it ran"
        )
    if root in _PROCESS and function.__name__ in _PROCESS[root]:
        return
    if root not in _PURE_MODULES and isinstance(function, types.BuiltinFunctionType):
        if name in ("posix", "nt") and function.__name__ in ("fspath", "getpid"):
            return
        recorder.refuse(f"calls {name}.{function.__name__}(), which cannot be followed", "Call it outside the step")
