"""One job at a time saves to a folder: a lock of the operating system, which goes with the process that has it."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
import weakref
from pathlib import Path

from wholestep.errors import CheckpointError

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None

logger = logging.getLogger(__name__)

LOCK = ".lock"
_WAIT_S = 2.0
_LOOK_S = 0.05

_held: weakref.WeakValueDictionary[Path, FolderLock] = weakref.WeakValueDictionary()


class FolderLock:
    """The right to save to a folder, and to remove what is in it, for as long as this object lives.

    All that save to a folder in one process share it. `is_held` is False where the file system knows no locks: then
    nothing tells this job's files from another's, and leftovers stay.
    """

    def __init__(self, folder: Path) -> None:
        self.is_held = False
        if fcntl is None:
            return
        handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        # Locks of this kind belong to the process, and are not inherited by those it forks.
        weakref.finalize(self, os.close, handle)
        deadline = time.monotonic() + _WAIT_S  # ranks that were killed take a moment to go
        while not self.is_held:
            try:
                fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self.is_held = True
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.EAGAIN):
                    logger.warning("%s has no locks (%s): see to it that one job at a time saves there", folder, error)
                    return
                if time.monotonic() > deadline:
                    raise CheckpointError(
                        f"another job{_owner(handle)} saves to {folder}: give each job a folder of its own"
                    ) from error
                time.sleep(_LOOK_S)
        os.truncate(handle, 0)
        os.pwrite(handle, f"{os.uname().nodename}, process {os.getpid()}".encode(), 0)


def lock(folder: Path) -> FolderLock:
    """Take the folder, which is made if need be; `CheckpointError` says who has it."""
    folder.mkdir(parents=True, exist_ok=True)
    key = folder.resolve()
    known = _held.get(key)
    if known is None:
        known = _held[key] = FolderLock(folder)
    return known


def _owner(handle: int) -> str:
    with contextlib.suppress(OSError):
        text = os.pread(handle, 200, 0).decode(errors="replace")
        if text.isprintable() and text:
            return f" ({text})"
    return ""
