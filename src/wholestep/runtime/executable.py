"""A graph ready to run: where its inputs come from, where its results go, and the code in between."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping
from typing import Any

import torch
from torch import fx

from wholestep import _torch
from wholestep.capture.binding import Binding
from wholestep.graph import StepGraph
from wholestep.iteration.moves import SHARED
from wholestep.lower import prepare_regions
from wholestep.runtime.codegen import Step, generate, run_checked
from wholestep.runtime.cuda_graph import RecordedStep, copied_inputs, take_rates_from_device, written_inputs
from wholestep.runtime.stopwatch import Stopwatch


class Executable:
    """A compiled step graph over the slots of a capture.

    `run` reads the slots, executes the graph and puts everything it computed where eager would have: updates in their
    tensors, gradients on their parameters, new state in the optimizer. `on_applied` is told the number of each block of
    the call before as soon as its last op has run. With `is_recorded` the graph runs as a CUDA graph; it must be one
    that can (`why_not_recorded`).
    """

    def __init__(
        self,
        graph: StepGraph,
        bindings: Mapping[str, Binding],
        label: str = "step",
        on_applied: Callable[[int], None] | None = None,
        *,
        is_recorded: bool = False,
    ) -> None:
        self.graph = graph
        self._label = f"wholestep::{label}"
        self._inputs = [bindings[slot_id] for slot_id in graph.placeholders()]
        self._updates = [bindings[slot_id] for slot_id in graph.updates]
        self._results = [bindings[slot_id] for slot_id in graph.results]
        self._repeated = _repeated(graph)
        self._step: Step | None = None
        self._corrections: Mapping[str, tuple[int, ...]] = {}
        self._timed: tuple[Step, Stopwatch] | None = None
        prepare_regions(graph)
        self._is_recorded = is_recorded
        self._numbers = take_rates_from_device(graph) if is_recorded else {}
        # Updates that are not made in place are written behind the run, all at once.
        self._after = {} if on_applied is None or graph.updates else _last_ops(graph, on_applied)

    def run(self, leaves: list[Any]) -> tuple[Any, ...]:
        """Execute once and return the graph's outputs."""
        inputs = [binding.read(leaves) for binding in self._inputs]
        for index, number in self._numbers.items():
            inputs[index] = number.holding(inputs[index])
        with torch.no_grad(), _without_autocast(), self._named_range():
            outputs, updates, results = self._execute(inputs)
            for binding, value in zip(self._updates, updates, strict=True):
                binding.read(leaves).copy_(value)
        for index, (binding, value) in enumerate(zip(self._results, results, strict=True)):
            own = value.clone() if index in self._repeated else value
            binding.write(own, leaves)  # pyright: ignore[reportAttributeAccessIssue]
        return outputs

    @property
    def is_ready(self) -> bool:
        """Whether it has run before."""
        return self._step is not None

    @contextlib.contextmanager
    def timed(self, *, is_cuda: bool) -> Generator[Stopwatch | None]:
        """In this block, run code that notes how long its parts take; None if the graph is recorded, as a whole then.

        It must have run before.
        """
        plain = self._step
        assert plain is not None
        if self._is_recorded:
            yield None
            return
        if self._timed is None:
            stopwatch = Stopwatch(self.graph, is_cuda=is_cuda)
            self._timed = generate(self.graph, self._corrections, _joined(self._after, stopwatch.marks)), stopwatch
        code, stopwatch = self._timed

        def run(inputs: list[Any]) -> Any:
            stopwatch.start()
            return code(inputs)

        self._step = run
        try:
            yield stopwatch
        finally:
            self._step = plain

    def _execute(self, inputs: list[Any]) -> Any:
        """Run the graph; the first time op by op, checking what the generated code will rely on."""
        if self._step is not None:
            return self._step(inputs)
        returned, self._corrections = run_checked(self.graph, inputs, self._after)
        self._step = generate(self.graph, self._corrections, self._after)
        if self._is_recorded:
            self._step = RecordedStep(self._step, copied_inputs(self.graph), written_inputs(self.graph))
        return returned

    def _named_range(self) -> contextlib.AbstractContextManager[Any]:
        return torch.profiler.record_function(self._label) if _torch.is_profiling() else contextlib.nullcontext()


def _repeated(graph: StepGraph) -> frozenset[int]:
    """Results that are the same value as one before them: equal gradients of two parameters are two tensors."""
    values: list[Any] = list(graph.results.values())
    return frozenset(
        index for index, value in enumerate(values) if isinstance(value, fx.Node) and value in values[:index]
    )


def _last_ops(graph: StepGraph, on_applied: Callable[[int], None]) -> dict[str, Callable[[], None]]:
    """By name of the last op of each block of the call before: what to call behind it."""
    last: dict[int, str] = {}
    for node in graph.calls():
        if node.meta.get("applies", SHARED) != SHARED:
            last[node.meta["applies"]] = node.name
    # Two blocks never end with the same op.
    return {name: _Report(on_applied, block) for block, name in last.items()}


class _Report:
    """A call without arguments, equal to nothing but itself, so that generated code can hold it as a global."""

    def __init__(self, function: Callable[[int], None], block: int) -> None:
        self._function = function
        self._block = block

    def __call__(self) -> None:
        self._function(self._block)


def _joined(
    first: Mapping[str, Callable[[], None]], second: Mapping[str, Callable[[], None]]
) -> dict[str, Callable[[], None]]:
    """What to call behind ops, of two such tables."""
    shared = {name: _InTurn(first[name], second[name]) for name in first.keys() & second.keys()}
    return {**first, **second, **shared}


class _InTurn:
    """Two calls as one, equal to nothing but itself."""

    def __init__(self, first: Callable[[], None], second: Callable[[], None]) -> None:
        self._first = first
        self._second = second

    def __call__(self) -> None:
        self._first()
        self._second()


def _without_autocast() -> contextlib.AbstractContextManager[Any]:
    """Casts are ops of the graph; autocast around the call must not add its own."""
    active = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
    if not active:
        return contextlib.nullcontext()
    stack = contextlib.ExitStack()
    for device in active:
        stack.enter_context(torch.autocast(device, enabled=False))
    return stack
