"""Ranks agree before they communicate: facts and plans are compared through the store that started the job.

No collective is involved, so ranks that disagree, or one that failed, are an error message on every rank, not a hang.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import time
import weakref
from collections import Counter
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from wholestep import _ranks_torch, _torch
from wholestep.errors import RankError
from wholestep.runtime.job_store import JobStore

logger = logging.getLogger(__name__)

_POLL_S = 2.0
_SAY_SO_AFTER_S = 20.0
_COMPARE_EVERY = 1024


# Which call has not run to its end on this rank, by the group whose ranks run it.
_unfinished: weakref.WeakKeyDictionary[dist.ProcessGroup, str] = weakref.WeakKeyDictionary()

_rooms: weakref.WeakKeyDictionary[dist.ProcessGroup, tuple[str, Counter[str]]] = weakref.WeakKeyDictionary()


def room_of(group: dist.ProcessGroup, what: str) -> tuple[str, int]:
    """A part of the job's store for this life of a group, and which of its `what` this is: the first, second, ...

    A store may outlive what is written to it: torchrun may keep it for ranks that it starts again, and a process may
    make its group anew. So numbers are counted here, and what was written in an earlier life is never read.
    """
    if group not in _rooms:
        name = f"wholestep/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{group.group_name}"
        with _reaching_the_store(dist.get_rank(group)):
            life = store_of(group).add(f"{name}/lives/{dist.get_rank(group)}", 1)
        _rooms[group] = f"{name}/{life}", Counter()
    room, counts = _rooms[group]
    counts[what] += 1
    return room, counts[what]


@dataclass(frozen=True)
class Ranks:
    """The ranks of one process group, this one among them, and the store they talk through."""

    group: dist.ProcessGroup
    rank: int
    world: int
    number: int
    timeout_s: float
    room: str = "wholestep"

    @staticmethod
    def of(group: dist.ProcessGroup, timeout_s: float) -> Ranks:
        """For the next step that is to run on this group: the first, second, ... on every rank talk to each other.

        Nobody is waited for longer than collectives of the group would wait.
        """
        room, number = room_of(group, "steps")
        timeout_s = min(timeout_s, _ranks_torch.group_timeout_s(group))
        return Ranks(group, dist.get_rank(group), dist.get_world_size(group), number, timeout_s, room)

    @property
    def name(self) -> str:
        """How collectives in a graph name the group."""
        return self.group.group_name

    def note_unfinished(self, call: str) -> None:
        """A call that communicates has raised on this rank: of what ranks send, only the order tells what it is for."""
        if self.world > 1:
            _unfinished.setdefault(self.group, call)

    @property
    def has_finished(self) -> bool:
        """Whether this rank has finished all calls that it has begun, as far as they send anything."""
        return self.group not in _unfinished

    def require_finished(self) -> None:
        """Raise `RankError` if this rank has not finished a call: what it sends next would be taken for that one's."""
        if not self.has_finished:
            raise RankError(
                f"{_unfinished[self.group]} raised on rank {self.rank}, and what this rank sends now would be taken "
                "for what that call had yet to send; end all ranks and go on from a checkpoint, or make a new process "
                "group on all of them"
            )

    @contextlib.contextmanager
    def failing_together(self, moment: str) -> Generator[None]:
        """If the block raises on this rank, the others, who are at `exchange(moment)` or on their way, raise too.

        So do those that have gone on to a later moment of the same call (what a moment begins with, up to a slash).
        """
        try:
            yield
        except RankError:
            raise
        except Exception as error:
            self.publish_failure(moment, error)
            self.publish_failure(_failed(moment), error)
            raise

    def publish_failure(self, moment: str, error: BaseException | str) -> None:
        """What others who are at `exchange(moment)`, or come there, are told instead of a value."""
        self._publish(moment, {"error": str(error) or type(error).__name__})

    def exchange(self, moment: str, value: Any) -> list[Any]:
        """Every rank's `value` (anything JSON can hold), by rank. All ranks call this with the same `moment`.

        Raises `RankError` if a rank reports a failure instead, or does not answer in time.
        """
        return [*self.exchange_with(range(self.world), moment, value).values()]

    def exchange_with(self, ranks: Iterable[int], moment: str, value: Any) -> dict[int, Any]:
        """The same between some ranks, by rank; each calls this with the others."""
        self._publish(moment, {"value": value})
        answers = {rank: self._read(moment, rank) for rank in ranks}
        for rank, answer in answers.items():
            _require_value(rank, answer)
        return {rank: answer["value"] for rank, answer in answers.items()}

    def require_agreement(self, moment: str, facts: Mapping[str, Any]) -> None:
        """Raise `RankError` on every rank if ranks differ in one of these facts, named as they are in a message.

        Facts about a large model are long, and hardly ever differ: what is exchanged first is a mark of each.
        """
        marks = self.exchange(moment, {what: mark_of(value) for what, value in facts.items()})
        if all(each == marks[0] for each in marks):
            return
        by_rank = self.exchange(f"{moment}/facts", dict(facts))
        for what in facts:
            require_same(what, [each[what] for each in by_rank])

    def require_none_failed(self, moment: str) -> None:
        """Raise `RankError` if a rank is known to have failed in the call of this moment (see `failing_together`)."""
        for rank in range(self.world):
            key = self._key(_failed(moment), rank)
            with _reaching_the_store(self.rank):
                found = self._store.get(key) if self._store.check([key]) else None
            if found is not None:
                _require_value(rank, json.loads(found))

    def require_none_asks(self, moment: str) -> None:
        """Raise `RankError`, also on ranks that wait at `exchange(moment)`, if this rank has nothing to say there."""
        with _reaching_the_store(self.rank):
            asking = [rank for rank in range(self.world) if self._store.check([self._key(moment, rank)])]
        if asking and self.rank not in asking:
            text = (
                f"rank {asking[0]} has something new to agree on in this call, and rank {self.rank} has not: what "
                "ranks compute (gradients, clipping, options, modes) must change on all of them in the same call"
            )
            self._publish(_failed(moment), {"differs": text})
            raise RankError(text)

    @contextlib.contextmanager
    def telling(self, what: str) -> Generator[None]:
        """If a collective in the block fails, say what was waited for."""
        try:
            yield
        except RuntimeError as error:
            raise lost_peer(what, error) from error

    def _publish(self, moment: str, message: dict[str, Any]) -> None:
        with _reaching_the_store(self.rank):
            self._store.set(self._key(moment, self.rank), json.dumps(message))

    def _read(self, moment: str, rank: int) -> dict[str, Any]:
        started = time.monotonic()
        keys = [self._key(moment, rank), self._key(_failed(moment), rank)]
        found = first_of(self._store, keys, self.timeout_s, f"waiting for rank {rank} to compile its step", self.rank)
        if found is None:
            raise RankError(
                f"rank {rank} has not compiled this step {time.monotonic() - started:.0f} s after rank {self.rank} "
                "did: ranks must call the step equally often, and what they compute (gradients, clipping, options, "
                "modes) must change on all of them in the same call"
            )
        return json.loads(found)

    @property
    def _store(self) -> JobStore:
        return store_of(self.group, self.timeout_s)

    def _key(self, moment: str, rank: int) -> str:
        return f"{self.room}/{self.name}/{self.number}/{moment}/{rank}"


