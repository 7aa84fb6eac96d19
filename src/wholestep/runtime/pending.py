"""Work that a step has left for its next call, and the promise that nobody sees the world without it.

    nothing waits   --leave-->   left   --begin-->   begun   --settle, or the end of the call-->   nothing waits

*Left* is what a call has computed for the next one; *begun*, that a graph is applying it, or was when it was left by
an interrupt, an error or a dead peer. From `leave` on, the tensors that will change are held (`held`): whoever reads
one, in Python or in C++, from any thread or from a signal handler, has the work brought to its end first (`settle`),
by a journal that knows how far it has come. They stay held from call to call; the graphs work on the memory behind
them. If the work cannot be brought to its end, they stay held, and each reader is told which update is missing.

Each change of state is one assignment. Before it, everything that the new state promises has been done; what remains
to be done afterwards is done again by whoever comes next, as all of it can be done twice.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from wholestep import _waiting_torch
from wholestep.capture import source
from wholestep.errors import RankError, WholestepError
from wholestep.runtime.agreement import plain
from wholestep.runtime.executable import Executable
from wholestep.runtime.held import Grip, Held, Owners, is_guarded, when_looked_at
from wholestep.runtime.journal import Journal

logger = logging.getLogger(__name__)

_TOO_OFTEN = 8
# For how many calls nothing waits if somebody looked too often.
_LEFT_OUT = 32
# How long a fork waits for another thread that runs a step; in the child that step will never end.
_FORK_WAITS_S = 60.0

# Those that hold tensors.
_waiting: list[Pending] = []
# All there are.
_known: weakref.WeakSet[Pending] = weakref.WeakSet()


@dataclass(frozen=True)
class _Left:
    """Values for the graph that applies them, by slot id, and the number of the call that computed them."""

    number: int
    carries: dict[str, Any]


@dataclass(frozen=True)
class _Begun:
    """A graph that applies what was left, and how far it has come."""

    number: int
    executable: Executable
    journal: Journal


@dataclass(frozen=True)
class _Lost:
    """What nobody can apply any more, and why."""

    message: str


@dataclass(frozen=True)
class Targets:
    """What waiting updates of a step change or look at: reads the tensors by slot id.

    `gradients` are the slots of parameters whose gradient comes with the update (False), or is there already and still
    needed by it (True); `versioned` those whose version an update in eager counts up, `modules` those that own
    parameters.
    """

    read: Callable[[], dict[str, torch.Tensor]]
    gradients: Mapping[str, bool]
    versioned: frozenset[str]
    modules: Sequence[nn.Module]


class Pending:
    """What one graph has left for its next call. `flush` is the graph that applies it at any other time.

    Whoever runs the step or applies what waits does so in their `turn`; `runner` is the thread that runs the step.
    """

    def __init__(self, name: str, targets: Targets, flush: Executable | None) -> None:
        self.name = name
        self.turn = threading.RLock()
        self._targets = targets
        self._flush = flush
        self._work: _Left | _Begun | _Lost | None = None
        # What is held, in whole or in part: there before the first tensor is, gone only after the last.
        self._grip: Grip | None = None
        # What was held last: it has the stand-ins.
        self._last_grip: Grip | None = None
        self._holder = object()
        self._readers: list[int] = []
        self.runner: int | None = None
        self._is_locked_for_fork = False
        self._owners = Owners()
        self._num_refusals = 0
        self._num_left_out = 0
        self._num_interruptions = 0
        _known.add(self)

    @property
    def is_waiting(self) -> bool:
        """Whether something is yet to be applied."""
        return self._work is not None

    @property
    def can_begin(self) -> bool:
        """Whether there is work that nobody has begun: the next graph may take it along."""
        return isinstance(self._work, _Left)

    @property
    def is_wanted(self) -> bool:
        """Whether another thread waits for the end of the call that runs, to read what it leaves."""
        me = threading.get_ident()
        return any(reader != me for reader in self._readers)

    @property
    def carries(self) -> dict[str, Any]:
        """Values that are kept for the next call; the dict is emptied when it takes them."""
        work = self._work
        return work.carries if isinstance(work, _Left) else {}

    def begin(self, executable: Executable) -> Journal | None:
        """A graph is about to apply what was left: from now on the journal knows. None if nothing was."""
        work = self._work
        if not isinstance(work, _Left):
            return None
        carries = dict(work.carries)
        # A signal handler may look at any time, and begin itself; not between these two lines, nor those below.
        if self._work is not work:
            return None
        known = {} if self._last_grip is None else self._last_grip.by_slot
        reals = {slot_id: held.tensor if held.real is None else held.real for slot_id, held in known.items()}
        begun = _Begun(work.number, executable, executable.begin(carries | reals))
        del carries
        if self._work is work:
            self._work = begun
            work.carries.clear()
            if self._grip is not None:
                self._grip.drop_gradients()
            return begun.journal
        return None

    def leave(self, carries: dict[str, Any], number: int) -> None:
        """A call has applied all work before it, and leaves this."""
        left = _Left(number, carries)
        while self._work is not left:
            grip = self._grip
            if grip is None or not grip.is_complete:
                self._hold()
            else:
                grip.hold_gradients()
            grip = self._grip
            # A signal handler may have looked meanwhile, and let go of everything; not between these two.
            if grip is not None and grip.is_complete and self._grip is grip:
                self._work = left

    def settle(self, *, is_blocking: bool = True) -> None:
        """Apply what waits and give all tensors back; raises `WholestepError` if that cannot be done.

        If another thread runs the step just now, wait until it is through, or with `is_blocking=False` do nothing.
        """
        if self._grip is None and self._work is None and self not in _waiting:
            return
        me = threading.get_ident()
        if not is_blocking and self.runner not in (None, me):
            return
        self._readers.append(me)
        switches = _waiting_torch.Switches()
        try:
            if self._would_wait_for_ever(me):
                raise WholestepError(
                    f"{self.name} and another compiled step run in two threads, and each waits for an update that the "
                    "other has yet to finish; let threads whose steps read each other's models take turns, or pass "
                    "cross_iteration='none'"
                )
            with self.turn:
                with _waiting_torch.ordinary_keys(), _waiting_torch.outside_modes():
                    self._bring_to_an_end()
                work, self._work = self._work, None
                self._give_back()
                if isinstance(work, _Begun) and self.runner is None and self._readers.count(me) == 1:
                    work.journal.clear()  # frames of a traceback may hold it, and our views of what is no longer held
        finally:
            self._readers.remove(me)
            switches.put_back()

    def settle_if_replaced(self) -> None:
        """Other tensors may stand where the held ones did: what waits belongs to those, and a new loop to the others.

        To replace a tensor is not to look at it, so nobody has been told.
        """
        grip = self._last_grip
        if self.is_waiting and grip is not None and not grip.has(self._targets.read()):
            self.settle()

    def _would_wait_for_ever(self, me: int) -> bool:
        """Whether the thread that runs this step waits, in the end, for one that this thread runs.

        Threads say what they are about to wait for before they ask: of those in a circle the last one sees it.
        """
        thread, passed = self.runner, set[int]()
        while thread is not None and thread != me and thread not in passed:
            passed.add(thread)
            awaited = [other for other in list(_known) if thread in other._readers and other.runner != thread]
            thread = awaited[0].runner if awaited else None
        return thread == me and bool(passed)

    def _bring_to_an_end(self) -> None:
        if self._flush is not None:
            self.begin(self._flush)
        work = self._work
        if isinstance(work, _Lost):
            raise WholestepError(work.message)
        if isinstance(work, _Begun):
            if work.journal.has_failed_wait:
                raise RankError(self.why_failed())
            try:
                work.executable.finish(work.journal)
            except Exception as error:
                kind = RankError if work.journal.has_failed_wait else WholestepError
                raise kind(self._missing(work, plain(error))) from error

    def _missing(self, work: _Begun | _Left, reason: str) -> str:
        return (
            f"the update of call {work.number} of {self.name} is missing, it could not be applied: {reason}; what it "
            "would have changed (parameters, gradients, optimizer state) cannot be read. Go on from a checkpoint, "
            "with a new model"
        )

    def why_failed(self) -> str:
        """The sentence that tells which update can never be applied; "" if none is known to be so."""
        work = self._work
        if isinstance(work, _Begun) and work.journal.has_failed_wait:
            return self._missing(work, "the gradients of another rank never came")
        return ""

    def settle_after(self, error: Exception) -> None:
        """The call that runs has failed: apply what it has not, as eager would have before it."""
        reason = self.why_failed()
        if reason:
            raise RankError(reason) from error
        self.settle()

    def _hold(self) -> None:
        tensors = self._targets.read()
        last = self._last_grip
        if self._grip is None and any(is_guarded(tensor) for tensor in tensors.values()):
            _free(tensors.values(), but=self)
        if last is not None and last.has(tensors):
            known = last.by_slot
        else:
            known = {slot_id: Held.of(tensor) for slot_id, tensor in tensors.items()}
        grip = Grip(self._holder, known, self._targets.gradients, self._targets.modules)
        hold = grip.holding()
        _waiting_torch.increment_versions([tensors[slot_id] for slot_id in self._targets.versioned & tensors.keys()])
        self._last_grip = grip
        if self not in _waiting:
            _waiting.append(self)
        _waiting_torch.when_compiling(_before_compiling)
        self._grip = grip
        hold()

    def _give_back(self) -> None:
        grip = self._grip
        if grip is not None:
            grip.give_back()
        # A signal handler may have run a step meanwhile that holds them again.
        if self._grip is grip:
            self._grip = None
        if self._grip is None and self in _waiting:
            _waiting.remove(self)

    def let_go(self, tensor: torch.Tensor) -> None:
        """Give a tensor back that is held although nothing here holds any."""
        with self.turn:
            if self._grip is None and self._last_grip is not None:
                self._last_grip.give_back_one(tensor)

    def why_not_held(self) -> str:
        """Why updates cannot wait: somebody could look at what they change unseen; "" if nobody can."""
        if self._num_interruptions >= _TOO_OFTEN and self._num_left_out < _LEFT_OUT:
            self._num_left_out += 1
            return "somebody looks at them after each step"
        self._num_left_out = 0
        reason = self._owners.why_not_held({id(tensor): tensor for tensor in self._targets.read().values()}.values())
        self._num_refusals = self._num_refusals + 1 if reason else 0
        if self._num_refusals == _TOO_OFTEN:
            logger.warning(
                "the last %d updates of %s could not wait for the next call, so that nothing was hidden: %s",
                _TOO_OFTEN,
                self.name,
                reason,
            )
        return reason

    def continued(self) -> None:
        """The next call came before anybody looked."""
        self._num_interruptions = 0

    def note_interruption(self, func: object) -> None:
        """Somebody looked; if that happens after every step, nothing is ever hidden, which they should know."""
        self._num_interruptions += 1
        if self._num_interruptions == _TOO_OFTEN:
            logger.warning(
                "after each of the last %d steps, %s looked at what %s still had to update (%s), so that nothing could "
                "be hidden; look less often, or pass cross_iteration='none'",
                _TOO_OFTEN,
                source.current_location() or "something",
                self.name,
                getattr(func, "__name__", type(func).__name__),
            )

    def enter_fork(self) -> None:
        """This process is about to be forked: the child must find everything applied, and no lock held."""
        if not self.turn.acquire(timeout=_FORK_WAITS_S):
            return
        self._is_locked_for_fork = True
        try:
            self.settle()
        except WholestepError as error:
            logger.warning("a process is forked that will not be able to read the model: %s", error)

    def leave_fork(self) -> None:
        """The process was forked, and this is the parent."""
        if self._is_locked_for_fork:
            self._is_locked_for_fork = False
            self.turn.release()

    def start_in_child(self) -> None:
        """The process was forked, and this is the child: it has no other threads and no connection to other ranks."""
        self.turn = threading.RLock()
        self._readers = []
        self.runner = None
        self._is_locked_for_fork = False
        if isinstance(self._work, (_Left, _Begun)):
            self._work = _Lost(
                f"the update of call {self._work.number} of {self.name} was still waiting when this process was "
                "forked, and can only be applied in the process it was forked from; fork after step.flush()"
            )


def flush_all() -> None:
    """Apply everything that waits in this process and can be applied.

    What cannot be is no concern of those who do not read it; those who do are told then.
    """
    for pending in list(_waiting):
        with contextlib.suppress(WholestepError):
            pending.settle()


def flush_others(but: Pending | None) -> None:
    """The same except one, and except what other threads are busy with."""
    for pending in list(_waiting):
        if pending is not but:
            with contextlib.suppress(WholestepError):
                pending.settle(is_blocking=False)


def _before_compiling(_: object) -> None:
    """Torch holds a lock meanwhile: what another thread is busy with is not waited for."""
    flush_others(None)


def _apply_for(func: object) -> list[WholestepError]:
    """Somebody looks: apply all that can be applied."""
    errors: list[WholestepError] = []
    for pending in list(_waiting):
        pending.note_interruption(func)
        try:
            pending.settle()
        except WholestepError as error:
            errors.append(error)
    return errors


def _let_go(tensor: torch.Tensor) -> None:
    """All was applied, and a tensor is still held: give it back if nobody holds it who has left work since."""
    for pending in list(_known):
        pending.let_go(tensor)


def _free(tensors: Iterable[torch.Tensor], but: Pending) -> None:
    """Make others give tensors back."""
    for pending in list(_waiting):
        if pending is not but:
            pending.settle()
    for tensor in tensors:
        if is_guarded(tensor):
            _let_go(tensor)


def _flush_at_exit() -> None:
    for pending in list(_waiting):
        try:
            pending.settle()
        except WholestepError as error:
            logger.error("%s", error)


def _enter_fork() -> None:
    for pending in sorted(_known, key=id):
        pending.enter_fork()


def _leave_fork() -> None:
    for pending in list(_known):
        pending.leave_fork()


def _start_in_child() -> None:
    for pending in list(_known):
        pending.start_in_child()


when_looked_at(_apply_for, _let_go)
atexit.register(_flush_at_exit)
os.register_at_fork(before=_enter_fork, after_in_parent=_leave_fork, after_in_child=_start_in_child)
