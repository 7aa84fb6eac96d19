"""A captured step, rewritten and compiled: the thing a call runs once its guards hold."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from wholestep import _torch
from wholestep.capture import Capture
from wholestep.graph import StepGraph
from wholestep.runtime.codegen import Step, generate, run_checked
from wholestep.runtime.guards import Call, Check, make_guards, tensor_type


class Specialization:
    """One graph of a step, for one kind of call.

    `check` says why a call does not fit; `run` reads the slots, executes the graph and puts everything it computed
    where eager would have: updates in their tensors, gradients on their parameters, new state in the optimizer.
    """

    def __init__(self, capture: Capture, graph: StepGraph, call: Call) -> None:
        self.capture = capture
        self.graph = graph
        self.num_runs = 0
        self.leaf_types = {i: tensor_type(leaf) for i, leaf in enumerate(call.leaves) if isinstance(leaf, torch.Tensor)}
        self._install_initial_state()
        self._guards: list[Check] = make_guards(capture, call)
        self._step: Step | None = None
        self._inputs = [capture.bindings[slot.id] for slot in self._slots_in_order()]
        self._updates = [capture.bindings[slot_id] for slot_id in graph.updates]
        self._results = [capture.bindings[slot_id] for slot_id in graph.results]

    def check(self, call: Call) -> str | None:
        """None if the call fits, otherwise the first thing that differs."""
        for guard in self._guards:
            reason = guard(call)
            if reason is not None:
                return reason
        return None

    def run(self, call: Call) -> Any:
        """Execute one step."""
        leaves = call.leaves
        for parameter in self.capture.any_incoming_grad:
            parameter.grad = None
        inputs = [binding.read(leaves) for binding in self._inputs]
        with torch.no_grad(), _without_autocast():
            outputs, updates, results = self._execute(inputs)
            for binding, value in zip(self._updates, updates, strict=True):
                binding.read(leaves).copy_(value)
        for binding, value in zip(self._results, results, strict=True):
            binding.write(value, leaves)  # pyright: ignore[reportAttributeAccessIssue]
        for optimizer in self.capture.stepped:
            _torch.mark_stepped(optimizer)
        self.num_runs += 1
        return self.capture.outputs.fill(outputs, leaves)

    def _execute(self, inputs: list[Any]) -> Any:
        """Run the graph; the first time op by op, checking what the generated code will rely on."""
        if self._step is not None:
            return self._step(inputs)
        returned, corrections = run_checked(self.graph, inputs)
        self._step = generate(self.graph, corrections)
        return returned

    def _slots_in_order(self) -> list[Any]:
        return [self.graph.slots[node.name] for node in self.graph.nodes if node.op == "placeholder"]

    def _install_initial_state(self) -> None:
        for optimizer, parameter, entries in self.capture.initial_state:
            optimizer.state[parameter] = entries

    def remove_initial_state(self) -> None:
        """Undo what preparing the first run did to the optimizers."""
        for optimizer, parameter, _ in self.capture.initial_state:
            optimizer.state.pop(parameter, None)


def _without_autocast() -> contextlib.AbstractContextManager[Any]:
    """Casts are ops of the graph; autocast around the call must not add its own."""
    active = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
    if not active:
        return contextlib.nullcontext()
    stack = contextlib.ExitStack()
    for device in active:
        stack.enter_context(torch.autocast(device, enabled=False))
    return stack
