"""What to change where a library looks at a value: the argument that makes it look, where one can be seen.

The functions between the user's line and the one that looks are read: an `if` around that line which asks for an
argument of its function, or for an attribute that the object was given as one, tells how to go round it, where what
runs in place of its body looks at nothing.

    if self._validate_args: ...         Normal(validate_args=False)
    if is_causal is None: ...           TransformerEncoder.forward(is_causal=...)
"""

from __future__ import annotations

import ast
import inspect
import itertools
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
    around = [node for node in ast.walk(tree) if isinstance(node, ast.If) and _guards(node, tree, here)]
    for node in reversed(around):
        for test in _deciding(node, here):
            found = _asked(test, frame)
            if found is not None:
                yield found


def _guards(node: ast.If, function: ast.AST, line: int) -> bool:
    """Whether a line runs in an `if`, and what runs where the condition does not hold cannot look at values.

    A body that leaves the function or a loop is one way of two to the same result: `if plain: return encode(x)`. What
    follows it is the other way, and looks as well, unless it only hands on what is there.
    """
    if not node.lineno <= line <= (node.body[-1].end_lineno or node.lineno):
        return False
    others = list(node.orelse)
    if not _is_of_test(node, line) and _leaves(node.body, line):
        others += [found for found in ast.walk(function) if isinstance(found, ast.stmt) and found.lineno > _end(node)]
    return all(isinstance(part, _HANDING_ON) for other in others for part in ast.walk(other))


_HANDING_ON = (ast.Assign, ast.Return, ast.Pass, ast.Tuple, ast.Constant, ast.Name, ast.Attribute, ast.expr_context)


def _leaves(body: list[ast.stmt], line: int) -> bool:
    """Whether a body, or a block in it that runs the line, ends by leaving. Raising is no other way to a result."""
    inner = (part for statement in body for part in ast.walk(statement))
    blocks = [body, *(getattr(part, name, None) for part in inner for name in ("body", "orelse", "finalbody"))]
    running = [block for block in blocks if isinstance(block, list) and any(_covers(part, line) for part in block)]
    return any(isinstance(block[-1], (ast.Return, ast.Continue, ast.Break)) for block in running)


def _covers(node: ast.stmt, line: int) -> bool:
    return node.lineno <= line <= _end(node)


def _is_of_test(node: ast.If, line: int) -> bool:
    return line <= _end(node.test) and line < node.body[0].lineno


def _end(node: ast.stmt | ast.expr) -> int:
    return node.end_lineno or node.lineno


def _deciding(node: ast.If, line: int) -> list[ast.expr]:
    """The parts of a condition any of which alone makes it false, before anything of it looks."""
    if not isinstance(node.test, ast.BoolOp):
        return [node.test]
    if isinstance(node.test.op, ast.Or):
        return []
    if not _is_of_test(node, line):
        return node.test.values
    return list(itertools.takewhile(lambda part: not any(map(_may_look, ast.walk(part))), node.test.values))


def _may_look(part: ast.AST) -> bool:
    is_plain = isinstance(part, (ast.Compare, ast.UnaryOp, ast.Is, ast.IsNot, ast.Not, *_HANDING_ON))
    return not is_plain


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
