"""What is private to PyTorch about process groups; seen in torch 2.11 to 2.13."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def group_timeout_s(group: dist.ProcessGroup) -> float:
    """How long collectives of a group wait for a rank. It can be set in public, and not asked for."""
    backends: list[Any] = [group._get_backend(device) for device in group._device_types]
    known = [backend.options._timeout.total_seconds() for backend in backends if hasattr(backend, "options")]
    return min(known, default=dist.distributed_c10d.default_pg_timeout.total_seconds())
