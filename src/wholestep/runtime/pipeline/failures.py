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

from wholestep.pipe.schedule import Action

_POLL_S = 0.25
_STAY_S = 1.0
_LOOK_S = 0.01
_MAX_CHARACTERS = 4000


class Alarm:
    """The first sentence that a rank writes about a failure; later ones do not count.

    `room` names the ranks that are counted when they have heard it.
    """

    def __init__(self, store: Store, room: str) -> None:
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

    It is no daemon, which could die in the middle of a call into torch; it ends with the main thread.
    """

    def __init__(self, alarm: Alarm, on_alarm: Callable[[], None]) -> None:
        self.is_on = False
        self._alarm = alarm
        self._on_alarm = on_alarm
        self._stopped = threading.Event()
        threading.Thread(target=self._run, name="wholestep-pipeline-watch").start()

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(_POLL_S) and threading.main_thread().is_alive():
            if self.is_on and self._is_ringing():
                self._on_alarm()
                return

    def _is_ringing(self) -> bool:
        try:
            return self._alarm.heard() is not None
        except RuntimeError:  # the process that has the store is gone
            return True


def sentence(rank: int, action: Action | None, error: BaseException) -> str:
    """What a rank says about its own failure, in an action or outside all of them."""
    where = "" if action is None else f" in {action} (stage {action.stage}, micro-batch {action.micro_batch})"
    what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return f"rank {rank} failed{where}: {what}"
