"""One GPU for several processes: they compile side by side, and take turns with whatever is timed."""

from __future__ import annotations

import fcntl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch


class Gpu:
    """The right to use the GPU alone, among processes that know the same file."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w")
        self._depth = 0

    @contextmanager
    def alone(self) -> Iterator[None]:
        if not self._depth:
            fcntl.flock(self._file, fcntl.LOCK_EX)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                torch.cuda.synchronize()
                fcntl.flock(self._file, fcntl.LOCK_UN)

    def guard_trials(self) -> None:
        """Let Inductor time its own candidates alone, too."""
        from torch._inductor.runtime.benchmarking import benchmarker

        for name in ("benchmark_gpu", "benchmark"):
            if hasattr(benchmarker, name):
                setattr(benchmarker, name, self._guarded(getattr(benchmarker, name)))

    def _guarded(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def alone(*args: Any, **kwargs: Any) -> Any:
            with self.alone():
                return function(*args, **kwargs)

        return alone


def pause() -> None:
    """The lock is not fair: let the others have their turn."""
    time.sleep(0.05)


def share_out(module: str, points: Sequence[str], num_processes: int, options: Mapping[str, Any]) -> list[str]:
    """Run `python -m module --lock L --json F --points ...` in some processes; returns what they wrote to F."""
    with tempfile.TemporaryDirectory() as folder:
        workers: list[tuple[subprocess.Popen[bytes], Path]] = []
        for number in range(min(num_processes, len(points))):
            path = Path(folder) / f"{number}.json"
            command = [sys.executable, "-m", module, "--lock", f"{folder}/lock", "--json", str(path)]
            command += [text for key, value in options.items() for text in (f"--{key}", str(value))]
            workers.append((subprocess.Popen([*command, "--points", *points[number::num_processes]]), path))
        failed = [worker.wait() for worker, _ in workers]
        if any(failed):
            raise SystemExit("a contender failed")
        return [path.read_text() for _, path in workers]
