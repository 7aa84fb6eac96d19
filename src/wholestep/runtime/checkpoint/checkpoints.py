"""`Checkpoints`: save while training goes on, resume from the newest checkpoint that is complete."""

from __future__ import annotations

import contextlib
import logging
import operator
import os
import threading
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from wholestep._strict_json import shown
from wholestep.errors import CheckpointError
from wholestep.runtime.checkpoint import folder as folders
from wholestep.runtime.checkpoint.lock import FolderLock, lock
from wholestep.runtime.checkpoint.randomness import random_state, set_random_state, try_random_state
from wholestep.runtime.checkpoint.ranks import Ranks, meet
from wholestep.runtime.checkpoint.reading import Archive
from wholestep.runtime.checkpoint.state import (
    PER_RANK,
    RESERVED,
    Apply,
    Change,
    State,
    collect,
    make,
    names_to_read,
    prepare,
    unmake,
)
from wholestep.runtime.checkpoint.writing import Draft
from wholestep.runtime.pending import flush_all

logger = logging.getLogger(__name__)


class Checkpoints:
    """A folder of checkpoints of one training run.

    ```
    checkpoints = wholestep.Checkpoints("runs/gpt", keep=3)
    done = checkpoints.resume(model=model, optimizer=optimizer, scheduler=scheduler)
    for number in range(done, num_steps):
        train_step(model, optimizer, batch_of(number))
        scheduler.step()
        if (number + 1) % 50 == 0:
            checkpoints.save(number + 1, model=model, optimizer=optimizer, scheduler=scheduler)
    checkpoints.wait()
    ```

    Every rank makes one and calls its methods at the same points; the folder is one that all of them see. What is saved
    is passed by name: modules, optimizers, `wholestep.pipeline`s, any object with `state_dict()` and
    `load_state_dict()`, and dicts of numbers, text, lists and tensors, which `resume` fills in place. Random number
    generators are saved for each rank without being named. Updates that a compiled step has left for its next call are
    applied first, before saving and before resuming.

    A checkpoint is an ordinary one of `torch.distributed.checkpoint`, with the names that parameters have in the model.
    It can be resumed on another number of ranks.

    Args:
        folder: where checkpoints are, each in a folder of its own such as `step-00000050`; made if need be.
        keep: how many complete ones stay; older ones are removed once a newer one is complete. None keeps all.

    A folder belongs to one job: `save` raises `CheckpointError` while another one saves there.
    """

    def __init__(self, folder: str | Path, *, keep: int | None = None) -> None:
        if keep is not None and keep < 1:
            raise CheckpointError(f"keep is a positive number or None, not {keep}")
        self.folder = Path(folder)
        self.keep = keep
        self._job: Ranks | None = None
        self._writer: threading.Thread | None = None
        self._failure: tuple[int, Exception] | None = None
        self._torn: set[str] = set()
        self._lock: FolderLock | None = None

    def save(self, step: int, *, wait: bool = False, per_rank: Mapping[str, Any] | None = None, **state: Any) -> None:
        """Save `state` as it is now, after `step` finished steps, and return once it is copied; a thread writes it.

        The checkpoint before is finished first, and `CheckpointError` raised if that one could not be written. With
        `wait` this one is finished too. `per_rank` holds objects, by name, of which each rank has its own, such as the
        position of a data loader; all others are the same on all ranks, and of buffers those of rank 0 are kept.
        """
        self.wait()
        _refuse_reserved(state)
        ranks = self._ranks("Checkpoints.save")
        with contextlib.suppress(TypeError):  # what is no whole number is refused on all ranks together
            step = int(operator.index(step))
        flush_all()
        temporary, first = ranks.on_first(lambda: (self._begin(step), step))
        content = ranks.together(lambda: _content(_same(step, first, state), per_rank or {}, ranks))
        draft = Draft(temporary, step, content, ranks)
        self._writer = threading.Thread(target=self._write, args=(draft, step), name=f"checkpoint of step {step}")
        self._writer.start()
        if wait:
            self.wait()

    def wait(self) -> None:
        """Return when nothing is being written; `CheckpointError` says why the last checkpoint is not complete."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        if self._failure is not None:
            (step, error), self._failure = self._failure, None
            raise CheckpointError(f"the checkpoint of step {step} was not written: {error}") from error

    def resume(self, *, per_rank: Mapping[str, Any] | None = None, **state: Any) -> int:
        """Put the newest complete checkpoint into these objects; returns how many steps are done, 0 if there is none.

        To be called when everything has been built and before the first step. Folders that are not what their manifest
        says are passed over with a warning. All ranks take the same checkpoint. If it does not fit the objects,
        `CheckpointError` is raised on all ranks and nothing has been changed. On another number of ranks than it was
        saved by, ranks that were not there before keep their random number generators as they are.
        """
        self.wait()
        _refuse_reserved(state)
        ranks = self._ranks("Checkpoints.resume")
        found = self._newest(ranks)
        if found is None:
            return 0
        path, manifest = found
        own = per_rank or {}
        flush_all()
        changes = ranks.together(lambda: self._prepared(path, manifest, state, own, ranks))
        finish = self._make(path, changes, ranks)
        with _telling(path):
            finish()
        if ranks.is_first:
            logger.info("resumed from %s: %d steps are done", path, manifest.step)
        return manifest.step

    def _make(self, path: Path, changes: Sequence[Change], ranks: Ranks) -> Apply:
        """Make what may fail on all ranks or on none; returns what makes the rest."""
        made: list[Apply] = []

        def attempt() -> None:
            with _telling(path):
                made.append(make(changes))

        try:
            ranks.together(attempt)
        except BaseException:
            if made:
                unmake(changes)
            raise
        return made[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Finish what is being written; if the block has failed, that is what is raised."""
        with contextlib.suppress(CheckpointError) if kind is not None else contextlib.nullcontext():
            self.wait()

    def _ranks(self, what: str) -> Ranks:
        meet(what)
        if self._job is None:
            self._job = Ranks.of_job()
        return self._job

    def _begin(self, step: int) -> Path:
        if type(step) is not int or step not in folders.STEPS:
            raise CheckpointError(f"step is how many steps are finished, less than 10**18, not {step!r}")
        self._lock = self._lock or lock(self.folder)
        newest = folders.newest_step(self.folder, self._torn)
        if newest is not None and newest > step:
            raise CheckpointError(
                f"{self.folder} already has a checkpoint of step {newest}, and this is step {step}: begin with "
                "resume(), or save to another folder"
            )
        return folders.begin(self.folder, step, is_own=self._lock.is_held)

    def _write(self, draft: Draft, step: int) -> None:
        """The life of the writer: its failure is told at once, and raised by whoever asks next."""
        try:
            path = draft.finish()
            if self.keep is not None and draft.ranks.is_first:
                with contextlib.suppress(OSError):
                    folders.prune(self.folder, path, self.keep, self._torn)
        except Exception as error:
            logger.error("the checkpoint of step %d was not written: %s", step, error)
            self._failure = (step, error)

    def _newest(self, ranks: Ranks) -> tuple[Path, folders.Manifest] | None:
        """The newest checkpoint that is what its manifest says."""
        for entry in reversed(ranks.on_first(lambda: folders.entries(self.folder))):
            manifest, reason = ranks.on_first(lambda entry=entry: _manifest_of(entry.path))
            if manifest is not None:
                reason = _fault(entry.path, manifest, ranks)
            if manifest is not None and reason is None:
                return entry.path, manifest
            self._torn.add(entry.path.name)
            if ranks.is_first:
                logger.warning("checkpoint %s is passed over: %s", entry.path, reason)
        return None

    def _prepared(
        self, path: Path, manifest: folders.Manifest, state: Mapping[str, Any], own: Mapping[str, Any], ranks: Ranks
    ) -> list[Change]:
        with _telling(path):
            if own and manifest.world != ranks.world:
                raise CheckpointError(
                    f"it was saved by {manifest.world} ranks and there are {ranks.world}, so that what each rank had "
                    "of its own (per_rank) has no place to go"
                )
            archive = Archive(path)
            content = archive.read([*((name,) for name in names_to_read(state)), (PER_RANK, str(ranks.rank))])
            mine = content.pop(PER_RANK, {}).get(str(ranks.rank), {})
            unused = [name for name in archive.names if name not in state and name not in RESERVED]
            if unused and ranks.is_first:
                logger.warning("checkpoint %s also has %s, which nobody asked for", path, ", ".join(unused))
            changes = [*prepare(state, content), *prepare(own, mine.get("own", {}))]
            if "random" in mine:
                try_random_state(mine["random"])
                changes.append(Change(lambda: set_random_state(mine["random"])))
            return changes