def store_of(group: dist.ProcessGroup, timeout_s: float | None = None) -> JobStore:
    """The store that ranks of a group talk through; one that does not answer is waited for like a collective."""
    timeout_s = _ranks_torch.group_timeout_s(group) if timeout_s is None else timeout_s
    return JobStore(_torch.group_store(group), timeout_s)


@contextlib.contextmanager
def _reaching_the_store(rank: int) -> Generator[None]:
    try:
        yield
    except dist.DistNetworkError as error:
        raise RankError(
            f"rank {rank} cannot reach the store that the job was started with: the rank that has it is gone, or hangs"
        ) from error


def first_of(store: JobStore, keys: list[str], timeout_s: float, waiting: str, rank: int) -> bytes | None:
    """The value of the first key that another rank writes, None if the time is up; `waiting` is told if it takes long.

    Raises `RankError` if the store is out of reach.
    """
    started, has_said_so = time.monotonic(), False
    while True:
        with _reaching_the_store(rank):
            found = _first_now(store, keys, min(_POLL_S, timeout_s))
            if found is not None:
                return found
            waited_s = time.monotonic() - started
            if waited_s > timeout_s:
                return None
            if waited_s > _SAY_SO_AFTER_S and not has_said_so:
                logger.warning("%s", waiting)
                has_said_so = True


