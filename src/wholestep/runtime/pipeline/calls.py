"""What each rank does in its first, second, ... call of a pipeline: told through the job's store, compared in need.

A call costs one message to the store that nobody waits for. Others are asked only by a rank that has to capture, and by
one that has waited for a while: ranks that step and evaluate at the same time, or with batches of another size, would
wait for each other until the time is up.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import deque
from collections.abc import Generator, Mapping
from typing import Any

import torch.distributed as dist

from wholestep.errors import RankError
from wholestep.runtime.agreement import Ranks, difference, store_of
from wholestep.runtime.job_store import JobStore

_NUM_KEPT = 4
_FIRST_PAUSE_S, _LAST_PAUSE_S = 1e-3, 0.1


class Calls:
    """The calls of this rank and of all others of the job. All ranks make theirs at the same time."""

    def __init__(self) -> None:
        group = dist.group.WORLD
        assert group is not None
        self.ranks = Ranks.of(group, float("inf"))
        self.number = 0
        self._told: deque[str] = deque(maxlen=_NUM_KEPT)

    @property
    def timeout_s(self) -> float:
        """How long a rank is waited for: as long as collectives of the job wait."""
        return self.ranks.timeout_s

    @contextlib.contextmanager
    def one(self) -> Generator[None]:
        """A call begins; if this rank fails before it has told what it does, it tells that."""
        self.number += 1
        try:
            with self.ranks.failing_together(self.moment("made")):
                yield
        except RankError:
            raise
        except Exception as error:
            self.tell({"the call": f"failed: {error}"})
            raise

    def moment(self, what: str) -> str:
        """The name of something that ranks do in this call."""
        return f"{self.number}/{what}"

    def tell(self, facts: Mapping[str, Any]) -> None:
        """Say what this rank does in the call."""
        self._told.append(json.dumps({"number": self.number, "facts": facts}))
        self._store.set(self._key(self.ranks.rank), f"[{','.join(self._told)}]")

    def require_same(self) -> None:
        """Wait until all ranks have told what they do in this call; raises `RankError` if that is not the same."""
        started, pause_s = time.monotonic(), _FIRST_PAUSE_S
        own = self._of(self.ranks.rank)[self.number]
        missing = [rank for rank in range(self.ranks.world) if rank != self.ranks.rank]
        while missing:
            told = self._of(missing[0])
            if max(told, default=0) >= self.number:
                self._refuse_other(own, missing.pop(0), told)
                continue
            if time.monotonic() - started > self.timeout_s:
                raise RankError(
                    f"rank {missing[0]} has not called the pipeline {self.timeout_s:.0f} s after rank "
                    f"{self.ranks.rank} did: all ranks call it equally often"
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)

    def difference(self) -> str | None:
        """What another rank does otherwise in the same call, as far as is known; raises `RuntimeError` without a store.

        Ranks that are not there yet, or far ahead, are passed over.
        """
        own = self._of(self.ranks.rank).get(self.number)
        if own is None:
            return None
        try:
            for rank in range(self.ranks.world):
                self._refuse_other(own, rank, self._of(rank))
        except RankError as error:
            return str(error)
        return None

    def _refuse_other(self, own: Any, rank: int, told: Mapping[int, Any]) -> None:
        other = told.get(self.number, own)
        if other == own:
            return
        low, high = sorted(((self.ranks.rank, own), (rank, other)), key=lambda pair: pair[0])
        different = difference(low[1], high[1], low[0], high[0])
        raise RankError(f"ranks call the pipeline in different ways: {different} in call {self.number}")

    def _of(self, rank: int) -> dict[int, Any]:
        """The last calls of a rank by number."""
        if not self._store.check([self._key(rank)]):
            return {}
        return {one["number"]: one["facts"] for one in json.loads(self._store.get(self._key(rank)))}

    @property
    def _store(self) -> JobStore:
        return store_of(self.ranks.group, self.timeout_s)

    def _key(self, rank: int) -> str:
        return f"{self.ranks.room}/pipeline/{self.ranks.number}/calls/{rank}"
