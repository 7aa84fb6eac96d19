"""What to change where a library looks at a value: the argument that makes it look, where one can be seen.

The functions between the user's line and the one that looks are read: an `if` around that line which asks for an
argument of its function, or for an attribute that the object was given as one, tells how to go round it.

    if self._validate_args: ...         Normal(validate_args=False)
    if is_causal is None: ...           TransformerEncoder.forward(is_causal=...)
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterable, Iterator
from types import FrameType, FunctionType
from typing import Any

from wholestep.capture import source

Frames = Iterable[tuple[FrameType, int]]
"""Running or finished calls, innermost first, with their lines."""

_OF_A_LIBRARY = (
    "The library looks at a value there: look for an argument of it that leaves this out, or do that part outside the "
    "step and pass what it gives"
)


def for_values(frames: Frames | None = None) -> str:
    """What to do about a step that needs a value at the line that runs."""
    passed = _of_libraries(_running() if frames is None else frames)
    for index, (frame, line) in enumerate(passed):
        for name, value, owner in _switches(frame, line):
            return f"Pass {name}={value} to {owner or _first_with(name, frame, passed[index:])}: it does not look then"
    is_foreign = any(source.is_user_file(frame.f_code.co_filename) for frame, _ in passed)
    return _OF_A_LIBRARY if is_foreign else source.VALUE_ADVICE


def for_error(error: BaseException) -> str:
    return for_values(reversed(list(source.frames_of(error))))


def _running() -> Iterator[tuple[FrameType, int]]:
    frame = inspect.currentframe()
    while frame is not None:
        yield frame, frame.f_lineno
        frame = frame.f_back


def _of_libraries(frames: Frames) -> list[tuple[FrameType, int]]:
    """The calls of libraries and of torch that the user's own line has led to, without what traces them."""
    passed: list[tuple[FrameType, int]] = []
    for frame, line in frames:
        filename = frame.f_code.co_filename
        if source.is_user_file(filename) and not source.is_library_file(filename):
            return passed
        if source.is_own_file(filename):
            passed.clear()
        elif not filename.startswith("<"):
            passed.append((frame, line))
    return []


def _switches(frame: FrameType, line: int) -> Iterator[tuple[str, str, str | None]]:
    """Arguments that conditions around a line ask for: name, the value that leads elsewhere, and whose they are."""
    try:
        lines, first = inspect.getsourcelines(frame.f_code)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, SyntaxError, TypeError):
        return
    here = line - max(first, 1) + 1
    around = [node for node in ast.walk(tree) if isinstance(node, ast.If) and _leads_to(node, here)]
    for node in reversed(around):
        for test in node.test.values if isinstance(node.test, ast.BoolOp) else [node.test]:
            found = _asked(test, frame)
            if found is not None:
                yield found


def _leads_to(node: ast.If, line: int) -> bool:
    end = node.body[-1].end_lineno or node.lineno
    return node.lineno <= line <= end


def _asked(test: ast.expr, frame: FrameType) -> tuple[str, str, str | None] | None:
    wanted = "False"
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test, wanted = test.operand, "True"
    elif isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Is):
        is_none = isinstance(test.comparators[0], ast.Constant) and test.comparators[0].value is None
        test, wanted = test.left, "True or False" if is_none else ""
    if isinstance(test, ast.Name) and test.id in _arguments(frame.f_code):
        return (test.id, wanted, None) if _is_flag(frame.f_locals.get(test.id), wanted) else None
    if isinstance(test, ast.Attribute) and isinstance(test.value, ast.Name) and test.value.id == "self":
        owner = frame.f_locals.get("self")
        name = test.attr.lstrip("_")
        if _is_flag(getattr(owner, test.attr, None), wanted) and name in _arguments_of_making(type(owner)):
            return name, wanted, type(owner).__name__
    return None


def _is_flag(value: Any, wanted: str) -> bool:
    """Whether a value is what leads to the look, so that another one would not."""
    return value is {"False": True, "True": False, "True or False": None}.get(wanted, frozenset())


def _arguments(code: Any) -> tuple[str, ...]:
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def _arguments_of_making(cls: type) -> set[str]:
    makers = [vars(base).get("__init__") for base in cls.__mro__]
    return {name for maker in makers if isinstance(maker, FunctionType) for name in _arguments(maker.__code__)}


def _first_with(name: str, frame: FrameType, passed: list[tuple[FrameType, int]]) -> str:
    """The function nearest to the user that hands an argument of this name on."""
    having = [other for other, _ in passed if name in _arguments(other.f_code)]
    return (having[-1] if having else frame).f_code.co_qualname
