"""A folder of checkpoints on disk: names, manifests, and the order of operations that survives a crash at any moment.

    runs/gpt/
      step-00000050/            complete: it got this name when everything in it was on disk
        .metadata               what DCP writes: names, shapes, and where each entry is
        __0_0.distcp            the entries that rank 0 wrote, and so on
        manifest.json           written last: size and SHA-256 of each file, the step, the number of ranks
      .writing-00000100-9f31/   unfinished; the next save removes it

Every file is synced before the manifest is written; the manifest, then the folder are synced before the folder gets its
name in one rename; the folder above is synced after that. A process that dies, or a machine that loses power, leaves a
folder under a temporary name or a complete one. What happens to complete ones later (a copy cut short, a bad disk)
shows when their manifest is compared with them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import shutil
import stat
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from wholestep import _strict_json as strict_json
from wholestep.errors import CheckpointError

MANIFEST = "manifest.json"
_FORMAT = 1
_MAX_MANIFEST_BYTES = 2**26
_STEP_NAME = re.compile(r"step-(\d{8,18})(?:-(\d{1,9}))?", re.ASCII)
STEPS = range(10**18)
"""What a step may be, so that its folder has such a name."""
_FILE_NAME = re.compile(r"[A-Za-z0-9_.-]{1,200}", re.ASCII)
_WRITING, _DELETING = ".writing-", ".deleting-"


@dataclass(frozen=True)
class FileFacts:
    """What a file must be like."""

    num_bytes: int
    sha256: str

    @staticmethod
    def of(path: Path) -> FileFacts:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            return FileFacts(file.tell(), digest)


@dataclass(frozen=True)
class Manifest:
    """What a complete checkpoint consists of."""

    step: int
    world: int
    files: Mapping[str, FileFacts]


@dataclass(frozen=True, order=True)
class Entry:
    """A folder with the name of a checkpoint. One step may be saved several times; the last one counts."""

    step: int
    attempt: int
    path: Path

    @property
    def has_manifest(self) -> bool:
        return (self.path / MANIFEST).is_file()


def entries(folder: Path) -> list[Entry]:
    """All folders named like checkpoints, oldest first, whether complete or not."""
    if not folder.is_dir():
        return []
    matches = [(path, _STEP_NAME.fullmatch(path.name)) for path in folder.iterdir() if path.is_dir()]
    return sorted(Entry(int(match[1]), int(match[2] or 0), path) for path, match in matches if match)


def begin(folder: Path, step: int, *, is_own: bool) -> Path:
    """A new temporary folder for the checkpoint of a step; if the folder `is_own`, what others have left is removed."""
    for path in folder.iterdir() if is_own else ():
        if path.name.startswith((_WRITING, _DELETING)):
            shutil.rmtree(path, ignore_errors=True)
    temporary = folder / f"{_WRITING}{step:08d}-{secrets.token_hex(4)}"
    temporary.mkdir()
    return temporary


def commit(temporary: Path, step: int, world: int, files: Mapping[str, FileFacts]) -> Path:
    """Make a temporary folder, whose files are all on disk, a complete checkpoint; returns its new place."""
    for name, facts in files.items():
        _refuse_absent(temporary / name, facts)
    _write_synced(temporary / MANIFEST, _to_json(Manifest(step, world, files)))
    _sync_folder(temporary)
    folder = temporary.parent
    attempts = [entry.attempt for entry in entries(folder) if entry.step == step]
    target = folder / (f"step-{step:08d}-{max(attempts) + 1}" if attempts else f"step-{step:08d}")
    temporary.rename(target)
    _sync_folder(folder)
    return target


def prune(folder: Path, newest: Path, keep: int, torn: Collection[str]) -> None:
    """Remove what a new complete checkpoint replaces: all but the last `keep`, and torn ones that are not newer.

    A folder is renamed before it is emptied, so that no half of a checkpoint is ever seen under its name.
    """
    known = entries(folder)
    new = next(entry for entry in known if entry.path == newest)
    complete = [entry for entry in known if entry.has_manifest and entry.path.name not in torn and entry <= new]
    stay = set(complete[-keep:])
    for entry in known:
        if entry <= new and entry not in stay:
            _remove(entry.path)


def newest_step(folder: Path, torn: Collection[str]) -> int | None:
    """The step of the newest checkpoint that looks complete and is not known to be torn."""
    steps = [entry.step for entry in entries(folder) if entry.has_manifest and entry.path.name not in torn]
    return max(steps, default=None)


def read_manifest(path: Path) -> Manifest:
    """The manifest of a checkpoint; `CheckpointError` says why there is none."""
    try:
        manifest = _from_json(read_regular(path / MANIFEST, _MAX_MANIFEST_BYTES))
        name = _STEP_NAME.fullmatch(path.name)
        if name is not None and int(name[1]) != manifest.step:
            raise CheckpointError(f"its manifest is that of step {manifest.step}")
        return manifest
    except FileNotFoundError as error:
        raise CheckpointError("it has no manifest") from error
    except OSError as error:
        raise CheckpointError(f"its manifest cannot be read: {error}") from error
    except strict_json.FileError as error:
        raise CheckpointError(f"its manifest is damaged: {error}") from error


def fault(path: Path, manifest: Manifest, names: Sequence[str]) -> str | None:
    """What is wrong with the first of these files that is not as the manifest says; None if all are."""
    for name in names:
        expected, file = manifest.files[name], path / name
        try:
            _refuse_absent(file, expected)
            found = FileFacts.of(file)
        except CheckpointError as error:
            return str(error)
        except OSError as error:
            return f"{name} cannot be read: {error}"
        if found != expected:
            return f"{name} is damaged: its SHA-256 is not that of the manifest"
    return None


def read_regular(file: Path, most_bytes: int) -> bytes:
    """What is in an ordinary file. Reading a pipe, or a device, could take for ever."""
    # Opening a pipe without a writer waits for one, unless it is opened like this.
    handle = os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with os.fdopen(handle, "rb") as opened:
        facts = os.fstat(handle)
        if not stat.S_ISREG(facts.st_mode):
            raise CheckpointError(f"{file.name} is no ordinary file")
        if facts.st_size > most_bytes:
            raise CheckpointError(f"its {file.name} is too large")
        return opened.read(most_bytes)


class MissingFileError(CheckpointError):
    """A file is not there, or not all of it."""


def _refuse_absent(file: Path, expected: FileFacts) -> None:
    if not file.is_file():
        raise MissingFileError(f"{file.name} is missing")
    num_bytes = file.stat().st_size
    if num_bytes != expected.num_bytes:
        raise MissingFileError(f"{file.name} has {num_bytes} bytes instead of {expected.num_bytes}")


def _to_json(manifest: Manifest) -> bytes:
    content: dict[str, Any] = {
        "format": _FORMAT,
        "step": manifest.step,
        "world": manifest.world,
        "files": {name: asdict(facts) for name, facts in manifest.files.items()},
    }
    return strict_json.dump(content | {"fingerprint": strict_json.fingerprint(content)})


def _from_json(data: bytes) -> Manifest:
    content = strict_json.fields(
        strict_json.parse(data, MANIFEST), MANIFEST, ("format", "step", "world", "files", "fingerprint")
    )
    mark = content.pop("fingerprint")
    if mark != strict_json.fingerprint(content):
        raise CheckpointError("its manifest is damaged: it does not have its own fingerprint")
    if content["format"] != _FORMAT:
        raise CheckpointError(f"it is of format {strict_json.shown(content['format'])}, which is not known here")
    files = strict_json.mapping(content["files"], "files")
    return Manifest(
        strict_json.integer(content["step"], "step", range(2**63)),
        strict_json.integer(content["world"], "world", range(1, 2**31)),
        {_file_name(name): _facts(facts) for name, facts in files.items()},
    )


def _facts(value: Any) -> FileFacts:
    found = strict_json.fields(value, "a file", ("num_bytes", "sha256"))
    num_bytes = strict_json.integer(found["num_bytes"], "num_bytes", range(2**63))
    return FileFacts(num_bytes, strict_json.string(found["sha256"], "sha256"))


def _file_name(name: str) -> str:
    if not is_file_name(name):
        raise CheckpointError(f"its manifest names '{strict_json.shown(name)}', which is no file of a checkpoint")
    return name


def is_file_name(name: object) -> bool:
    """Whether this is the name of a file in the folder itself, and not a path that leads out of it."""
    return isinstance(name, str) and _FILE_NAME.fullmatch(name) is not None and name not in (".", "..")


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove(path: Path) -> None:
    # What cannot be removed now costs space and nothing else: the next save tries again.
    with contextlib.suppress(OSError):
        hidden = path.with_name(f"{_DELETING}{path.name}-{secrets.token_hex(4)}")
        path.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)
