"""Programs of a stage on real tensors: inputs looked up by name, results stored by name, gradients added up."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from wholestep.capture.binding import Binding
from wholestep.graph import SlotKind
from wholestep.lower import prepare_regions
from wholestep.pipe.cut import Program, Stage
from wholestep.pipe.schedule import Kind
from wholestep.runtime.codegen import Step, generate, run_checked
from wholestep.runtime.pipeline.draws import insert_seeds, seeded

_PARAM = f"{SlotKind.PARAM}."
_AS_IT_IS = contextlib.nullcontext()


class CompiledProgram:
    """A program as a function of slots and values. Its first run is op by op, and checks what the code will rely on."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._step: Step | None = None
        self._graph = program.graph.copy()  # the stage's own stays as it was cut
        prepare_regions(self._graph)
        insert_seeds(self._graph)

    def __call__(self, inputs: list[Any]) -> tuple[Any, ...]:
        if self._step is not None:
            return self._step(inputs)[0]
        returned, corrections = run_checked(self._graph, inputs)
        self._step = generate(self._graph, corrections)
        return returned[0]


@dataclass
class StageRunner:
    """One stage with its parameters, its buffers as of now and the sum of its gradients so far.

    Buffers that a forward changes are exchanged, not written to: a backward may still want an old one. `finish` writes
    the last ones to the model. `small` is the same stage for micro-batches with a row less, if there are such, with
    bindings of its own.
    """

    stage: Stage
    bindings: Mapping[str, Binding]
    small: tuple[Stage, Mapping[str, Binding]] | None = None
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._compiled = _compiled(self.stage)
        self._compiled_small = {} if self.small is None else _compiled(self.small[0])
        self._buffers: dict[str, torch.Tensor] = {}

    def run(
        self,
        kind: Kind,
        leaves: list[Any],
        values: MutableMapping[str, torch.Tensor],
        seed: int = 0,
        dropped: Iterable[str] = (),
        *,
        is_small: bool = False,
    ) -> dict[str, Any]:
        """Run a program for one micro-batch, whose arguments `leaves` are; returns the values it makes, by name.

        What it draws depends on `seed` alone. It takes those values that are `dropped` along: each is gone after its
        last use, not only when all of the program is done.
        """
        compiled = (self._compiled_small if is_small else self._compiled)[kind]
        program = compiled.program
        bindings = self.small[1] if is_small and self.small is not None else self.bindings
        buffers = self._buffers
        inputs = [buffers[slot] if slot in buffers else bindings[slot].read(leaves) for slot in program.slots]
        inputs += [values[name] for name in program.values]
        for name in dropped:
            del values[name]
        if not program.outputs:
            return {}
        made = dict(zip(program.outputs, _computed(compiled, inputs, seed), strict=True))
        if kind is Kind.FORWARD:
            self._buffers |= {slot: made[name] for slot, name in self.stage.updates.items()}
        else:
            self._add_gradients(made)
        return made

    def _add_gradients(self, made: Mapping[str, Any]) -> None:
        for slot, name in self.stage.gradients.items():
            if name not in made:
                continue
            if slot in self.gradients:
                self.gradients[slot] += made[name]
            else:  # a copy: a value may be the gradient of two parameters, or be read by somebody else
                self.gradients[slot] = torch.clone(made[name], memory_format=torch.contiguous_format)

    def finish(self) -> None:
        """Write buffers to the model."""
        with torch.no_grad():
            for slot, value in self._buffers.items():
                self.bindings[slot].read([]).copy_(value)
        self._buffers.clear()


def _computed(compiled: CompiledProgram, inputs: list[Any], seed: int) -> tuple[Any, ...]:
    """What a program returns. Contexts take longer than a small op, so those that change nothing are left out."""
    without_history = torch.no_grad() if torch.is_grad_enabled() else _AS_IT_IS
    with without_history, seeded(seed) if compiled.program.draws else _AS_IT_IS:
        return compiled(inputs)


def _compiled(stage: Stage) -> dict[Kind, CompiledProgram]:
    kinds = (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT)
    return {kind: CompiledProgram(stage.program(kind)) for kind in kinds}


def summed_gradients(shares: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Gradients of parameters, added up over the stages that have a share, the last stage's first as in eager."""
    total: dict[str, torch.Tensor] = {}
    for gradients in reversed(shares):
        for slot, value in gradients.items():
            total[slot] = total[slot] + value if slot in total else value
    return {slot.removeprefix(_PARAM): value for slot, value in total.items()}