def load_checkpoint(path: str | Path, **state: Any) -> None:
    """Put one checkpoint into objects, as in `load_checkpoint("runs/gpt/step-00000050", model=model)`.

    `path` is a checkpoint of `Checkpoints`, or one that `torch.distributed.checkpoint.save` wrote with the same names,
    as in `save({"model": model.state_dict()})`. What is not asked for is not read, random number generators stay as
    they are, and every process reads for itself. Nothing in the files is run. Raises `CheckpointError`, and changes
    nothing, if the checkpoint is damaged or does not fit.
    """
    path = Path(path)
    flush_all()
    with _telling(path):
        if os.path.lexists(path / folders.MANIFEST):
            manifest = folders.read_manifest(path)
            reason = folders.fault(path, manifest, list(manifest.files))
            if reason is not None:
                raise CheckpointError(reason)
        make(prepare(state, Archive(path).read([(name,) for name in names_to_read(state)])))()


def _content(state: Mapping[str, Any], per_rank: Mapping[str, Any], ranks: Ranks) -> State:
    """What this rank has to save, with what only it has."""
    common, own = collect(state), collect(per_rank)
    mine = {"random": random_state()} | ({"own": own.content} if own.content else {})
    return replace(common, content=common.content | {PER_RANK: {str(ranks.rank): mine}})


