"""What steps really take, noted while they run: only of calls that ask for it, at no cost to the others."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from wholestep import _waiting_torch
from wholestep.cost import measure_peak
from wholestep.cost.measure import tensors_of
from wholestep.cost.memory import tensors_in
from wholestep.graph import StepGraph
from wholestep.lower import Region
from wholestep.runtime import held
from wholestep.runtime.rotation import Rotation


@dataclass(frozen=True)
class MeasuredStep:
    """One step: microseconds from call to return, and its parts in order, as names and microseconds.

    Names are those of phases, or `stopwatch.WAITING`. There are no parts if the graph runs as a CUDA graph.
    """

    step_us: float
    parts: tuple[tuple[str, float], ...] = ()

    @property
    def totals(self) -> dict[str, float]:
        """Microseconds by part."""
        found: dict[str, float] = {}
        for name, length_us in self.parts:
            found[name] = found.get(name, 0.0) + length_us
        return found


@dataclass(frozen=True)
class Measured:
    """The steps of one graph that were measured, and the highest peak of memory; None if that was not."""

    steps: tuple[MeasuredStep, ...] = ()
    peak_bytes: int | None = None

    @property
    def is_empty(self) -> bool:
        return not self.steps and self.peak_bytes is None

    @property
    def typical(self) -> MeasuredStep | None:
        """The step in the middle, of those that were timed."""
        middle = statistics.median_low([step.step_us for step in self.steps]) if self.steps else None
        return next((step for step in self.steps if step.step_us == middle), None)


def run_measured(step: Callable[[], Any], rotation: Rotation, owners: Any, known: Measured) -> tuple[Any, Measured]:
    """Run a step and return its result, and what is known now.

    The first run of a graph is not measured, nor is one that begins or ends a loop: they are not what the loop takes.
    The peak of memory is measured once, and that step is not timed, as watching every op takes its time. `owners` is
    what holds the memory that is there before.
    """
    executable = rotation.in_loop
    if executable is None:
        return step(), known
    if known.peak_bytes is None and _peak_is_seen(rotation.graph):
        found = measure_peak(step, held=[owners, rotation.pending.carries], find=_tensors_behind)
        return found.result, replace(known, peak_bytes=found.peak_bytes) if rotation.in_loop else known
    is_cuda = _is_on_cuda(rotation.graph)
    with executable.timed(is_cuda=is_cuda) as stopwatch:
        _synchronize(is_cuda)
        started = time.perf_counter()
        result = step()
        _synchronize(is_cuda)
        step_us = (time.perf_counter() - started) * 1e6
    if rotation.in_loop is None:
        return result, known
    taken = MeasuredStep(step_us, () if stopwatch is None else stopwatch.parts())
    return result, replace(known, steps=(*known.steps, taken))


def _tensors_behind(owners: Any) -> Iterable[torch.Tensor]:
    """Tensors that have memory: to look at that is not to look at values, and applies nothing."""
    with _waiting_torch.past_traps():
        found = [held.behind(tensor) for tensor in tensors_of(owners)]
    return [tensor for tensor in found if tensor is not None]


def _peak_is_seen(graph: StepGraph) -> bool:
    """On the CPU, what compiled regions allocate is seen by nobody."""
    return _is_on_cuda(graph) or not any(isinstance(node.target, Region) for node in graph.calls())


def _is_on_cuda(graph: StepGraph) -> bool:
    values = (node.meta.get("val") for node in graph.placeholders().values())
    return any(tensor.is_cuda for value in values for tensor in tensors_in(value))


def _synchronize(is_cuda: bool) -> None:
    if is_cuda:
        torch.cuda.synchronize()