def _first_now(store: JobStore, keys: list[str], wait_s: float) -> bytes | None:
    try:
        store.wait(keys[:1], timedelta(seconds=wait_s))
        return store.get(keys[0])
    except dist.DistNetworkError:
        raise
    except RuntimeError:  # what stores raise when the time is up
        written = next((key for key in keys[1:] if store.check([key])), None)
        return None if written is None else store.get(written)


def is_due(number: int) -> bool:
    """Whether ranks compare in this call what may change with each: in the second, fourth, eighth, every 1,024th.

    A word between ranks in each call would be too expensive, and none would leave ranks that drift apart unnoticed.
    """
    return number > 1 and (not number & (number - 1) or not number % _COMPARE_EVERY)


def _require_value(rank: int, answer: Mapping[str, Any]) -> None:
    """Raise `RankError` if it is a failure that a rank reports."""
    if "differs" in answer:
        raise RankError(answer["differs"])
    if "error" in answer:
        raise RankError(f"rank {rank} could not compile the step: {answer['error']}")


def _failed(moment: str) -> str:
    return f"{moment.partition('/')[0]}/failed"


def mark_of(value: Any) -> str:
    """A short text that is another for other values; the order of keys does not count."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def lost_peer(what: str, error: RuntimeError) -> RankError:
    """The error of a rank that waited for others, who are gone or did not come in time."""
    own = dist.get_rank() if dist.is_initialized() else 0
    return RankError(
        f"rank {own} has waited in vain for the other ranks, for {what}: one of them has failed, is gone, or has not "
        f"called the step ({plain(error)})"
    )


def plain(error: BaseException) -> str:
    """What torch says about a connection, without the place in its own sources, the stack and gloo's good wishes."""
    text = re.sub(r"^\[[^\]]*\] ", "", str(error)).split("\n", 1)[0]
    return re.sub(r"\.? This is typically caused by a remote worker .*", "", text)


def require_same(what: str, by_rank: list[Any]) -> None:
    """Raise `RankError` naming the first rank that differs from rank 0, and in what."""
    for rank, value in enumerate(by_rank):
        if value != by_rank[0]:
            raise RankError(f"{what} differ between ranks: {difference(by_rank[0], value, 0, rank)}")


def difference(first: Any, other: Any, first_rank: int, rank: int) -> str:
    """The first thing in which the values of two ranks differ, in words."""
    if isinstance(first, Mapping) and isinstance(other, Mapping):
        key = next(key for key in {**first, **other} if first.get(key) != other.get(key))
        extra = [name for name in other if name not in first] if key not in other else []
        instead = f", which has {extra[0]} instead" if extra else ""
        values = f"{_shown(first.get(key))} on rank {first_rank} and {_shown(other.get(key))} on rank {rank}"
        return f"{key} is {values}{instead}"
    return f"{_shown(first)} on rank {first_rank} and {_shown(other)} on rank {rank}"


def _shown(value: Any) -> str:
    return "missing" if value is None else repr(value)
