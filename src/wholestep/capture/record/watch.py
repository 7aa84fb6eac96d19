"""Dicts and objects that guards ask of at each call: asked of all at once for as long as nobody writes to them.

    call       1     2     3     4     5     6     7     8
    written    .     .     .     .     .     d     .     .
    asked in   Python ..... both   C++   C++   Python ..... both

A dict has a version that changes with each write to it. A guard that has looked at a dict need not look again before
its version changes, and torch compares the versions of many dicts in one row. To build such a question takes as long
as many calls, so it is built after `QUIET_CALLS` of them in which nothing was written. Dicts that are written to again
and again (a counter of the step) are left out, and have their versions compared one by one in Python.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any, Protocol

from wholestep import _recording_torch

_SOON = 100
"""A dict that is written to twice within so many calls is left out: a question must be asked as often to pay off."""


class Watched(Protocol):
    """Somebody who asks of dicts and objects at each call."""

    def dicts(self) -> Iterable[dict[Any, Any]]:
        """The dicts to ask of."""
        ...

    def objects(self) -> Iterable[Any]:
        """The objects that must keep their classes, their dicts of attributes, and what `unwritten` asks of besides."""
        ...

    def leave_to_watch(self, dicts: Collection[int]) -> None:
        """As long as the watch is quiet, these dicts, by `id`, and all objects need no look."""
        ...


class Watch:
    """All dicts and objects that the guards of one graph ask of.

    Before the guards are asked comes `begin`, after all of them have let a call pass `passed`.
    """

    def __init__(self) -> None:
        self.is_quiet = False
        """Whether nobody has written to what is watched since the guards last looked at it."""
        self._all: list[Watched] = []
        self._last_write: dict[int, int] = {}
        self._restless: set[int] = set()
        self._num_calls = 0
        self._num_passed = 0
        self._fresh: Callable[[], bool] | None = None
        self._unwritten: Callable[[], bool] | None = None
        self._can_ask = True

    def add(self, watched: Watched) -> None:
        self._all.append(watched)

    def begin(self) -> None:
        """Find out whether this call `is_quiet`."""
        self._num_calls += 1
        if self._unwritten is not None:
            if self._unwritten():
                self.is_quiet = True
                return
            self.look_again()
        # The guards look at everything after the question was built, so that no write gets lost in between.
        if self._fresh is None and self._can_ask and self._num_passed >= _recording_torch.QUIET_CALLS:
            self._fresh = self._build()

    def passed(self) -> None:
        """The guards have let this call pass."""
        self._num_passed += 1
        if self._fresh is not None:
            self._unwritten, self._fresh = self._fresh, None

    def wrote(self, one: dict[Any, Any]) -> None:
        """Somebody has written to a dict, and what stands there now is fine."""
        if id(one) in self._restless:
            return
        last, now = self._last_write.get(id(one)), self._num_calls
        self._last_write[id(one)] = now
        if last is not None and 0 < now - last <= _SOON:
            self._restless.add(id(one))
        self.look_again()

    def look_again(self) -> None:
        """What is asked of has changed: the guards have to look for themselves for a while."""
        self.is_quiet = False
        self._unwritten = self._fresh = None
        self._num_passed = 0

    def _build(self) -> Callable[[], bool] | None:
        dicts = {id(one): one for watched in self._all for one in watched.dicts()}
        self._last_write = {key: call for key, call in self._last_write.items() if key in dicts}
        calm = {key: one for key, one in dicts.items() if key not in self._restless}
        objects = {id(one): one for watched in self._all for one in watched.objects()}
        question = _recording_torch.unwritten([*calm.values()], objects.values())
        self._can_ask = question is not None
        for watched in self._all if self._can_ask else ():
            watched.leave_to_watch(calm.keys())
        return question


class Contents:
    """Which of some dicts somebody has written to since they were last looked at."""

    def __init__(self, dicts: Iterable[dict[Any, Any]], watch: Watch) -> None:
        self._dicts = [*dicts]
        self._watch = watch
        self._restless: list[int] = []
        self._versions = self._versions_now()
        watch.add(self)

    def __getitem__(self, index: int) -> dict[Any, Any]:
        return self._dicts[index]

    def dicts(self) -> list[dict[Any, Any]]:
        return self._dicts

    def objects(self) -> Iterable[Any]:
        return ()

    def leave_to_watch(self, dicts: Collection[int]) -> None:
        self._restless = [index for index, one in enumerate(self._dicts) if id(one) not in dicts]

    def written(self) -> list[int]:
        """Positions of the dicts that were written to."""
        if self._watch.is_quiet:
            return [i for i in self._restless if _recording_torch.dict_version(self._dicts[i]) != self._versions[i]]
        now = self._versions_now()
        if now == self._versions:
            return []
        return [index for index, (old, new) in enumerate(zip(self._versions, now, strict=True)) if old != new]

    def look(self, dicts: Iterable[dict[Any, Any]] | None = None) -> None:
        """What stands in the dicts is fine; with `dicts`, it is those from now on."""
        before = self._dicts
        if dicts is not None:
            self._dicts = [*dicts]
        if [*map(id, before)] == [*map(id, self._dicts)]:
            for index in self.written():
                self._watch.wrote(self._dicts[index])
        else:
            self._watch.look_again()
        self._versions = self._versions_now()

    def _versions_now(self) -> list[int]:
        return [*map(_recording_torch.dict_version, self._dicts)]
