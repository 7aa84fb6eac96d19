"""Commands run at the same time, their output line by line, and their end: all of them, whatever happens."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import IO, TextIO

_GRACE_S = 5.0
TIMED_OUT = 124  # as timeout(1) says it


@dataclass(frozen=True)
class RankCommand:
    """One process to be: its arguments, environment, and the core to stay on if there is one."""

    arguments: list[str]
    environment: Mapping[str, str]
    core: int | None = None


def run_together(commands: list[RankCommand], output: TextIO, timeout_s: float | None = None) -> int:
    """Run the commands at once, until all succeed or the first one fails.

    Lines of stdout and stderr go to `output` behind `[rank N] `. A failure ends the other processes; so do a timeout
    and any exception.

    Returns:
        0, the exit code of the first to fail (128 + signal if one killed it), or `TIMED_OUT`.
    """
    processes: list[subprocess.Popen[str]] = []
    readers: list[threading.Thread] = []
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()
    lock = threading.Lock()
    try:
        for rank, command in enumerate(commands):
            processes.append(process := _start(command))
            assert process.stdout is not None
            readers.append(_thread(_copy_lines, process.stdout, output, f"[rank {rank}] ", lock))
            _thread(_report_end, process, ended)
        return _first_failure(ended, len(processes), timeout_s)
    finally:
        end_groups(processes)
        for reader in readers:  # a grandchild that left its group may hold the pipe: do not wait for ever
            reader.join(timeout=1.0)


def _start(command: RankCommand) -> subprocess.Popen[str]:
    with _on_core(command.core):
        return subprocess.Popen(
            command.arguments,
            env=command.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            # A group of its own: Ctrl-C reaches only us, and a signal of ours reaches all that the rank started.
            start_new_session=True,
        )


@contextlib.contextmanager
def _on_core(core: int | None) -> Iterator[None]:
    """A process inherits the affinity of the thread that starts it, before its first instruction."""
    if core is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _first_failure(ended: queue.SimpleQueue[int], num_running: int, timeout_s: float | None) -> int:
    deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
    for _ in range(num_running):
        left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
        try:
            code = ended.get(timeout=left_s)
        except queue.Empty:
            return TIMED_OUT
        if code != 0:
            return code
    return 0


def end_groups(processes: list[subprocess.Popen[str]]) -> None:
    """Ask each process and all it started to end; insist after a while."""
    _signal_groups(processes, signal.SIGTERM)
    deadline_s = time.monotonic() + _GRACE_S
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=max(0.0, deadline_s - time.monotonic()))
    _signal_groups(processes, signal.SIGKILL)
    for process in processes:
        process.wait()


def _signal_groups(processes: list[subprocess.Popen[str]], number: int) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)


def _thread(target: object, *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=target, args=arguments, daemon=True)  # pyright: ignore[reportArgumentType]
    thread.start()
    return thread


def _copy_lines(source: IO[str], output: TextIO, prefix: str, lock: threading.Lock) -> None:
    with source:
        for line in source:
            # Whoever read our output may have left (`| head`); the ranks go on and their pipes must not fill up.
            with lock, contextlib.suppress(BrokenPipeError):
                output.write(f"{prefix}{line.rstrip()}\n")
                output.flush()


def _report_end(process: subprocess.Popen[str], ended: queue.SimpleQueue[int]) -> None:
    code = process.wait()
    ended.put(code if code >= 0 else 128 - code)
