"""How ranks learn that one of them failed: a sentence in the job's store, and connections that are closed.

A rank that fails writes what happened, then closes its connections. Whoever waits for it is woken by that, finds the
sentence, and closes its own, and so on. Ranks that wait for somebody who is still computing are woken by a thread that
looks into the store now and then. A rank that was killed writes nothing: whoever loses its connection to it does.

The store may live in the rank that failed and end with it, so a rank that has written stays until the others have read.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable

from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from wholestep.errors import PipelineError, RankError, WholestepError
from wholestep.pipe.schedule import Action
from wholestep.runtime.job_store import JobStore

_POLL_S = 0.25
_COMPARE_S = 1.0
_STAY_S = 1.0
_LOOK_S = 0.01
_MAX_CHARACTERS = 4000
_BETWEEN_RANKS = "RankError: "


class Alarm:
    """The first sentence that a rank writes about a failure; later ones do not count.

    `room` names the ranks that are counted when they have heard it.
    """

    def __init__(self, store: Store | JobStore, room: str) -> None:
        self._store = store
        self._count = f"heard/{room}"
        self._heard: str | None = None

    def ring(self, text: str, num_others: int) -> Callable[[], None] | None:
        """Write a sentence; if it counts, returns a function that waits until `num_others` ranks have heard it."""
        text = text[:_MAX_CHARACTERS]
        try:
            self._heard = self._store.compare_set("failure", "", text).decode()
        except RuntimeError:
            self._heard = text
            return None
        return functools.partial(self._stay, num_others) if self._heard == text else None

    def heard(self) -> str | None:
        """What failed, if anything did. Raises `RuntimeError` if the store cannot be reached."""
        if self._heard is None and self._store.check(["failure"]):
            text = self._store.get("failure").decode()
            self._store.add(self._count, 1)
            self._heard = text
        return self._heard

    def _stay(self, num_others: int) -> None:
        deadline = time.monotonic() + _STAY_S
        with contextlib.suppress(RuntimeError):
            while self._store.add(self._count, 0) < num_others and time.monotonic() < deadline:
                time.sleep(_LOOK_S)


class Watch:
    """A thread that calls `on_alarm` once when the alarm rings while the watch is on.

    If it has been on for a while, it asks now and then in what ranks differ, and rings itself if they do. It is no
    daemon, which could die in the middle of a call into torch; it ends with the main thread.
    """

    def __init__(
        self, alarm: Alarm, on_alarm: Callable[[], None], difference: Callable[[], str | None] | None = None
    ) -> None:
        self._alarm = alarm
        self._on_alarm = on_alarm
        self._difference = difference
        self._next_comparison: float | None = None
        self._stopped = threading.Event()
        threading.Thread(target=self._run, name="wholestep-pipeline-watch").start()

    @property
    def is_on(self) -> bool:
        return self._next_comparison is not None

    @is_on.setter
    def is_on(self, value: bool) -> None:
        self._next_comparison = time.monotonic() + _COMPARE_S if value else None

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(_POLL_S) and threading.main_thread().is_alive():
            if self.is_on and self._is_ringing():
                self._on_alarm()
                return

    def _is_ringing(self) -> bool:
        try:
            return self._alarm.heard() is not None or self._rings_for_difference()
        except RuntimeError:  # the process that has the store is gone
            return True

    def _rings_for_difference(self) -> bool:
        due_at = self._next_comparison
        if self._difference is None or due_at is None or time.monotonic() < due_at:
            return False
        self._next_comparison = due_at + _COMPARE_S
        text = self._difference()
        if text is not None:
            self._alarm.ring(between_ranks(text), 0)
        return text is not None


def between_ranks(text: str) -> str:
    """A sentence about ranks that differ, or of which one is gone or late, as it is written to the store."""
    return f"{_BETWEEN_RANKS}{text}"


def error_of(text: str) -> WholestepError:
    """A sentence from the store as the error that it tells of."""
    is_between = text.startswith(_BETWEEN_RANKS)
    return RankError(text.removeprefix(_BETWEEN_RANKS)) if is_between else PipelineError(text)


def sentence(rank: int, action: Action | None, error: BaseException) -> str:
    """What a rank says about its own failure, in an action or outside all of them."""
    where = "" if action is None else f" in {action} (stage {action.stage}, micro-batch {action.micro_batch})"
    what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return f"rank {rank} failed{where}: {what}"