def _same(step: int, first: int, state: Mapping[str, Any]) -> Mapping[str, Any]:
    if step != first:
        raise CheckpointError(f"it saves step {step} while rank 0 saves step {first}")
    return state


def _refuse_reserved(state: Mapping[str, Any]) -> None:
    taken = [name for name in state if name in RESERVED or "." in name]
    if taken:
        raise CheckpointError(f"'{taken[0]}' cannot be the name of something in a checkpoint")


def _manifest_of(path: Path) -> tuple[folders.Manifest | None, str | None]:
    try:
        return folders.read_manifest(path), None
    except CheckpointError as error:
        return None, str(error)


def _fault(path: Path, manifest: folders.Manifest, ranks: Ranks) -> str | None:
    """What is wrong with the files of a checkpoint; each rank looks at its share of them."""
    names = sorted(manifest.files)[ranks.rank :: ranks.world]
    found = ranks.all(ranks.together(lambda: folders.fault(path, manifest, names)))
    return next((reason for reason in found if reason is not None), None)


@contextlib.contextmanager
def _telling(path: Path) -> Generator[None]:
    """Say which checkpoint it is that cannot be loaded."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"checkpoint {path} cannot be loaded: {error}") from error
    except RecursionError as error:
        raise CheckpointError(f"checkpoint {path} cannot be loaded: it nests too deeply") from error
    except Exception as error:  # a number where a dict should be, and the like
        raise CheckpointError(
            f"checkpoint {path} cannot be loaded: it is not of the form that these objects have "
            f"({type(error).__name__}: {shown(str(error))})"
        ) from error
