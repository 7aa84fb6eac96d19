"""One checkpoint on its way to disk: planned by all ranks, copied out of the way, written in the background.

Planning is DCP's, over its public planner and writer: every rank lists its entries, rank 0 decides who writes what, so
that ranks with the same parameters write a share of them each. Only what a rank is to write does it copy.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import os
from collections.abc import Generator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from wholestep.errors import CheckpointError
from wholestep.runtime.checkpoint import folder as folders
from wholestep.runtime.checkpoint.metadata import METADATA
from wholestep.runtime.checkpoint.ranks import Ranks
from wholestep.runtime.checkpoint.state import State


class _Writer(FileSystemWriter):
    """DCP's writer, which keeps to itself where on this machine it wrote."""

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()


@dataclass(frozen=True)
class _Offer:
    """What a rank could write; of `fixed` entries, that of the lowest rank counts.

    `leaves` are hashes of values, `everywhere` the entries that all ranks must have.
    """

    plan: SavePlan
    fixed: frozenset[str]
    leaves: Mapping[str, str]
    everywhere: frozenset[str]


class Draft:
    """A checkpoint that is being written. Made, and finished, by all ranks together."""

    def __init__(self, temporary: Path, step: int, state: State, ranks: Ranks) -> None:
        self.ranks = ranks
        self._temporary, self._step = temporary, step
        self._planner = DefaultSavePlanner()
        self._writer = _Writer(temporary, per_thread_copy_ahead=0)
        self._metadata = Metadata({})
        offers = ranks.to_first(lambda: self._offer(state))
        self._plan = self._planner.finish_plan(ranks.from_first(lambda: self._decide(offers)))
        self._planner.state_dict = ranks.together(self._copied)

    def _copied(self) -> dict[str, Any]:
        return {item.index.fqn: _copied(self._planner.state_dict[item.index.fqn]) for item in self._plan.items}

    def finish(self) -> Path:
        """Write, and give the checkpoint its name once all ranks have written; returns its place."""
        written = self.ranks.to_first(self._write)
        return self.ranks.on_first(lambda: self._commit(written))

    def _offer(self, state: State) -> _Offer:
        self._writer.set_up_storage_writer(self.ranks.is_first)
        try:
            self._planner.set_up_planner(state.content, is_coordinator=self.ranks.is_first)
        except ValueError as error:
            raise CheckpointError(f"two entries have the same name: {error}") from error
        plan = self._writer.prepare_local_plan(self._planner.create_local_plan())
        flat: dict[str, Any] = self._planner.state_dict
        fixed = frozenset(key for key in flat if not state.is_alike(key))
        leaves = {key: _mark(value) for key, value in flat.items() if not isinstance(value, torch.Tensor)}
        return _Offer(plan, fixed, leaves, frozenset(key for key in flat if key.partition(".")[0] in state.whole))

    def _decide(self, offers: list[_Offer]) -> list[SavePlan]:
        _refuse_differences(offers)
        plans, self._metadata = self._planner.create_global_plan(_from_lowest(offers))
        return self._writer.prepare_global_plan(plans)

    def _write(self) -> tuple[list[Any], dict[str, folders.FileFacts]]:
        """What DCP has to know of the entries that this rank wrote, and the files they are in."""
        with _telling_of_the_disk(self._temporary.parent):
            results = self._writer.write_data(self._plan, self._planner).wait()
        names = sorted({result.storage_data.relative_path for result in results})
        return results, {name: folders.FileFacts.of(self._temporary / name) for name in names}

    def _commit(self, written: list[tuple[list[Any], dict[str, folders.FileFacts]]]) -> Path:
        with _telling_of_the_disk(self._temporary.parent):
            self._writer.finish(self._metadata, [results for results, _ in written])
        files = {name: facts for _, each in written for name, facts in each.items()}
        files[METADATA] = folders.FileFacts.of(self._temporary / METADATA)
        try:
            with _telling_of_the_disk(self._temporary.parent):
                return folders.commit(self._temporary, self._step, self.ranks.world, files)
        except folders.MissingFileError as error:
            raise CheckpointError(
                f"rank 0 does not find in {self._temporary.parent} what all ranks wrote ({error}): the folder must be "
                "one that all machines share"
            ) from error


@contextlib.contextmanager
def _telling_of_the_disk(folder: Path) -> Generator[None]:
    """Say what the system said: a disk that is full makes torch complain about positions in a file."""
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not (isinstance(cause, OSError) and cause.errno):
            cause = cause.__cause__ or cause.__context__
        if not isinstance(cause, OSError) or not cause.errno:
            raise
        raise CheckpointError(f"{folder} cannot be written to: {os.strerror(cause.errno)}") from error


def _from_lowest(offers: list[_Offer]) -> list[SavePlan]:
    """Plans in which fixed entries stand once, with the lowest rank that has them; DCP deals out the others."""
    seen: set[Any] = set()
    plans: list[SavePlan] = []
    for offer in offers:
        items = [item for item in offer.plan.items if item.index not in seen or not _is_fixed(item, offer)]
        seen |= {item.index for item in items}
        plans.append(replace(offer.plan, items=items))
    return plans


def _is_fixed(item: WriteItem, offer: _Offer) -> bool:
    return item.type == WriteItemType.BYTE_IO or item.index.fqn in offer.fixed


def _refuse_differences(offers: list[_Offer]) -> None:
    """Numbers and text have to be the same on all ranks: only one rank's are kept."""
    for rank, offer in enumerate(offers):
        odd = sorted(offer.everywhere ^ offers[0].everywhere)
        if odd:
            has, lacks = (rank, 0) if odd[0] in offer.everywhere else (0, rank)
            raise CheckpointError(
                f"'{odd[0]}' is there on rank {has} and not on rank {lacks}: what each rank has of its own goes into "
                "per_rank={...}"
            )
    known: dict[str, tuple[int, str]] = {}
    for rank, offer in enumerate(offers):
        for key, mark in offer.leaves.items():
            first, expected = known.setdefault(key, (rank, mark))
            if mark != expected:
                raise CheckpointError(
                    f"'{key}' is not the same on ranks {first} and {rank}, and a checkpoint holds it once: what each "
                    "rank has of its own goes into per_rank={...}"
                )


def _mark(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()


def _copied(value: Any) -> Any:
    """A copy in the memory of the host that training does not change; tensors without their history."""
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    with torch.no_grad():
        return value.detach().clone() if value.device.type == "cpu" else value.detach().cpu()
