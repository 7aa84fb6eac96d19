"""Steps of one micro-batch to cut, and a plain way to run what they are cut into."""

from __future__ import annotations

import copy
import functools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tests.pipelines import without_dropout
from torch import Tensor, nn

from wholestep import zoo
from wholestep.capture import Capture, capture, tree
from wholestep.graph import StepGraph
from wholestep.passes import Pipeline, run_passes
from wholestep.pipe import Kind, Schedule
from wholestep.pipe.cut import CutGraph, Program
from wholestep.pipe.validate import checked_order

Loss = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True)
class MicroStep:
    """A model, the captured step of one micro-batch of it, and that step's graph after the usual passes."""

    model: nn.Module
    loss: Loss
    captured: Capture
    graph: StepGraph
    batches: tuple[Any, ...]
    scale: Tensor

    def leaves(self) -> list[list[Any]]:
        """The arguments of each micro-batch, flattened."""
        return [tree.flatten(((self.model, batch, self.scale), {}))[0] for batch in self.batches]

    def eager(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Gradients and buffers after all micro-batches in one process, on a copy of the model."""
        twin = copy.deepcopy(self.model)
        for batch in self.batches:
            (self.loss(twin, batch) * self.scale).backward()
        return {n: p.grad for n, p in twin.named_parameters() if p.grad is not None}, dict(twin.named_buffers())


def micro_step(model: nn.Module, loss: Loss, batches: Sequence[Any], passes: str = "simplify,cse,dce") -> MicroStep:
    """Capture the step of the first of some micro-batches."""

    def run(model: nn.Module, batch: Any, scale: Tensor) -> Tensor:
        value = loss(model, batch)
        (value * scale).backward()
        return value.detach()

    scale = torch.tensor(1 / len(batches))
    captured = capture(run, (model, batches[0], scale), {})
    graph = run_passes(captured.graph.copy(), Pipeline.parse(passes))
    return MicroStep(model, loss, captured, graph, tuple(batches), scale)


@functools.cache
def zoo_step(name: str, num_batches: int = 3) -> MicroStep:
    """The step of a zoo case, dropout off."""
    case = zoo.get(name)
    torch.manual_seed(0)
    model = without_dropout(case.build())
    return micro_step(model, case.loss, [case.make_batch(2, seed) for seed in range(num_batches)])


@dataclass
class CutRun:
    """Programs of a cut in the order of a schedule, op by op; a stage sees what it made and what was sent to it."""

    step: MicroStep
    cut: CutGraph
    gradients: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    buffers: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    outputs: list[dict[int, Tensor]] = field(default_factory=list)

    def run(self, schedule: Schedule) -> CutRun:
        leaves = self.step.leaves()
        self.outputs = [{} for _ in leaves]
        seen: dict[tuple[int, int], dict[str, Any]] = defaultdict(dict)
        with torch.no_grad():
            for _, action in checked_order(schedule):
                stage = self.cut.stages[action.stage]
                program = stage.program(action.kind)
                values = seen[action.stage, action.micro_batch]
                inputs = [self._read(action.stage, slot, leaves[action.micro_batch]) for slot in program.slots]
                made = _call(program, inputs + [values[name] for name in program.values])
                values |= made
                for name in made:
                    for reader in self.cut.readers.get(name, ()):
                        seen[reader, action.micro_batch][name] = made[name]
                self._leave(action.stage, action.kind, made)
                self.outputs[action.micro_batch] |= {
                    position: made[name] for position, name in stage.returns.items() if name in made
                }
        return self

    def _read(self, stage: int, slot: str, leaves: list[Any]) -> Any:
        kept = self.buffers.get((stage, slot))
        return self.step.captured.bindings[slot].read(leaves) if kept is None else kept

    def _leave(self, stage: int, kind: Kind, made: Mapping[str, Any]) -> None:
        described = self.cut.stages[stage]
        if kind is Kind.FORWARD:
            self.buffers |= {(stage, slot): made[name] for slot, name in described.updates.items()}
            return
        for slot, name in described.gradients.items():
            if name in made:
                known = self.gradients.get((stage, slot))
                self.gradients[stage, slot] = made[name] if known is None else known + made[name]

    def assert_like_eager(self) -> None:
        """The gradients, summed over stages, and the buffers that are left are those of one process."""
        expected, buffers = self.step.eager()
        summed: dict[str, Tensor] = {}
        for (_, slot), value in self.gradients.items():
            name = slot.removeprefix("param.")
            summed[name] = summed[name] + value if name in summed else value
        assert summed.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(
                summed[name], value, rtol=1e-4, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}"
            )
        for (_, slot), value in self.buffers.items():
            torch.testing.assert_close(value, buffers[slot.removeprefix("buffer.")])


def _call(program: Program, inputs: list[Any]) -> dict[str, Any]:
    made = program.graph.recompile()(*inputs)["outputs"]
    return dict(zip(program.outputs, made, strict=True))
