"""Captures and the threads of a process: one captures at a time, and the others are left with torch as it is."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any


class _Turn:
    """Whose turn it is to capture. A process that is forked while another thread captures has no such thread."""

    def __init__(self) -> None:
        self.renew()
        os.register_at_fork(after_in_child=self.renew)

    def renew(self) -> None:
        self.lock = threading.RLock()


_turn = _Turn()


def one_at_a_time() -> AbstractContextManager[Any]:
    """Held by the thread that captures: what that does to torch, models and code can be seen in all others."""
    return _turn.lock


def let_others_capture() -> None:
    """Wait for a thread that captures; guards would take what it has put in torch's place for changes of the user's."""
    with _turn.lock:
        pass


def is_only_thread() -> bool:
    """Whether no other thread runs Python now: `threading` does not know those that C started, or `_thread`."""
    return len(sys._current_frames()) == 1  # pyright: ignore[reportPrivateUsage]


def only_where(
    is_here: Callable[[], bool], stand_in: Callable[..., Any], original: Callable[..., Any]
) -> Callable[..., Any]:
    """A function for the place of torch's own, which all threads find: only calls made here are the stand-in's."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return (stand_in if is_here() else original)(*args, **kwargs)

    return call


def others_may_be_why() -> str:
    """What else may be the reason of an error: a model holds traced twins meanwhile, and other threads see them."""
    if threading.active_count() == 1:
        return ""
    return ". Other threads run; none of them may look at the model or the optimizer while a step is captured"
