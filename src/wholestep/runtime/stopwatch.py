"""How long the parts of a graph take: moments noted behind the ops at which one part ends and the next begins.

On the CPU a moment is a time on the wall, on CUDA an event in the stream. There, waiting for a collective is a part of
its own, too: it is the stream that waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import fx

from wholestep.graph import StepGraph, ops

WAITING = "waiting"


def part_of(node: fx.Node) -> str:
    """The part of a step that a call belongs to: its phase, or `WAITING` where it waits for a collective."""
    return WAITING if node.target is ops.WAIT else str(node.meta["phase"])


class Stopwatch:
    """Times the parts of a graph in runs of code that calls `marks`, by the name of an op, behind that op."""

    def __init__(self, graph: StepGraph, *, is_cuda: bool) -> None:
        self._now: Callable[[], Any] = _event if is_cuda else time.perf_counter
        self._us_between: Callable[[Any, Any], float] = _event_us if is_cuda else _wall_us
        self._parts: list[str] = []
        self._moments: list[Any] = []
        self.marks: dict[str, Callable[[], None]] = {}
        for part, calls in groupby(graph.calls(), part_of):
            self._parts.append(part)
            self.marks[list(calls)[-1].name] = self._note

    def start(self) -> None:
        """Forget what was; the first part begins now."""
        self._moments.clear()
        self._note()

    def parts(self) -> tuple[tuple[str, float], ...]:
        """Names and microseconds of the parts, in the order in which they ran; none if no code with marks has run.

        On CUDA everything must have been waited for.
        """
        if len(self._moments) != len(self._parts) + 1:
            return ()
        lengths = (self._us_between(start, end) for start, end in pairwise(self._moments))
        return tuple(zip(self._parts, lengths, strict=True))

    def _note(self) -> None:
        self._moments.append(self._now())


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _event_us(start: torch.cuda.Event, end: torch.cuda.Event) -> float:
    return start.elapsed_time(end) * 1e3


def _wall_us(start: float, end: float) -> float:
    return (end - start) * 1e6
