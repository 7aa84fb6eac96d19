"""A captured step, rewritten and compiled: the thing a call runs once its guards hold."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from wholestep import _recording_torch, _torch, _waiting_torch
from wholestep.capture import Capture
from wholestep.capture.record import Broken, Difference, Filling, OtherOutcome, Outcome, ReadGuard, Watch
from wholestep.compiler import Plan
from wholestep.errors import CaptureError
from wholestep.graph import StepGraph
from wholestep.remat import Survey
from wholestep.runtime.guards import Call, Check, drawn_memory_guard, make_guards
from wholestep.runtime.measured import Measured
from wholestep.runtime.owner_guards import found_type, tensor_type
from wholestep.runtime.questions import question_guards
from wholestep.runtime.roll_call import Part
from wholestep.runtime.rotation import Rotation


class Specialization:
    """One graph of a step, for one kind of call.

    `check` says why a call does not fit; `run` executes one step. `plan` is all that was decided about it, `survey`
    knows what its memory plan was chosen from, `measured` is what was measured of its runs, `part` what all ranks have
    to do alike in each, None on one rank.
    """

    def __init__(
        self,
        capture: Capture,
        rotation: Rotation,
        call: Call,
        plan: Plan,
        survey: Survey | None = None,
        part: Part | None = None,
    ) -> None:
        self.capture = capture
        self.rotation = rotation
        self.plan = plan
        self.survey = survey
        self.part = part
        self.measured = Measured()
        self.num_runs = 0
        self.num_left = 0
        """How many calls have found that another graph is theirs."""
        self.outcomes_seen: set[Outcome] = set()
        """Where draws have led that are none of this graph."""
        self.leaf_types = {i: tensor_type(leaf) for i, leaf in enumerate(call.leaves) if isinstance(leaf, torch.Tensor)}
        self._is_apart = False
        """Whether the state that was made beforehand was taken out again, as the first run has raised."""
        self._install_initial_state()
        self._watch = Watch()
        self._guards: list[Check] = make_guards(capture, call, self._watch, rotation.pending.settle_if_replaced)
        self._questions = question_guards(capture)
        self._drawn_memory = drawn_memory_guard(capture)
        self._reads = ReadGuard(list(capture.recording.roots), found_type, self._watch)

    @property
    def graph(self) -> StepGraph:
        return self.rotation.graph

    def check(self, call: Call) -> Difference | None:
        """None if the call fits, otherwise the first thing that differs.

        The numbers of the call are computed then, and whatever the step draws from Python has been drawn.
        """
        if not self._is_apart:
            return self._checked(call)
        self._install_initial_state()
        difference = self._checked(call)
        self._is_apart = difference is not None
        if self._is_apart:
            self.remove_initial_state()
        return difference

    def _checked(self, call: Call) -> Difference | None:
        difference = self.check_without_values(call)
        if difference is not None:
            return difference
        with _waiting_torch.past_traps():
            for question in self._questions:
                difference = question(call)
                if difference is not None:
                    return Difference(str(difference))
        return self.compute_numbers(call)

    def check_without_values(self, call: Call) -> Difference | None:
        """The same, but for what the step looks at in tensors, and the numbers."""
        self.capture.recording.current.call = call
        with _waiting_torch.past_traps():  # to look at a tensor's type is not to look at its value
            self._watch.begin()
            for guard in self._guards:
                difference = guard(call)
                if difference is not None:
                    return self._with_all_numbers(difference, call)
            difference = self._reads.check(call)
            if difference is None:
                self._watch.passed()
            return difference

    def _with_all_numbers(self, found: str | Difference, call: Call) -> Difference:
        """What differs first, with the numbers that have changed besides: else they were a capture of their own."""
        first = found if isinstance(found, Difference) else Difference(found)
        if call.spec == self.capture.spec:
            first.numbers += self._reads.changed_numbers(call)
        return first

    def begin(self, call: Call) -> Difference | None:
        """What `check` does besides checking, for the call that the step was captured with."""
        self._reads.call_cached_functions()
        self.capture.recording.current.call = call
        return self.compute_numbers(call)

    def compute_numbers(self, call: Call) -> Difference | None:
        recording = self.capture.recording
        if recording.program.is_empty:
            return None
        try:
            numbers = recording.program.run(call)
        except Broken as broken:
            return Difference(
                f"a number that the step reads or draws leads elsewhere{f' ({broken})' if str(broken) else ''}",
                outcome=broken.outcome,
            )
        recording.numbers.clear()
        recording.numbers.update(numbers)
        if (shared := self._drawn_memory(call)) is not None:
            recording.program.undo_draws()
            return Difference(shared)
        return None

    def run(self, call: Call, *, is_last: bool = False, number: int = 0, is_quiet: bool = False) -> Any:
        """Execute one step, the `number`th; raises `CaptureError` if there is nothing to run it on.

        Raises `OtherOutcome`, with everything as before the call, if a value that the graph computes leads elsewhere.

        If it `is_quiet`, what the step prints and logs is left out.
        """
        if self.capture.is_blank:
            raise CaptureError(
                "the model, the optimizer or the batch was made inside no_weights(): such a step is for planning",
                advice="Make them outside of it to run the step",
            )
        put_back = self._kept() if self.may_be_left else []
        try:
            outputs = self._run_graph(call, is_last=is_last, number=number)
        except OtherOutcome:
            for put in put_back:
                put()
            self._leave()
            raise
        except BaseException:
            if self.num_runs == 0 and self._versions_of_state() == self._fresh:  # eager had made none by then
                self.remove_initial_state()
                self._is_apart = True
            raise
        for optimizer in self.capture.stepped:
            _torch.mark_stepped(optimizer)
        self.num_runs += 1
        recording = self.capture.recording
        numbers = recording.late.run(outputs, recording.numbers)
        filling = Filling(_distinct(outputs), call.leaves, numbers, call)
        result = self.capture.outputs.fill(filling)
        for optimizer, parameter in self.capture.empty_states:
            optimizer.state[parameter]  # a defaultdict: to ask is to make
        for where, template in self.capture.state:
            where.write(template.fill(filling), call.leaves)
        with _waiting_torch.past_traps():
            for where, requires_grad in self.capture.flags_left:
                where.read(call.leaves).requires_grad_(requires_grad)
        if recording.effects:
            recording.effects.perform(filling, is_quiet=is_quiet)
        recording.current.call = None
        return result

    @property
    def may_be_left(self) -> bool:
        """Whether the graph looks at values which may turn out to be none of its own."""
        return bool(self.capture.recording.requirements)

    def _kept(self) -> list[Callable[[], Any]]:
        """What puts back all that a graph changes before it looks at values: random numbers, gradients it clears."""
        with _waiting_torch.past_traps():
            gradients = [(parameter, parameter.grad) for parameter in self.capture.cleared_late]
        return [
            *[functools.partial(one.set_state, one.get_state()) for one in _recording_torch.generators()],
            *[functools.partial(setattr, parameter, "grad", gradient) for parameter, gradient in gradients],
        ]

    def undo_draws(self) -> None:
        """Put the generators of Python and NumPy back to where they were before the last check."""
        self.capture.recording.program.undo_draws()

    def _leave(self) -> None:
        """The graph is not that of this call: nothing has been written, and nothing is left drawn or prepared."""
        self.undo_draws()
        self.capture.recording.current.call = None
        if self.num_runs == 0:
            self.remove_initial_state()

    def _run_graph(self, call: Call, *, is_last: bool, number: int) -> tuple[Any, ...]:
        with self.rotation.pending.turn:
            with _waiting_torch.past_traps():
                for parameter in self.capture.any_incoming_grad:
                    parameter.grad = None
            return self.rotation.run(call.leaves, is_last=is_last, number=number)

    def _install_initial_state(self) -> None:
        for optimizer, parameter, entries in self.capture.initial_state:
            optimizer.state[parameter] = entries
        self._fresh = self._versions_of_state()

    def _versions_of_state(self) -> list[int]:
        """How often each tensor of the state that was made beforehand has been written to."""
        made = [value for _, _, entries in self.capture.initial_state for value in entries.values()]
        return [value._version for value in made if isinstance(value, torch.Tensor)]

    def remove_initial_state(self) -> None:
        """Undo what preparing the first run did to the optimizers."""
        for optimizer, parameter, _ in self.capture.initial_state:
            optimizer.state.pop(parameter, None)


def _distinct(outputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Two values of the step that are one of the graph's (`loss` and `loss.detach()`) are two tensors in one memory."""
    if len(outputs) < 2 or len(set(map(id, outputs))) == len(outputs):
        return outputs
    seen: set[int] = set()
    result: list[Any] = []
    for output in outputs:
        is_again = isinstance(output, torch.Tensor) and id(output) in seen
        result.append(output.detach() if is_again else output)
        seen.add(id(output))
    return tuple(result)
