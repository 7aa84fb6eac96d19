"""Progress on stderr: a bar on a terminal, a few plain lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Generator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from wholestep._settings import Settings

_NUM_PLAIN_LINES = 8
_PATIENCE_S = 2.0
_REPEAT_S = 10.0


def say(text: str) -> None:
    """A line about what is going on, unless progress is switched off."""
    if Settings.from_environ().progress is not False:
        print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def training_progress(title: str, num_steps: int, *, is_shown: bool = True) -> Generator[Callable[[float], None]]:
    """Yields what to call with the loss after each step. `WHOLESTEP_PROGRESS` switches it off, or forces the bar."""
    wanted = Settings.from_environ().progress if is_shown else False
    console = Console(file=sys.stderr, force_terminal=True if wanted else None)
    if wanted is False:
        yield lambda loss: None
    elif console.is_terminal:
        with _bar(title, num_steps, console) as on_step:
            yield on_step
    else:
        yield _plain_lines(title, num_steps)


@contextlib.contextmanager
def _bar(title: str, num_steps: int, console: Console) -> Generator[Callable[[float], None]]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(title, total=num_steps, loss="–")
        yield lambda loss: progress.update(task, advance=1, loss=f"{loss:.4f}")


def _plain_lines(title: str, num_steps: int) -> Callable[[float], None]:
    started, done = time.perf_counter(), 0

    def on_step(loss: float) -> None:
        nonlocal done
        done += 1
        if done == num_steps or done % max(1, num_steps // _NUM_PLAIN_LINES) == 0:
            elapsed_s = time.perf_counter() - started
            print(f"{title}: step {done} of {num_steps}, loss {loss:.4f}, {elapsed_s:.0f} s", file=sys.stderr)

    return on_step


@contextlib.contextmanager
def working(title: str) -> Generator[None]:
    """Say what takes long, once it has taken two seconds and from time to time after that, and when it is done."""
    started, is_done = time.perf_counter(), threading.Event()

    def watch() -> None:
        wait_s = _PATIENCE_S
        while not is_done.wait(wait_s):
            say(f"{title}: {time.perf_counter() - started:.0f} s")
            wait_s = _REPEAT_S

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        is_done.set()
        watcher.join()
    elapsed_s = time.perf_counter() - started
    if elapsed_s > _PATIENCE_S:
        say(f"{title}: done in {elapsed_s:.0f} s")
