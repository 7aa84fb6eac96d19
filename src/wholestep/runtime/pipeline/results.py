"""What a step of a pipeline returns, put together from its micro-batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from wholestep.capture import tree
from wholestep.capture.record import Filling
from wholestep.runtime.pipeline.batches import MicroBatches, joined, mean
from wholestep.runtime.pipeline.runs import Graphs


@dataclass(frozen=True)
class PipeResult:
    """What a step came to, as far as this rank has it: the mean loss, and the model's output if it was asked for.

    `grad_norm` is the norm of all gradients before they were clipped, on every rank, if they were.
    """

    loss: torch.Tensor | None
    output: Any = None
    grad_norm: torch.Tensor | None = None


def result_of(
    graphs: Graphs, outputs: list[dict[int, Any]], leaves: list[list[Any]], batches: MicroBatches
) -> PipeResult:
    """Losses and outputs of micro-batches as those of the batch; None for what other ranks have."""
    num_outputs = graphs.cut.num_outputs
    parts = [
        graphs.captured.outputs.fill(
            Filling(tuple(one.get(index) for index in range(num_outputs)), own, graphs.captured.recording.numbers)
        )
        for one, own in zip(outputs, leaves, strict=True)
    ]
    losses = [loss for loss, _ in parts if loss is not None]
    loss = mean(losses, batches) if losses else None
    flat = [tree.flatten(output) for _, output in parts]
    if flat[0][0] == [None] or not flat[0][0]:
        return PipeResult(loss)
    merged = [joined(column, batches) for column in zip(*(values for values, _ in flat), strict=True)]
    return PipeResult(loss, tree.fill(parts[0][1], merged))
