"""Files that a user asked for by path: reports, traces, pictures."""

from __future__ import annotations

import os
from pathlib import Path

from wholestep.errors import UsageError


def require_writable(path: Path | None) -> None:
    """Make the folder of a file; raises `UsageError` if the file could not be written: before the work, not after."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror or error}") from error
    if path.is_dir():
        raise UsageError(f"{path} cannot be written: it is a folder")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"{path} cannot be written: it may not be changed")


def write_output(path: Path, text: str) -> Path:
    """Write a text file, creating folders on the way, and return its path; raises `UsageError` if that cannot be."""
    require_writable(path)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror or error}") from error
    return path
