"""The store that the job was started with, which answers in time or raises."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")

# A store may be slow where many ask, or the machine is busy.
_LEAST_S = 5.0

# Stores that have not answered yet, by identity, and who waits in them.
_silent: dict[int, tuple[Any, threading.Thread]] = {}


class JobStore:
    """A store of torch's that raises `DistNetworkError` where torch would wait for ever.

    Torch has no time-out for most questions: if the process that has the store is stopped, or its machine is out of
    reach, whoever asks never returns. So they are asked in a thread of their own. Until that has come back it keeps the
    store to itself, and nobody else asks.
    """

    def __init__(self, store: Any, timeout_s: float) -> None:
        self._store = store
        self._timeout_s = timeout_s

    def set(self, key: str, value: str) -> None:
        self._answer(lambda: self._store.set(key, value))

    def get(self, key: str) -> bytes:
        return self._answer(lambda: self._store.get(key))

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        return self._answer(lambda: self._store.compare_set(key, expected, value))

    def add(self, key: str, number: int) -> int:
        return self._answer(lambda: self._store.add(key, number))

    def check(self, keys: list[str]) -> bool:
        return self._answer(lambda: self._store.check(keys))

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        self._answer(lambda: self._store.wait(keys, timeout), timeout.total_seconds())

    def _answer(self, ask: Callable[[], T], further_s: float = 0.0) -> T:
        store, asking = _silent.get(id(self._store), (None, None))
        if store is self._store and asking is not None and asking.is_alive():
            raise _silence()
        answers: list[T] = []
        errors: list[BaseException] = []

        def work() -> None:
            try:
                answers.append(ask())
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=work, name="wholestep-store", daemon=True)
        thread.start()
        thread.join(max(self._timeout_s, _LEAST_S) + further_s)
        if errors:
            raise errors[0]
        if not answers:
            _silent[id(self._store)] = self._store, thread
            raise _silence()
        return answers[0]


def _silence() -> dist.DistNetworkError:
    return dist.DistNetworkError("the store that the job was started with does not answer")
