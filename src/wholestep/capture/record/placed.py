"""Numbers that stand in the user's objects while a step is traced, in the place of real ones."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable
from typing import Any

import torch

from wholestep.capture.record.numbers import Ledger, Number, is_real, value_of
from wholestep.capture.record.places import Step, find, put

Path = tuple[Any, ...]
_NOWHERE = (Step.LENGTH, Step.CALL)
"""Steps to numbers that are computed when somebody asks, and stand nowhere."""


class PlacedNumbers:
    """Which `Number` of a trace stands where."""

    def __init__(self, ledger: Ledger, twin_of: Callable[[Any], Any]) -> None:
        """While a step is traced, `twin_of(tensor)` stands for a tensor, also as a key of dicts."""
        self._ledger = ledger
        self._twin_of = twin_of
        self._placed: list[tuple[Path, Number]] = []
        self._arguments: Any = None

    @contextlib.contextmanager
    def in_place(self, paths: Iterable[Path], arguments: Any) -> Generator[None]:
        """Let a `Number` stand at each of some paths where a number stands now; where none can be put, it stays.

        All are found before any is put: what a path leads through may compute with another's number, and keep that.
        """
        self._arguments = arguments
        undo: list[Callable[[], None]] = []
        places = [(path, self._inside(path)) for path in paths if path[-1][0] not in _NOWHERE]
        found = [(path, inside, find(inside, arguments)) for path, inside in places]
        try:
            for path, inside, value in found:
                if is_real(value):
                    with contextlib.suppress(AttributeError, TypeError):
                        number = self._ledger.leaf(value, path)
                        undo.append(put(inside, number, arguments))
                        self._placed.append((inside, number))
            yield
        finally:
            for put_back in reversed(undo):
                put_back()

    def _inside(self, path: Path) -> Path:
        """A path as it leads through what the trace has lent."""
        root, *steps = path
        return (root, *((step, self._twin_of(key) if isinstance(key, torch.Tensor) else key) for step, key in steps))

    @contextlib.contextmanager
    def plain(self) -> Generator[None]:
        """Let real numbers stand where they did, for code that keeps what it computes of them."""
        standing = [(path, number) for path, number in self._placed if find(path, self._arguments) is number]
        put_back = [put(path, value_of(number), self._arguments) for path, number in standing]
        try:
            yield
        finally:
            for undo in reversed(put_back):
                undo()
