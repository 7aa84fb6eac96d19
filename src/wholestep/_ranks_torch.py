"""What is private to PyTorch about process groups; seen in torch 2.11 to 2.13."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from wholestep import _torch


def group_timeout_s(group: dist.ProcessGroup) -> float:
    """How long collectives of a group wait for a rank. It can be set in public, and not asked for."""
    backends: list[Any] = [group._get_backend(device) for device in group._device_types]
    known = [backend.options._timeout.total_seconds() for backend in backends if hasattr(backend, "options")]
    return min(known, default=dist.distributed_c10d.default_pg_timeout.total_seconds())


def side_channel(group: dist.ProcessGroup, name: str, timeout_s: float) -> Any:
    """A gloo backend of the ranks of a group, made by all of them; `name` tells it from others in the job's store.

    `new_group` would do, but for its names: it takes them from what groups a process has made before, and ranks may
    have different pasts.
    """
    store = dist.PrefixStore(name, _torch.group_store(group))  # pyright: ignore[reportPrivateImportUsage]
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    return dist.ProcessGroupGloo(store, rank, world, timedelta(seconds=timeout_s))  # pyright: ignore
