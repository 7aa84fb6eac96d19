"""Start the ranks of a command on this machine, as torchrun would, and end them together."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Generator, Sequence
from pathlib import Path

from wholestep.errors import RankError, WholestepError

# How long the others may go on once a rank has failed: they fail soon, because their peer is gone, or never.
_GRACE_S = 1.0
_POLL_S = 0.02
_MOST_TEXT = 4000
_LOOPBACK = {"linux": "lo", "darwin": "lo0"}


def launch(command: Sequence[str], num_ranks: int) -> int:
    """Run `command FOLDER` once per rank and return rank 0's exit code.

    The folder is the ranks' own: for a store to meet at, and for `reporting_errors`. Rank 0 has this process's stdout
    and stderr, the others are silent. Whatever ends this process ends the ranks (see `end_with_launcher`). Raises
    `RankError` with the rank and its own words if one fails.
    """
    with tempfile.TemporaryDirectory(prefix="wholestep-launch-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        ranks = [stack.enter_context(_started(command, rank, num_ranks, folder)) for rank in range(num_ranks)]
        codes = _wait(ranks)
        failed = [rank for rank, code in enumerate(codes) if code]
        first = min(failed, key=lambda rank: _failed_at(folder, rank, codes[rank]), default=0)
        story = _story(folder, first, codes[first])
        if failed and story:
            raise RankError(f"rank {first} of {num_ranks} failed: {story}")
        return codes[0] or 0


@contextlib.contextmanager
def reporting_errors(folder: Path, rank: int) -> Generator[None]:
    """In a rank: tell the launcher what the block raises, instead of stderr, and leave with exit code 1."""
    try:
        yield
    except Exception as error:
        text = str(error) if isinstance(error, WholestepError) else "".join(traceback.format_exception(error))
        (folder / f"error{rank}").write_text(text.strip(), encoding="utf-8")
        sys.exit(1)


def end_with_launcher() -> None:
    """In a rank: leave at once when the launcher is gone, however it went; it holds the other end of our stdin."""
    stdin = sys.stdin

    def watch() -> None:
        stdin.read()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextlib.contextmanager
def _started(command: Sequence[str], rank: int, num_ranks: int, folder: Path) -> Generator[subprocess.Popen[bytes]]:
    """A rank's process; it is dead behind the block."""
    environment = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
    }
    if sys.platform in _LOOPBACK:
        environment["GLOO_SOCKET_IFNAME"] = _LOOPBACK[sys.platform]
    with open(folder / f"stderr{rank}", "wb") as log:
        process = subprocess.Popen(
            [*command, str(folder)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=None if rank == 0 else subprocess.DEVNULL,
            stderr=None if rank == 0 else log,
            start_new_session=True,  # Ctrl-C is for the launcher, which ends its ranks without a traceback of each
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdin is not None
        process.stdin.close()


def _wait(ranks: Sequence[subprocess.Popen[bytes]]) -> list[int | None]:
    """Exit codes once all ranks are done, or some time after one has failed; None of those that go on."""
    deadline: float | None = None
    while True:
        codes = [process.poll() for process in ranks]
        if None not in codes or (deadline is not None and time.monotonic() > deadline):
            return codes
        if any(codes) and deadline is None:
            deadline = time.monotonic() + _GRACE_S
        time.sleep(_POLL_S)


def _failed_at(folder: Path, rank: int, code: int | None) -> float:
    """When a rank failed. One that was killed comes first: it could not tell, and the others fail because of it."""
    told = folder / f"error{rank}"
    if (code or 0) < 0:
        return 0.0
    return told.stat().st_mtime if told.exists() else time.time()


def _story(folder: Path, rank: int, code: int | None) -> str:
    """What is known of a rank's end: its own words, or a signal and the end of its stderr; empty if it just left."""
    told = _text(folder / f"error{rank}")
    if told:
        return told
    by_signal = f"ended by {signal.Signals(-code).name}" if code is not None and code < 0 else ""
    return "\n".join(part for part in (by_signal, _text(folder / f"stderr{rank}")) if part)


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace").strip()[-_MOST_TEXT:] if file.exists() else ""
