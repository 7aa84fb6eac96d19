"""What a pickle would cost to load, found out without loading it.

A few hundred bytes can describe a tuple of tuples of ... that share their parts: to walk it, or to hash it as a key,
takes 2^n steps. torch's loader for weights would do both. Here the program is followed on paper: every container is
the list of its parts, and whatever would be walked is walked with a budget that is a multiple of the file's size.
"""

from __future__ import annotations

import pickletools
from typing import Any

from wholestep.errors import CheckpointError

_STEPS_PER_BYTE = 16
_MORE_STEPS = 2**16

_Part = list[Any]
"""A container as its parts, each a container again; numbers, text and other leaves have none."""

_NUMBERS = {"NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"}
_LEAVES = _NUMBERS | {"BINUNICODE", "SHORT_BINSTRING", "GLOBAL"}
_EMPTY = {"EMPTY_TUPLE", "EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET"}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_PUTS, _GETS = {"BINPUT", "LONG_BINPUT"}, {"BINGET", "LONG_BINGET"}


def refuse_endless(data: bytes) -> None:
    """Raise `CheckpointError` if a program for torch's loader would take out of proportion to its size."""
    try:
        _Paper(_MORE_STEPS + _STEPS_PER_BYTE * len(data)).follow(data)
    except CheckpointError:
        raise
    except Exception as error:  # a program that does not work out on paper would not do so for real
        raise CheckpointError(f"one of its entries is no program of torch.save: {type(error).__name__}") from error


class _Paper:
    """The stack, marks and memory of the program, with parts in place of values."""

    def __init__(self, num_steps: int) -> None:
        self._steps_left = num_steps
        self._stack: list[_Part] = []
        self._marks: list[int] = []
        self._memory: dict[int, _Part] = {}

    def follow(self, data: bytes) -> None:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name == "STOP":
                self._walk(self._stack.pop())
                return
            self._step(opcode.name, argument)

    def _step(self, name: str, argument: Any) -> None:
        stack = self._stack
        if name in _LEAVES or name in _EMPTY:
            stack.append([])
        elif name in _PUTS:
            self._memory[argument] = stack[-1]
        elif name in _GETS:
            stack.append(self._memory[argument])
        elif name == "MARK":
            self._marks.append(len(stack))
        elif name in _TUPLES:
            stack[-_TUPLES[name] :] = [stack[-_TUPLES[name] :]]
        elif name == "TUPLE":
            stack.append(self._since_mark())
        elif name in ("APPEND", "APPENDS"):
            parts = self._since_mark() if name == "APPENDS" else [stack.pop()]
            stack[-1].extend(parts)
        elif name in ("SETITEM", "SETITEMS"):
            items = self._since_mark() if name == "SETITEMS" else [stack.pop(-2), stack.pop()]
            for key in items[::2]:
                self._walk(key)
            stack[-1].extend(items)
        elif name in ("REDUCE", "NEWOBJ", "BUILD"):
            arguments = stack.pop()
            self._walk(arguments)
            stack[-1] = [stack[-1], arguments]
        elif name == "BINPERSID":
            self._walk(stack[-1])
        elif name not in ("PROTO", "FRAME"):
            raise CheckpointError(f"one of its entries has the instruction {name}, which torch.save does not write")

    def _since_mark(self) -> _Part:
        mark = self._marks.pop()
        parts = self._stack[mark:]
        del self._stack[mark:]
        return parts

    def _walk(self, part: _Part) -> None:
        """Visit all that is below, as often as it is there."""
        waiting = [part]
        while waiting:
            self._steps_left -= 1
            if self._steps_left < 0:
                raise CheckpointError("one of its entries is much larger in memory than in its file")
            waiting.extend(waiting.pop())
