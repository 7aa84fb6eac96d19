"""The processes of a pipelined job: who has which part of which replica, and what they have to agree on.

Ranks of a job stand in rows: one row for each replica of the pipeline, one column for each rank of it.

    rank 0  rank 1  rank 2  rank 3        replica 0 of a pipeline over four ranks
    rank 4  rank 5  rank 6  rank 7        replica 1; ranks 1 and 5 have the same stages and average their gradients
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from wholestep import _ranks_torch
from wholestep.errors import PipelineError
from wholestep.runtime.agreement import lost_peer


@dataclass(frozen=True)
class Processes:
    """This process's place in the job: its rank in the pipeline, the ranks of its pipeline and of its equals."""

    rank: int
    pipeline: tuple[int, ...]
    equals: Any
    num_replicas: int

    @staticmethod
    def of(num_ranks: int) -> Processes:
        """The place of this process in a job of pipelines over `num_ranks` ranks; made by all ranks at once."""
        num_replicas = require_room(num_ranks)
        replica, rank = divmod(dist.get_rank(), num_ranks)
        group = dist.group.WORLD
        assert group is not None
        timeout = timedelta(seconds=_ranks_torch.group_timeout_s(group))  # a new group would have torch's own
        equals = None
        for column in range(num_ranks):  # all ranks make all groups, in the same order
            members = [row * num_ranks + column for row in range(num_replicas)]
            group = dist.new_group(members, timeout=timeout) if num_replicas > 1 else None
            equals = group if column == rank else equals
        first = replica * num_ranks
        return Processes(rank, tuple(range(first, first + num_ranks)), equals, num_replicas)


def is_distributed() -> bool:
    """Whether there are other ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def require_room(num_ranks: int) -> int:
    """How many pipelines over `num_ranks` ranks the job is; raises if it is none."""
    world = dist.get_world_size()
    num_replicas, rest = divmod(world, num_ranks)
    if rest or not num_replicas:
        raise PipelineError(
            f"a schedule for {num_ranks} ranks does not fit a job of {world}: start a multiple of {num_ranks} ranks, "
            "or choose stages and stages_per_rank to suit"
        )
    return num_replicas


def share_model(model: nn.Module) -> None:
    """Give all ranks rank 0's parameters and buffers, in the order of their names."""
    tensors = dict(sorted([*model.named_parameters(), *model.named_buffers()]))
    with torch.no_grad():
        for name, value in tensors.items():
            whole = value.contiguous()
            try:
                dist.broadcast(whole, 0)
            except RuntimeError as error:
                raise lost_peer(f"rank 0's {name}", error) from error
            if whole is not value:
                value.copy_(whole)
