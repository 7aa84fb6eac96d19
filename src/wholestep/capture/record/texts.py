"""Text that the step makes of numbers which only the graph computes.

    print(f"loss {loss.item():.4f}")       while traced: "loss ⟨late_text⟩", late_text = format(late_item, '.4f')
                                           after the graph: "loss 0.3127"

It has to be a string while the step is traced, as C code puts it together. So a mark stands in it for what is not known
yet. Text that is put together of such text has the marks, too; it may be printed, kept and returned, and gets what is
missing then. Whoever takes it apart, compares it or asks for its length would see the mark: that is refused.
"""

from __future__ import annotations

import collections
import re
import string
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wholestep.capture.record.recorder import Recorder

# Of the private use area of Unicode, where no text of anybody else's is.
_START, _END = "\U0010fad0", "\U0010fad1"
_MARK = re.compile(f"{_START}([A-Za-z_0-9]+){_END}")
_ADD = (0, 13)
"""How bytecode numbers `+` and `+=`."""
_OF_THE_OUTSIDE = frozenset(["iterate", "item", "slice", "set_item", "set_slice", "delete_item"])
"""Hooks of those that look at a container, and not at what it holds."""
_PUTTING = frozenset(["append", "appendleft", "insert", "extend", "extendleft"])
_HARMLESS = frozenset(["attribute", "set_attribute", "set_cell", "set_global", "truth", "identity", "formatted"])
"""Hooks of instructions that may be given such text."""


def marked(name: str) -> str:
    """What stands for a text with a name in the ledger."""
    return f"{_START}{name}{_END}"


def is_marked(value: Any) -> bool:
    """Whether a value is text with something missing."""
    return type(value) is str and _START in value


def pieces(text: str) -> list[tuple[str, bool]]:
    """The parts of a text in order, and whether each is the name of what is missing there."""
    return [(part, index % 2 == 1) for index, part in enumerate(_MARK.split(text)) if part or index % 2]


def refuse_in_instruction(recorder: Recorder, hook: str, operands: tuple[Any, ...]) -> None:
    """Refuse an instruction that looks into such text; `hook` is what is told of it."""
    if hook == "set_item":  # a value may be put anywhere, a key is looked up
        operands = operands[1:]
    is_sum = hook == "binary" and operands[-1] in _ADD
    is_padded = hook == "formatted" and any(operands[1:])
    if (hook not in _HARMLESS and not is_sum) or is_padded:
        _refuse(recorder, operands, is_deep=hook not in _OF_THE_OUTSIDE)


def refuse_in_call(recorder: Recorder, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a call of C code that looks into such text; it may put it somewhere."""
    owner = getattr(function, "__self__", None)
    name = getattr(function, "__name__", "")
    if isinstance(owner, (list, collections.deque)) and name in _PUTTING:
        return
    if function in (setattr, object.__setattr__):
        args = args[1:2]
    elif isinstance(owner, dict) and name == "update":
        kwargs = {}
    elif function in (str, isinstance, type) or (type(owner) is str and _leaves_whole(owner, name)):
        return
    _refuse(recorder, (*args, *kwargs.values(), owner), is_deep=True)


def _leaves_whole(text: str, method: str) -> bool:
    """Whether `text.join(...)` or `text.format(...)` takes what it is given as it is."""
    if method != "format" or is_marked(text):
        return method == "join"
    return not any(spec or conversion for _, _, spec, conversion in string.Formatter().parse(text))


def _refuse(recorder: Recorder, values: Iterable[Any], *, is_deep: bool) -> None:
    if any(_matters(value, is_deep) for value in values):
        recorder.refuse(
            "looks into text that it has made of a value which is only known when the step runs",
            "Return the number, and make the text after the call",
        )


def _matters(value: Any, is_deep: bool) -> bool:
    """Whether something depends on such text: on what it is, or if that `is_deep`, on what it holds."""
    if isinstance(value, (set, frozenset, dict)) and any(map(is_marked, value)):
        return True
    if is_deep and isinstance(value, (list, tuple, collections.deque, dict)):
        return any(_matters(part, True) for part in (value.values() if isinstance(value, dict) else value))
    return is_marked(value)
