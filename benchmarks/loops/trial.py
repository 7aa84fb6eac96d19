"""One loop, eager and compiled side by side: what becomes of it."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import linecache
import logging
import multiprocessing
import os
import re
import sys
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tests.integrations.torchvision_operators import declare_missing
from tests.pictures import Picture, differences
from tests.twins import Twins
from torch import Tensor

from benchmarks.loops import Loop, World
from wholestep import CaptureError

declare_missing()  # of what timm and diffusers import

TOLERANCE = 1e-4
"""Of the largest element of a tensor: results within it are close."""
TIME_LIMIT_S = 240


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a loop.

    `verdict` is bitwise, close, refused, wrong, failed (another error than a refusal) or late (out of time).
    """

    verdict: str
    captures: int = 0
    eager_calls: int = 0
    calls: int = 0
    detail: str = ""
    line: str = ""
    edit: str = ""
    edited: str = ""

    @property
    def runs(self) -> bool:
        return self.verdict in ("bitwise", "close")


class Wrong(AssertionError):
    """The two sides differ."""


class _Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if not record.name.startswith("wholestep"):
            self.lines.append(f"{record.levelname} {record.name}: {record.getMessage()}")


class Sides(Twins):
    """Twins that also compare what a call printed and logged, and bear rounding errors (the largest is kept)."""

    def __init__(self, loop: Loop, eager_only: bool = False) -> None:
        self.largest = 0.0
        self.printed = ""
        self.side = 0
        # One stream each for all calls, as a process has: a step that writes to it is not captured again.
        self.streams_of = [(io.StringIO(), io.StringIO()) for _ in range(2)]
        chosen: dict[str, Any] = {"make": loop.step} if loop.closure else {"function": loop.step}
        super().__init__(loop.build, call=self._run, **chosen)
        if eager_only:
            self.compiled = self._functions[1]
        self._loop = loop
        self._calls = 0

    def _run(self, world: World, step: Any, *args: Any) -> Any:
        self.side = self.worlds.index(world) if world is not self.worlds[1] else 1
        with _noted(*self.streams_of[self.side]) as noted:
            returned = step(*args) if self._loop.closure else step(world, *args)
        if self._loop.between is not None:
            self._loop.between(world, returned, self._calls // 2)
        self._calls += 1
        self.printed = "\n".join(noted)
        return returned

    def _look(self, side: int) -> Picture:
        return super()._look(side) | {"printed": self.printed}

    def _compare(self, where: str, eager: Picture, compiled: Picture) -> None:
        lines = [line for line in differences(eager, compiled) if not self._is_rounding(line, eager, compiled)]
        if lines:
            raise Wrong("; ".join([f"{where} differs from eager", *lines]))

    def _is_rounding(self, line: str, eager: Picture, compiled: Picture) -> bool:
        place, _, _ = line.rpartition(": ")
        left, right = eager.get(place), compiled.get(place)
        if not isinstance(left, Tensor) or not isinstance(right, Tensor):
            return False
        if not left.is_floating_point() or left.dtype != right.dtype or left.shape != right.shape:
            return False
        gap = (left.double() - right.double()).abs().max().item() / max(left.abs().max().item(), 1e-30)
        if not gap <= TOLERANCE:
            return False
        self.largest = max(self.largest, gap)
        return True


@contextlib.contextmanager
def _noted(out: io.StringIO, err: io.StringIO) -> Iterator[list[str]]:
    """The lines that a call prints, to standard output and error, and logs."""
    noted: list[str] = []
    records = _Records()
    logging.getLogger().addHandler(records)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            yield noted
    finally:
        logging.getLogger().removeHandler(records)
        noted += [_taken(out), _taken(err), *records.lines]


def _taken(stream: io.StringIO) -> str:
    text = stream.getvalue()
    stream.seek(0)
    stream.truncate()
    return text


def try_loop(loop: Loop, *, eager_only: bool = False) -> Outcome:
    """Run a loop on both sides, comparing after every call; if it is refused, its edit too."""
    outcome = _try_once(loop, eager_only)
    if outcome.verdict == "refused" and loop.edit is not None:
        edited = _try_once(loop.edited(), eager_only)
        note = edited.verdict if edited.runs else f"{edited.verdict} ({edited.detail})"
        outcome = dataclasses.replace(outcome, edit=loop.edit.words, edited=note)
    return outcome


def _try_once(loop: Loop, eager_only: bool) -> Outcome:
    sides = Sides(loop, eager_only)
    verdict, detail, line = "bitwise", "", ""
    try:
        for number in range(loop.calls):
            sides.step(*loop.batch(number))
    except CaptureError as error:
        verdict, detail, line = "refused", _sentence(error), _line_of(error)
    except Wrong as error:
        verdict, detail = "wrong", str(error)
    except Exception as error:
        where = "compiled" if sides.side else "eager"
        verdict, detail = "failed", f"in {where}: {type(error).__name__}: {error}"
        if os.environ.get("LOOPS_TRACEBACK"):
            traceback.print_exc()
    if verdict == "bitwise" and sides.largest:
        verdict, detail = "close", f"{sides.largest:.0e}"
    if not eager_only and os.environ.get("LOOPS_TRACEBACK"):
        print("\n".join(sides.compiled.recompile_reasons))
    captures, in_eager = (0, 0) if eager_only else (sides.num_captures, sides.compiled.num_eager_calls)
    return Outcome(verdict, captures, in_eager, loop.calls, detail, line)


def _sentence(error: CaptureError) -> str:
    text = error.message if error.advice is None else f"{error.message}. {error.advice}"
    folder = f"{Path.cwd()}{os.sep}"
    text = re.sub(r"\S*/site-packages/", "", " ".join(text.replace(folder, "").split()))
    return re.sub(r"(\w\.py):\d+", r"\1", re.sub(r" at 0x[0-9a-f]+", "", text))


def _line_of(error: CaptureError) -> str:
    """The line that a refusal names, as text: numbers of lines would change with every edit of a file."""
    path, _, number = (error.location or "").rpartition(":")
    text = linecache.getline(path, int(number)).strip() if number.isdigit() else ""
    return f"{Path(path).name}: {text}" if text else ""


def _show_own(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
    """Warnings that the script itself gives; torch's kernels name its lines, too, but warn once in a process."""
    if Path(__file__).parent in Path(filename).parents and "warn" in linecache.getline(filename, lineno):
        print(f"{category.__name__}: {message}", file=sys.stderr)


def _child(loop: Loop, eager_only: bool, pipe: Any) -> None:
    torch.set_num_threads(1)
    logging.getLogger("wholestep").setLevel(logging.ERROR)
    warnings.simplefilter("always")
    warnings.showwarning = _show_own
    # One's own output is for the comparison alone; a crash still shows in the real standard error.
    sys.stdout = sys.stdout if os.environ.get("LOOPS_TRACEBACK") else io.StringIO()
    try:
        pipe.send(try_loop(loop, eager_only=eager_only))
    except BaseException:
        pipe.send(Outcome("failed", detail=traceback.format_exc(limit=-3)))


def try_in_child(loop: Loop, *, eager_only: bool = False, limit_s: float = TIME_LIMIT_S) -> Outcome:
    """`try_loop` in a process of its own, which is ended when its time is up."""
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(loop, eager_only, sending))
    process.start()
    sending.close()
    try:
        outcome = receiving.recv() if receiving.poll(limit_s) else Outcome("late", detail=f"more than {limit_s} s")
    except EOFError:
        outcome = Outcome("failed", detail="the process died")
    process.kill()
    process.join()
    return outcome
