"""Run a function on several gloo ranks of this machine.

The ranks are processes that live as long as the pytest worker and are used again by the next test: starting one would
cost more than most tests do. They are forked from a server that has imported torch once and nothing of pytest
("forkserver"), so a rank is a clean interpreter and replacing one takes a tenth of a second.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import itertools
import multiprocessing
import os
import pickle
import re
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection as pipes
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

PRELOADED = ["torch", "torch.distributed", "torch.nn.parallel", "wholestep", "wholestep.zoo", "tests.parity"]
# What the first trace of a process imports, which takes longer than the trace.
PRELOADED += ["torch.export._trace", "torch.fx.experimental.validator", "sympy.tensor.tensor"]

AFTER_FAILURE_S = 5.0
"""How long the other ranks may go on once one has failed: their peer is gone, so they fail soon or never."""
START_S = 120.0
"""How long a process may take to start; the first one waits until its server has imported torch."""
TEARDOWN_S = 15.0
"""How long a rank may take to give its process group back; one that takes longer is replaced."""
MOST_TEXT = 4000
"""How many characters of a rank's output, and of each end of its traceback, are shown."""


class RanksFailed(AssertionError):
    """Some ranks raised, hung or died; `failures` has what is known of each, by rank."""

    def __init__(self, function: Callable[..., Any], num_ranks: int, failures: dict[int, str]) -> None:
        self.failures = failures
        name = getattr(function, "__qualname__", repr(function))
        parts = [f"{name}: {len(failures)} of {num_ranks} ranks failed"]
        parts += [f"--- rank {rank} {text.rstrip()}" for rank, text in sorted(failures.items())]
        super().__init__("\n".join(parts))


def run_ranks(function: Callable[..., Any], num_ranks: int, *args: Any, timeout_s: float = 60) -> list[Any]:
    """Call `function(*args)` on each of `num_ranks` ranks and return what they returned, by rank.

    A gloo process group is up while it runs: `torch.distributed.get_rank()` tells who it is. The function travels by
    reference, so it is one of a module's own; arguments and results are pickled, tensors by value. Warnings are
    treated as in the test that calls. If a rank raises, dies or is not done after `timeout_s`, all are ended and
    `RanksFailed` shows each one's traceback, or the stack it hung in.
    """
    return _the_pool().run(function, num_ranks, args, timeout_s)


_Filter = tuple[Any, str, Any, str, int]
"""Arguments of `warnings.filterwarnings`."""


@dataclass(frozen=True)
class _Job:
    rank: int
    num_ranks: int
    store: str
    timeout_s: float
    filters: list[_Filter]
    call: bytes


@dataclass(frozen=True)
class _Reply:
    """What a rank sends: its result pickled, or the text of what it raised."""

    result: bytes | None = None
    error: str | None = None


class _Worker:
    """One process of the pool, as seen from the test."""

    def __init__(self, context: Any, output: Path) -> None:
        self._output = output
        self._output_start = 0
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, str(output)), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    def start(self, job: _Job) -> None:
        self._output_start = self._output.stat().st_size if self._output.exists() else 0
        self.connection.send_bytes(pickle.dumps(job))

    def receive(self) -> _Reply:
        try:
            return pickle.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionError):
            self._process.join(AFTER_FAILURE_S)
            return _Reply(error=f"died with exit code {self._process.exitcode}")

    def is_idle_within(self, seconds: float) -> bool:
        """Whether the worker reports that it has no job and no process group."""
        try:
            return self.connection.poll(max(0.0, seconds)) and self.connection.recv_bytes() == b"idle"
        except (EOFError, ConnectionError):
            return False

    def stack(self) -> str:
        """Where all threads of the worker are now."""
        if not self.is_alive or self._process.pid is None:
            return "(it is dead)"
        before = self._output.stat().st_size
        os.kill(self._process.pid, signal.SIGUSR1)
        deadline = time.monotonic() + AFTER_FAILURE_S
        while self._output.stat().st_size == before and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.05)
        lines = self._output.read_bytes()[before:].decode(errors="replace").splitlines()
        # Everything below the worker's own loop is the same for all.
        return "\n".join(line for line in lines if "multiprocessing" not in line and '"<string>"' not in line)

    def output(self) -> str:
        """The last of what the job printed, titled; empty if it printed nothing."""
        printed = self._output.read_bytes()[self._output_start :].decode(errors="replace").strip()[-MOST_TEXT:]
        return f"\nit printed:\n{printed}" if printed else ""

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self.connection.close()


