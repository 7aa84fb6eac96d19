"""Where in the forward modules were called and `pipe_split()` stood, in numbers of captured ops.

Ops come and go (dead ones are dropped, equal ones merged), so a place is not tied to one: while the step is traced,
time is cut into *epochs*, a new one at each place, and every node is told the epoch that it was made in. Afterwards a
place is the number of the last op that was made before it. Captured ops are numbered in the order in which they ran
(`origins` of a node), whatever passes do later.

    x = a(x); pipe_split(); x = b(x)         mark:  after=17         call of b:  begin=17, end=23       (ops 18 to 23)
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import fx

from wholestep.capture import source
from wholestep.graph import Phase

if TYPE_CHECKING:
    from wholestep.capture.session import Session


@dataclass(frozen=True)
class Mark:
    """A call of `pipe_split()`, behind the op numbered `after`: in which phase, module and line of the user's code."""

    after: int
    phase: Phase
    module: str
    source: str


@dataclass(frozen=True)
class ModuleCall:
    """A call of a module in the forward: the ops numbered from `begin` (exclusive) to `end` (inclusive)."""

    module: str
    begin: int
    end: int


@dataclass(frozen=True)
class Trail:
    """All marks and calls of a step, in the order in which they happened (an outer call before those inside it)."""

    marks: tuple[Mark, ...] = ()
    calls: tuple[ModuleCall, ...] = ()


@dataclass
class TrailNotes:
    """A trail in the making: places are epochs."""

    epoch: int = 0
    _marks: list[Mark] = field(default_factory=list[Mark])
    _calls: list[ModuleCall] = field(default_factory=list[ModuleCall])
    _open: list[int] = field(default_factory=list[int])

    def mark(self, phase: Phase, module: str) -> None:
        """Note a mark at the line of the user's code that is running."""
        self.epoch += 1
        self._marks.append(Mark(self.epoch, phase, module, source.current_line()))

    def enter(self, module: str) -> None:
        self.epoch += 1
        self._open.append(len(self._calls))
        self._calls.append(ModuleCall(module, self.epoch, self.epoch))

    def leave(self) -> None:
        self.epoch += 1
        number = self._open.pop()
        self._calls[number] = ModuleCall(self._calls[number].module, self._calls[number].begin, self.epoch)

    def settled(self, calls: Iterable[fx.Node]) -> Trail:
        """The trail in numbers of ops, given the calls of the captured graph, which forget their epochs."""
        last = [-1] * (self.epoch + 1)
        for node in calls:
            epoch = node.meta.pop("epoch", self.epoch)
            last[epoch] = max(last[epoch], *node.meta["origins"])
        for epoch in range(1, len(last)):
            last[epoch] = max(last[epoch], last[epoch - 1])
        return Trail(
            tuple(Mark(last[mark.after - 1], mark.phase, mark.module, mark.source) for mark in self._marks),
            tuple(ModuleCall(call.module, last[call.begin - 1], last[call.end - 1]) for call in self._calls),
        )


_listening: list[Session] = []


@contextmanager
def listening(session: Session) -> Generator[None]:
    """Let marks be noted by this session."""
    _listening.append(session)
    try:
        yield
    finally:
        _listening.pop()


def pipe_split() -> None:
    """Mark a border between two pipeline stages at this place of a forward.

    Outside a capture this does nothing; in one it leaves no op in the graph, so a marked model may be trained without a
    pipeline as well. Each call is a border: one in a loop marks one in every turn.
    """
    if _listening:
        _listening[-1].note_mark()
