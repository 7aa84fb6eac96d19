"""Ranks that write and read a checkpoint together: what one cannot do, none does.

They meet at the job's store first, where a rank that does not come can be named. Then they talk over a gloo group of
their own, so that a writer in the background never gets between the collectives of training. One thread at a time may
use it: the caller's while no writer is at work, the writer's otherwise.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Generator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch.distributed as dist

from wholestep import _ranks_torch
from wholestep.errors import CheckpointError, RankError
from wholestep.runtime.agreement import first_of, room_of, store_of

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """All ranks of the job, this one among them; a process without a process group is the only one of its job."""

    rank: int
    world: int
    group: dist.ProcessGroup | None

    @staticmethod
    def of_job() -> Ranks:
        """Made by all ranks at the same time, after they have met."""
        if not _is_job():
            return Ranks(0, 1, None)
        warn_of_the_dead()
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=_timeout_s()))
        return Ranks(dist.get_rank(), dist.get_world_size(), cast("dist.ProcessGroup", group))

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def together(self, compute: Callable[[], T]) -> T:
        """What `compute` returns here; if it raises on any rank, every rank raises."""
        value, own, failure = cast("T", None), None, None
        try:
            value = compute()
        except Exception as error:
            own, failure = error, str(error) or type(error).__name__
        failures = [(rank, text) for rank, text in enumerate(self.all(failure)) if text is not None]
        if not failures:
            return value
        rank, text = failures[0]
        if rank == self.rank and isinstance(own, CheckpointError):
            raise own
        raise CheckpointError(text if self.world == 1 else f"rank {rank}: {text}") from own

    def on_first(self, compute: Callable[[], T]) -> T:
        """What `compute` returns on rank 0, or raises there, for every rank."""
        values = [self.together(lambda: compute() if self.is_first else None)]
        if self.group is not None:
            with _telling():
                dist.broadcast_object_list(values, src=0, group=self.group)
        return cast("T", values[0])

    def to_first(self, compute: Callable[[], T]) -> list[T]:
        """What `compute` returns on each rank, for rank 0; nothing on the others."""
        value = self.together(compute)
        if self.group is None:
            return [value]
        values = [value] * self.world if self.is_first else None
        with _telling():
            dist.gather_object(value, values, dst=0, group=self.group)
        return values or []

    def from_first(self, compute: Callable[[], list[T]]) -> T:
        """This rank's part of what `compute` returns on rank 0."""
        values = self.together(lambda: compute() if self.is_first else None)
        if self.group is None:
            return cast("list[T]", values)[0]
        own: list[Any] = [None]
        with _telling():
            dist.scatter_object_list(own, values, src=0, group=self.group)
        return own[0]

    def all(self, value: T) -> list[T]:
        """Everybody's value, by rank; for small ones."""
        values = [value] * self.world
        if self.group is not None:
            with _telling():
                dist.all_gather_object(values, value, group=self.group)
        return values


def meet(what: str) -> None:
    """Wait until all ranks are at the same `what`, as long as collectives would; `CheckpointError` if one is not."""
    if not _is_job():
        return
    job = dist.group.WORLD
    assert job is not None
    own = dist.get_rank()
    with _telling():
        room, number = room_of(job, "checkpoints")
        store, place = store_of(job), f"{room}/checkpoints/{number}"
        store.set(f"{place}/{own}", what)
    for rank in range(dist.get_world_size()):
        waiting = f"{what} waits for rank {rank}: all ranks have to call it, not only rank 0"
        try:
            found = first_of(store, [f"{place}/{rank}"], _timeout_s(), waiting, own)
        except RankError as error:
            raise CheckpointError(f"{what} failed: {error}") from error
        if found is None:
            raise CheckpointError(
                f"rank {rank} does not take part in {what}: all ranks have to call it at the same point, not only "
                f"rank {own}; each writes its share"
            )
        if found.decode() != what:
            raise CheckpointError(f"rank {rank} is at {found.decode()} while rank {own} is at {what}")


def _is_job() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _timeout_s() -> float:
    """How long collectives of the job wait for a rank."""
    job = dist.group.WORLD
    assert job is not None
    return _ranks_torch.group_timeout_s(job)


def warn_of_the_dead() -> None:
    """Say so if `torchrun` would let ranks that it starts again find the addresses of those that died."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or os.environ.get("RANK") != "0":
        return
    if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        logger.warning(
            "ranks that torchrun starts again share a store with the dead ones and may look for them there: set "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 where torchrun is started"
        )


@contextlib.contextmanager
def _telling() -> Generator[None]:
    try:
        yield
    except (RuntimeError, RankError) as error:
        raise CheckpointError(f"another rank is gone, or does not take part in this checkpoint: {error}") from error