class _Pool:
    """Worker processes, started when needed.

    Jobs of one size share their workers and always use all of them in the same order, so that the ranks of a job have
    done the same before. After a failure none of them is used again.
    """

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)
        self._folder = tempfile.TemporaryDirectory(prefix="wholestep-ranks-")
        self._numbers = itertools.count()
        self._workers: dict[int, list[_Worker]] = {}

    def run(self, function: Callable[..., Any], num_ranks: int, args: tuple[Any, ...], timeout_s: float) -> list[Any]:
        call = pickle.dumps((function, args))
        workers = self._workers.pop(num_ranks, [])
        if not all(worker.is_alive for worker in workers) or not workers:
            _kill(workers)
            workers = self._start(num_ranks)
        with tempfile.TemporaryDirectory(dir=self._folder.name) as folder:
            for rank, worker in enumerate(workers):
                worker.start(_Job(rank, num_ranks, f"{folder}/store", timeout_s, _plain_filters(), call))
            replies = _collect(workers, timeout_s)
            failures = _failures(workers, replies, timeout_s)
            deadline = time.monotonic() + TEARDOWN_S
            if not failures and all(worker.is_idle_within(deadline - time.monotonic()) for worker in workers):
                self._workers[num_ranks] = workers
            else:
                _kill(workers)
        if failures:
            raise RanksFailed(function, num_ranks, failures)
        return [pickle.loads(replies[rank].result or b"") for rank in range(num_ranks)]

    def close(self) -> None:
        for workers in self._workers.values():
            _kill(workers)
        self._workers.clear()
        self._folder.cleanup()

    def _start(self, num_ranks: int) -> list[_Worker]:
        outputs = [Path(self._folder.name) / f"worker{next(self._numbers)}.txt" for _ in range(num_ranks)]
        workers = [_Worker(self._context, output) for output in outputs]
        # Only what the function does counts against the test's time-out, not the start of processes.
        if not all(worker.is_idle_within(START_S) for worker in workers):
            _kill(workers)
            raise RuntimeError(f"a worker process did not start within {START_S:g} s")
        return workers


def _kill(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.kill()


_pool: _Pool | None = None


def _the_pool() -> _Pool:
    global _pool
    if _pool is None:
        _pool = _Pool()
        atexit.register(_pool.close)
    return _pool


def _collect(workers: list[_Worker], timeout_s: float) -> dict[int, _Reply]:
    """Replies by rank, without those ranks that did not answer in time."""
    deadline = time.monotonic() + timeout_s
    replies: dict[int, _Reply] = {}
    while len(replies) < len(workers) and (left_s := deadline - time.monotonic()) > 0:
        waiting = {worker.connection: rank for rank, worker in enumerate(workers) if rank not in replies}
        for ready in pipes.wait(list(waiting), timeout=left_s):
            rank = next(rank for own, rank in waiting.items() if own is ready)
            replies[rank] = workers[rank].receive()
            if replies[rank].error is not None:
                deadline = min(deadline, time.monotonic() + AFTER_FAILURE_S)
    return replies


def _failures(workers: list[_Worker], replies: dict[int, _Reply], timeout_s: float) -> dict[int, str]:
    failures = {rank: reply.error + workers[rank].output() for rank, reply in replies.items() if reply.error}
    others = ", ".join(str(rank) for rank in sorted(failures))
    when = f"{AFTER_FAILURE_S:g} s after rank {others} failed" if failures else f"after {timeout_s:g} s"
    for rank, worker in enumerate(workers):
        if rank not in replies:
            printed = worker.output()
            failures[rank] = f"hung: not done {when}; it is at\n{worker.stack()}{printed}"
    return failures


def _plain_filters() -> list[_Filter]:
    """The warning filters in force here."""

    def text(pattern: Any) -> str:
        return pattern.pattern if isinstance(pattern, re.Pattern) else pattern or ""

    return [
        (action, text(message), kind, text(module), line) for action, message, kind, module, line in warnings.filters
    ]


def _serve(connection: Any, output: str) -> None:
    """The life of a worker: a job, its reply, the process group given back, the next job."""
    with open(output, "ab", buffering=0) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        faulthandler.register(signal.SIGUSR1, file=log, all_threads=True)
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        torch.set_num_threads(1)
        gc.freeze()
        while True:
            connection.send_bytes(b"idle")
            try:
                job = pickle.loads(connection.recv_bytes())
            except EOFError:
                return
            _work(job, connection)


def _work(job: _Job, connection: Any) -> None:
    with _filtered_warnings(job.filters):
        # The reply comes before the process group goes: giving it back can wait for a peer that is gone.
        connection.send_bytes(pickle.dumps(_answer(job)))
        # A DDP that outlives its process group may deadlock.
        gc.collect()
        if dist.is_initialized():
            dist.destroy_process_group()
    sys.stdout.flush()


def _answer(job: _Job) -> _Reply:
    try:
        function, args = pickle.loads(job.call)
        store = dist.FileStore(job.store, job.num_ranks)  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group(
            "gloo",
            store=store,
            rank=job.rank,
            world_size=job.num_ranks,
            # Longer than the test waits: a hang is reported with the stack, not as gloo's time-out.
            timeout=timedelta(seconds=job.timeout_s + 60),
        )
        # A rank that is done at once must not leave while another is still connecting to it.
        store.set(f"joined/{job.rank}", "")
        store.wait([f"joined/{rank}" for rank in range(job.num_ranks)])
        torch.manual_seed(0)
        return _Reply(result=pickle.dumps(function(*args)))
    except BaseException as error:
        text = "".join(traceback.format_exception(error))
        traceback.clear_frames(error.__traceback__)
        return _Reply(error=f"raised\n{_without_middle(text)}")


def _without_middle(text: str) -> str:
    """An endless recursion has a very long traceback: its ends tell."""
    return text if len(text) <= 2 * MOST_TEXT else f"{text[:MOST_TEXT]}\n...\n{text[-MOST_TEXT:]}"


@contextlib.contextmanager
def _filtered_warnings(filters: list[_Filter]) -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.resetwarnings()
        for action, message, kind, module, line in reversed(filters):
            warnings.filterwarnings(action, message, kind, module, line)
        yield
