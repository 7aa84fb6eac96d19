"""The arithmetic of changing numbers and the draws of a step as one function, run at each call before the graph."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from wholestep.capture.record.numbers import Ledger
from wholestep.capture.record.outside import save_generator
from wholestep.capture.record.places import find, same


class Broken(Exception):
    """The numbers of a call do not lead where those of the captured one did.

    `outcome` tells which way they lead, for what is drawn alone: where, and to which value if that was asked for.
    """

    def __init__(self, text: str = "", outcome: Outcome | None = None) -> None:
        super().__init__(text)
        self.outcome = outcome


Outcome = tuple[Any, ...]
_SAME = "assume(same("


class Program:
    """Computes the numbers that a graph and its effects need, by name."""

    def __init__(self, ledger: Ledger, needed: Iterable[str], generators: tuple[Any, ...]) -> None:
        self.generators = generators
        self._put_back: list[Callable[[], None]] = []
        self._names = dict(ledger.constants)
        self._names |= {"find": find, "same": same, "assume": _assume}
        self._names |= {"expect": _expect, "expect_same": _expect_same}
        for name, path in ledger.leaves.items():
            self._names[f"path_{name}"] = path
        read = [f"    {name} = find(path_{name}, call)" for name in ledger.leaves]
        returned = ", ".join(f"{name!r}: {name}" for name in sorted(set(needed)))
        self.source = "\n".join(
            ["def run(call):", *read, *(f"    {line}" for line in _expecting(ledger)), f"    return {{{returned}}}"]
        )
        self.is_empty = not ledger.leaves and not ledger.lines
        self._run: Callable[[Any], dict[str, Any]] | None = None

    def run(self, call: Any) -> dict[str, Any]:
        """The numbers of one call; raises `Broken`, with all generators as before, if they lead elsewhere."""
        if self.is_empty:
            return {}
        if self._run is None:
            exec(compile(self.source, "<wholestep numbers>", "exec"), self._names)
            self._run = self._names["run"]
        assert self._run is not None
        self._put_back = [save_generator(generator) for generator in self.generators]
        try:
            return self._run(call)
        except BaseException as error:
            self.undo_draws()
            if isinstance(error, Broken) or not isinstance(error, Exception):
                raise
            # The step itself may handle it, as only its own code can tell.
            raise Broken(f"{type(error).__name__}: {error}") from error

    def undo_draws(self) -> None:
        """Put generators back to where they were before the last run."""
        for undo in self._put_back:
            undo()
        self._put_back = []


def _expecting(ledger: Ledger) -> Iterator[str]:
    """The lines of a ledger, in which assumptions about what is drawn say what has been drawn instead."""
    drawn = {*ledger.drawn}
    for index, line in enumerate(ledger.lines):
        is_drawn = not drawn.isdisjoint(re.findall(r"[A-Za-z_]\w*", line))
        if is_drawn and line.startswith(_SAME):
            yield f"expect_same({index}, {line.removeprefix(_SAME)[:-1]}"
        elif is_drawn and line.startswith("assume("):
            yield f"expect({index}, {line.removeprefix('assume(')}"
        else:
            drawn |= {line.partition(" = ")[0]} if is_drawn else set()
            yield line


def _assume(holds: Any) -> None:
    if not holds:
        raise Broken


def _expect(index: int, holds: Any) -> None:
    if not holds:
        raise Broken("a draw", (index,))


def _expect_same(index: int, value: Any, expected: Any) -> None:
    if not same(value, expected):
        raise Broken("a draw", (index, repr(value)))
