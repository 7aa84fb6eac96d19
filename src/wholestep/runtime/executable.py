"""A graph ready to run: where its inputs come from, where its results go, and the code in between."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Generator, Mapping
from typing import Any

import torch
from torch import fx

from wholestep import _torch, _waiting_torch
from wholestep.capture.binding import Binding
from wholestep.graph import SlotKind, StepGraph
from wholestep.lower import leave_regions, prepare_regions
from wholestep.runtime.codegen import Step, best_binding, finish_journal, generate, run_checked
from wholestep.runtime.cuda_graph import RecordedStep, copied_inputs, take_rates_from_device, written_inputs
from wholestep.runtime.held import require_applied
from wholestep.runtime.journal import Journal, Places
from wholestep.runtime.stopwatch import Stopwatch


class Executable:
    """A compiled step graph over the slots of a capture.

    `run` reads the slots, executes the graph and puts everything it computed where eager would have: updates in their
    tensors, gradients on their parameters, new state in the optimizer. Values for the next call it returns. With
    `is_recorded` the graph runs as a CUDA graph; it must be one that can (`why_not_recorded`).

    A graph that applies the call before does so by a journal (`begin`): `held` are the slots of the tensors that are
    updated then. `finish` brings to an end what a run has left undone, wherever that was left.
    """

    def __init__(
        self,
        graph: StepGraph,
        bindings: Mapping[str, Binding],
        label: str = "step",
        *,
        is_recorded: bool = False,
        held: Collection[str] = (),
        applies: bool = False,
        is_flush: bool = False,
        compiles: bool = True,
    ) -> None:
        self.graph = graph
        self._label = f"wholestep::{label}"
        self._is_flush = is_flush
        self._places = Places.of(graph, held, is_flush=is_flush) if applies else None
        given: Collection[str] = () if self._places is None else self._places.given
        slots = graph.placeholders()
        self._given = [slot_id for slot_id, node in slots.items() if node.name in given]
        self._inputs = [bindings[slot_id] for slot_id, node in slots.items() if node.name not in given]
        self._updates = [bindings[slot_id] for slot_id in graph.updates]
        self._results = [
            (slot_id, None if slot_id.startswith(f"{SlotKind.CARRY}.") else bindings[slot_id])
            for slot_id in graph.results
        ]
        self._repeated = _repeated(graph)
        self._step: Step | None = None
        self._corrections: Mapping[str, tuple[int, ...]] = {}
        self._timed: tuple[Step, Stopwatch] | None = None
        (prepare_regions if compiles else leave_regions)(graph)
        self._is_recorded = is_recorded
        self._numbers = take_rates_from_device(graph) if is_recorded else {}
        if is_flush:
            # It may have to run where nothing can be traced: inside of an operator that looks at a waiting tensor.
            for node in graph.calls():
                best_binding(graph, node)

    def begin(self, values: Mapping[str, Any]) -> Journal:
        """A journal for one run; `values` has what was carried over and the tensors to update, by slot id."""
        assert self._places is not None
        return Journal(self._places, [values[slot_id] for slot_id in self._given])

    def run(self, leaves: list[Any], journal: Journal | None = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Execute once; returns the graph's outputs and what it leaves for the next call, by slot id."""
        with _waiting_torch.past_traps():
            inputs = [binding.read(leaves) for binding in self._inputs]
        require_applied(inputs)
        for index, number in self._numbers.items():
            inputs[index] = number.holding(inputs[index])
        was_grad_enabled = torch.is_grad_enabled()
        try:
            _torch.set_grad_enabled(False)
            with _without_autocast(), self._named_range():
                outputs, updates, results = self._execute(inputs, journal)
                for binding, value in zip(self._updates, updates, strict=True):
                    binding.read(leaves).copy_(value)
        finally:
            _torch.set_grad_enabled(was_grad_enabled)
        carried: dict[str, Any] = {}
        with _waiting_torch.past_traps():
            for index, ((slot_id, binding), value) in enumerate(zip(self._results, results, strict=True)):
                if binding is None:
                    carried[slot_id] = value
                else:
                    own = value.clone() if index in self._repeated else value
                    binding.write(own, leaves)  # pyright: ignore[reportAttributeAccessIssue]
        return outputs, carried

    def finish(self, journal: Journal) -> None:
        """Bring to an end what a run with this journal has left undone of the call before."""
        assert self._places is not None
        if self._is_flush:
            self.run([], journal)
            return
        if journal.is_done:
            return
        was_grad_enabled = torch.is_grad_enabled()
        try:
            _torch.set_grad_enabled(False)
            with _without_autocast(), self._named_range():
                finish_journal(self.graph, self._places, journal)
        finally:
            _torch.set_grad_enabled(was_grad_enabled)

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
            self._timed = generate(self.graph, self._corrections, stopwatch.marks, self._places), stopwatch
        code, stopwatch = self._timed

        def run(*args: Any) -> Any:
            stopwatch.start()
            return code(*args)

        self._step = run
        try:
            yield stopwatch
        finally:
            self._step = plain

    def _execute(self, inputs: list[Any], journal: Journal | None) -> Any:
        """Run the graph; the first time op by op, checking what the generated code will rely on."""
        if self._step is not None:
            return self._step(inputs) if journal is None else self._step(inputs, journal)
        is_whole = journal is None or all(value is None for value in journal.done)
        returned, self._corrections = run_checked(self.graph, inputs, places=self._places, journal=journal)
        if not is_whole:  # part of it was run, and looked at, by somebody else
            return returned
        step = generate(self.graph, self._corrections, places=self._places)
        if self._is_recorded:
            step = RecordedStep(step, copied_inputs(self.graph), written_inputs(self.graph))
        self._step = step
        return returned

    def _named_range(self) -> contextlib.AbstractContextManager[Any]:
        return torch.profiler.record_function(self._label) if _torch.is_profiling() else contextlib.nullcontext()


def _repeated(graph: StepGraph) -> frozenset[int]:
    """Results that are the same value as one before them: equal gradients of two parameters are two tensors."""
    seen: set[fx.Node] = set()
    repeated: set[int] = set()
    values: list[Any] = list(graph.results.values())
    for index, value in enumerate(values):
        if isinstance(value, fx.Node) and isinstance(value.meta["val"], torch.Tensor):
            if value in seen:
                repeated.add(index)
            seen.add(value)
    return frozenset(repeated)


def _without_autocast() -> contextlib.AbstractContextManager[Any]:
    """Casts are ops of the graph; autocast around the call must not add its own."""
    active = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
    if not active:
        return contextlib.nullcontext()
    stack = contextlib.ExitStack()
    for device in active:
        stack.enter_context(torch.autocast(device, enabled=False))
    return stack
