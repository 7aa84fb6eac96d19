"""What the ranks of a pipeline must have alike, as text and numbers that can be compared by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from wholestep.graph import StepGraph
from wholestep.graph.printer import format_call
from wholestep.pipe.cut import CutGraph
from wholestep.pipe.schedule import Schedule
from wholestep.runtime.agreement import mark_of
from wholestep.runtime.pipeline.batches import MicroBatches
from wholestep.runtime.replica_facts import code_mark, describe, mode_facts, named_facts, optimizer_facts, plain

_MAX_NAMES = 16


def given_facts(model: nn.Module, options: Any) -> dict[str, Any]:
    """What ranks were given, compared before anything is captured; `options` is a dataclass."""
    optimizer: Optimizer | None = options.optimizer
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        "the options of wholestep.pipeline": {
            field.name: _option(getattr(options, field.name))
            for field in dataclasses.fields(options)
            if field.name != "optimizer"
        },
        "the parameters": named_facts(model.named_parameters(remove_duplicate=False)),
        "the buffers": named_facts(model.named_buffers(remove_duplicate=False)),
        "the optimizers": {} if optimizer is None else optimizer_facts("optimizer", optimizer, names),
    }


def _option(value: Any) -> Any:
    if isinstance(value, Schedule):
        return f"{value.name} {mark_of(value.to_csv())}"
    if callable(value):
        return f"{getattr(value, '__qualname__', type(value).__qualname__)} {code_mark(value)}"
    return str(value) if dataclasses.is_dataclass(value) else plain(value)


def made_facts(cuts: Sequence[CutGraph], schedule: Schedule) -> dict[str, Any]:
    """What ranks made of it, compared before anything is sent."""
    stages = [stage for cut in cuts for stage in cut.stages]
    programs = [
        (program.slots, program.values, program.outputs, _calls(program.graph))
        for stage in stages
        for program in stage.programs
    ]
    shapes = {name: describe(fake) for stage in stages for name, fake in stage.fakes.items()}
    return {
        "the schedules": {"the order of actions": schedule.to_csv()},
        "the values between stages": shapes,
        "the stages": {"what they compute": mark_of(programs)},
    }


def _calls(graph: StepGraph) -> list[str]:
    """Ops with their numbers, without the places that a printed graph mentions."""
    return [f"{node.name} = {format_call(node)}" for node in graph.calls()]


def call_facts(call: str, model: nn.Module, batches: MicroBatches, leaves: Sequence[Any]) -> dict[str, Any]:
    """What a rank does in a call: the method, the rows and types of the batch, the modes of modules, autocast."""
    facts: dict[str, Any] = {"the call": call, "the number of rows": sum(batches.sizes)}
    facts |= {f"argument {index}": _argument(leaf) for index, leaf in enumerate(leaves)}
    facts |= {f"the mode of {name}": mode for name, mode in mode_facts({"model": model}).items()}
    frozen = sorted(name for name, parameter in model.named_parameters() if not parameter.requires_grad)
    facts["what is frozen"] = frozen if len(frozen) <= _MAX_NAMES else f"{len(frozen)} parameters {mark_of(frozen)}"
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            facts[f"autocast on {device}"] = str(torch.get_autocast_dtype(device))
    return facts


def _argument(leaf: Any) -> Any:
    return describe(leaf) if isinstance(leaf, torch.Tensor) else plain(leaf)
