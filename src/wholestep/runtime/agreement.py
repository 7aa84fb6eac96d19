"""Ranks agree before they communicate: facts and plans are compared through the store that started the job.

No collective is involved, so ranks that disagree, or one that failed, are an error message on every rank, not a hang.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from wholestep import _torch
from wholestep.errors import RankError

logger = logging.getLogger(__name__)

_POLL_S = 2.0
_SAY_SO_AFTER_S = 20.0


@dataclass(frozen=True)
class Ranks:
    """The ranks of one process group, this one among them, and the store they talk through."""

    group: dist.ProcessGroup
    rank: int
    world: int
    number: int
    timeout_s: float

    @staticmethod
    def of(group: dist.ProcessGroup, timeout_s: float) -> Ranks:
        """For the next step that is to run on this group: the first, second, ... on every rank talk to each other."""
        rank = dist.get_rank(group)
        number = _torch.group_store(group).add(f"wholestep/{group.group_name}/steps/{rank}", 1)
        return Ranks(group, rank, dist.get_world_size(group), number, timeout_s)

    @property
    def name(self) -> str:
        """How collectives in a graph name the group."""
        return self.group.group_name

    @contextlib.contextmanager
    def failing_together(self, moment: str) -> Generator[None]:
        """If the block raises on this rank, the others, who are at `exchange(moment)` or on their way, raise too."""
        try:
            yield
        except RankError:
            raise
        except Exception as error:
            self._publish(moment, {"error": str(error) or type(error).__name__})
            raise

    def exchange(self, moment: str, value: Any) -> list[Any]:
        """Every rank's `value` (anything JSON can hold), by rank. All ranks call this with the same `moment`.

        Raises `RankError` if a rank reports a failure instead, or does not answer in time.
        """
        self._publish(moment, {"value": value})
        answers = [self._read(moment, rank) for rank in range(self.world)]
        for rank, answer in enumerate(answers):
            if "error" in answer:
                raise RankError(f"rank {rank} could not compile the step: {answer['error']}")
        return [answer["value"] for answer in answers]

    def _publish(self, moment: str, message: dict[str, Any]) -> None:
        _torch.group_store(self.group).set(self._key(moment, self.rank), json.dumps(message))

    def _read(self, moment: str, rank: int) -> dict[str, Any]:
        store, key, started = _torch.group_store(self.group), self._key(moment, rank), time.monotonic()
        has_said_so = False
        while True:
            try:
                store.wait([key], timedelta(seconds=min(_POLL_S, self.timeout_s)))
                return json.loads(store.get(key))
            except RuntimeError as error:  # what stores raise when the time is up
                waited_s = time.monotonic() - started
                if waited_s > self.timeout_s:
                    raise RankError(
                        f"rank {rank} has not compiled this step {waited_s:.0f} s after rank {self.rank} did: ranks "
                        "must call the step equally often, and its gradients must change on all ranks in the same call"
                    ) from error
                if waited_s > _SAY_SO_AFTER_S and not has_said_so:
                    logger.warning("waiting for rank %d to compile its step", rank)
                    has_said_so = True

    def _key(self, moment: str, rank: int) -> str:
        return f"wholestep/{self.name}/{self.number}/{moment}/{rank}"


def require_same(what: str, by_rank: list[Any]) -> None:
    """Raise `RankError` naming the first rank that differs from rank 0, and in what."""
    for rank, value in enumerate(by_rank):
        if value != by_rank[0]:
            raise RankError(f"{what} differ between ranks: {_difference(by_rank[0], value, rank)}")


def _difference(first: Any, other: Any, rank: int) -> str:
    if isinstance(first, Mapping) and isinstance(other, Mapping):
        key = next(key for key in {**first, **other} if first.get(key) != other.get(key))
        extra = [name for name in other if name not in first] if key not in other else []
        instead = f", which has {extra[0]} instead" if extra else ""
        return f"{key} is {_shown(first.get(key))} on rank 0 and {_shown(other.get(key))} on rank {rank}{instead}"
    return f"{_shown(first)} on rank 0 and {_shown(other)} on rank {rank}"


def _shown(value: Any) -> str:
    return "missing" if value is None else repr(value)
