"""A model in a selective checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import checkpoint

Policy = Callable[..., checkpoint.CheckpointPolicy]


class UnderPolicy(nn.Module):
    """Three linear layers with a tanh and a sigmoid between them, in a region with a policy; returns a loss."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 8))
        self.policy: Any = policy

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        contexts = partial(checkpoint.create_selective_checkpoint_contexts, self.policy)
        return checkpoint.checkpoint(self.inner, x, use_reentrant=False, context_fn=contexts).square().sum()
