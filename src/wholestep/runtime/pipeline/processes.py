"""The processes of a pipelined job: who has which part of which replica, and what they have to agree on.

Ranks of a job stand in rows: one row for each replica of the pipeline, one column for each rank of it.

    rank 0  rank 1  rank 2  rank 3        replica 0 of a pipeline over four ranks
    rank 4  rank 5  rank 6  rank 7        replica 1; ranks 1 and 5 have the same stages and average their gradients
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from wholestep.errors import PipelineError
from wholestep.pipe.cut import CutGraph
from wholestep.pipe.schedule import Schedule


@dataclass(frozen=True)
class Processes:
    """This process's place in the job: its rank in the pipeline, the ranks of its pipeline and of its equals."""

    rank: int
    pipeline: tuple[int, ...]
    equals: Any
    num_replicas: int

    @staticmethod
    def of(num_ranks: int) -> Processes | None:
        """The place of this process in a job of pipelines over `num_ranks` ranks; None if it is alone."""
        world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        if world == 1:
            return None
        num_replicas, rest = divmod(world, num_ranks)
        if rest or not num_replicas:
            raise PipelineError(
                f"a schedule for {num_ranks} ranks does not fit a job of {world}: start a multiple of {num_ranks} "
                "ranks, or choose stages and stages_per_rank to suit"
            )
        replica, rank = divmod(dist.get_rank(), num_ranks)
        equals = None
        for column in range(num_ranks):  # all ranks make all groups, in the same order
            members = [row * num_ranks + column for row in range(num_replicas)]
            group = dist.new_group(members) if num_replicas > 1 else None
            equals = group if column == rank else equals
        first = replica * num_ranks
        return Processes(rank, tuple(range(first, first + num_ranks)), equals, num_replicas)


def share_model(model: nn.Module) -> None:
    """Give all ranks rank 0's parameters and buffers."""
    with torch.no_grad():
        for value in (*model.parameters(), *model.buffers()):
            whole = value.contiguous()
            dist.broadcast(whole, 0)
            if whole is not value:
                value.copy_(whole)


def require_agreement(cut: CutGraph, schedule: Schedule) -> None:
    """Compare stages and schedule over all ranks before anything is sent; raises what differs, on every rank."""
    own = _description(cut, schedule)
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    for rank, other in enumerate(found):
        different = [key for key in own if other[key] != found[0][key]]
        if different:
            raise PipelineError(
                f"rank {rank} has another {different[0]} than rank 0: all ranks must build the same model, call the "
                "pipeline with batches of the same shape and give the same options"
            )


def _description(cut: CutGraph, schedule: Schedule) -> dict[str, str]:
    stages = [(program.slots, program.values, program.outputs) for stage in cut.stages for program in stage.programs]
    shapes = [
        (name, tuple(fake.shape), str(fake.dtype)) for stage in cut.stages for name, fake in sorted(stage.fakes.items())
    ]
    return {
        "schedule": _hash(schedule.to_csv()),
        "cut into stages": _hash(repr(stages)),
        "shape of values": _hash(repr(shapes)),
    }


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
