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

from wholestep.capture.record.instrument import REMAINDER
from wholestep.capture.record.numbers import Number, is_late
from wholestep.capture.record.places import is_plain

if TYPE_CHECKING:
    from wholestep.capture.record.recorder import Recorder

# Of the private use area of Unicode, where no text of anybody else's is.
_START, _END = "\U0010fad0", "\U0010fad1"
_MARK = re.compile(f"{_START}([A-Za-z_0-9]+){_END}")
# What C code makes of marks that it takes for text like any other: their letters, or another spelling of them.
_SPELLED = (_START, _END, *(ascii(mark)[1:-1] for mark in (_START, _END)), "\\udbfe\\uded0", "\\udbfe\\uded1")
_ADD = (0, 13)
"""How bytecode numbers `+` and `+=`."""
_OF_THE_OUTSIDE = frozenset(["iterate", "item", "slice", "set_item", "set_slice", "delete_item"])
"""Hooks of those that look at a container, and not at what it holds."""
_PUTTING = frozenset(["append", "appendleft", "insert", "extend", "extendleft"])
_HARMLESS = frozenset(["attribute", "set_attribute", "set_cell", "set_global", "truth", "identity"])
"""Hooks of instructions that may be given such text."""


def marked(name: str) -> str:
    """What stands for a text with a name in the ledger."""
    return f"{_START}{name}{_END}"


def is_marked(value: Any) -> bool:
    """Whether a value is text with something missing."""
    return type(value) is str and _START in value


def is_taken_apart(value: Any) -> bool:
    """Whether a value is text in which a mark is left that is no longer one: somebody has taken it for text."""
    return type(value) is str and any(part in _MARK.sub("", value) for part in _SPELLED)


def pieces(text: str) -> list[tuple[str, bool]]:
    """The parts of a text in order, and whether each is the name of what is missing there."""
    return [(part, index % 2 == 1) for index, part in enumerate(_MARK.split(text)) if part or index % 2]


def refuse_in_instruction(recorder: Recorder, hook: str, operands: tuple[Any, ...]) -> None:
    """Refuse an instruction that looks into such text; `hook` is what is told of it."""
    if hook == "set_item":  # a value may be put anywhere, a key is looked up
        operands = operands[1:]
    is_sum = hook == "binary" and operands[-1] in _ADD
    if hook == "binary" and operands[-1] in REMAINDER and type(operands[0]) is str and not is_marked(operands[0]):
        return  # see `percent`
    is_left_whole = hook == "formatted" and is_marked(operands[0]) and not any(operands[1:])
    if hook not in _HARMLESS and not is_sum and not is_left_whole:
        _refuse(recorder, operands, is_deep=hook not in _OF_THE_OUTSIDE)


def refuse_in_call(recorder: Recorder, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a call of C code that looks into such text; it may put it somewhere."""
    is_deep = True
    owner = getattr(function, "__self__", None)
    name = getattr(function, "__name__", "")
    if isinstance(owner, (list, collections.deque)) and name in _PUTTING:
        return
    if function in (setattr, object.__setattr__):
        args = args[1:2]
    elif isinstance(owner, dict) and name == "update":
        kwargs = {}
    elif function in (str, isinstance, type):
        return
    elif type(owner) is str and _leaves_whole(owner, name):
        # They are, but not what is in a container among them; `join` takes the letters of text that it is given.
        args = tuple(arg for arg in args if name == "join" or not is_marked(arg))
        kwargs = {key: arg for key, arg in kwargs.items() if not is_marked(arg)}
        owner, is_deep = "", name == "format"
    _refuse(recorder, (*args, *kwargs.values(), owner), is_deep=is_deep)


def _leaves_whole(text: str, method: str) -> bool:
    """Whether `text.join(...)` or `text.format(...)` takes what it is given as it is."""
    if method != "format" or is_marked(text):
        return method == "join"
    return not any(spec or conversion for _, _, spec, conversion in string.Formatter().parse(text))


def refuse_padding_by_format(recorder: Recorder, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse `"{!s:>12}".format(loss)`: what is padded is the text of a number, before anybody can look at it."""
    text = getattr(function, "__self__", None)
    if type(text) is str and getattr(function, "__name__", "") in ("format", "format_map"):
        fields = string.Formatter().parse(text)
        if any(spec and conversion for _, _, spec, conversion in fields):
            given = args[0].values() if function.__name__ == "format_map" else (*args, *kwargs.values())
            refuse_made_of(recorder, given)


def refuse_marked(recorder: Recorder, values: Iterable[Any]) -> None:
    """Refuse to go on with values if one of them is such text, or holds some."""
    _refuse(recorder, values, is_deep=True)


def refuse_made_of(recorder: Recorder, values: Iterable[Any]) -> None:
    """Refuse text of values, if that may be text of a number; of other objects nobody knows what text they have."""
    is_early = recorder.ledger.text_later is not None
    if any(is_early or is_late(value) if type(value) is Number else not is_plain(value) for value in values):
        recorder.late.has_early_texts |= not recorder.late.found
        _refuse_to_look(recorder)


def may_make(recorder: Recorder) -> bool:
    """Whether there are numbers of which the step would make text with something missing."""
    return recorder.late.is_used or (recorder.ledger.text_later is not None and bool(recorder.ledger.lines))


def _refuse(recorder: Recorder, values: Iterable[Any], *, is_deep: bool) -> None:
    if any(_matters(value, is_deep) for value in values):
        _refuse_to_look(recorder)


def _refuse_to_look(recorder: Recorder) -> None:
    recorder.escalate()
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
