"""A small training run that can be cut off anywhere and resumed: what tests of checkpoints train.

It has all that a checkpoint must get right: dropout, tied and frozen weights, a buffer that changes, several parameter
groups, a schedule, and a dict with the position in the data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.twins import World, observe
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, MultiStepLR

import wholestep

VOCABULARY, WIDTH, GLOBAL_BATCH = 11, 8, 8


class TiedNet(nn.Module):
    """An embedding whose weights are also the last layer's, a frozen bias, batch norm, dropout."""

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if dropout else nn.LayerNorm(WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.hidden.bias.requires_grad_(False)
        self.register_buffer("scratch", torch.zeros(1), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = torch.tanh(self.hidden(self.embedding(tokens)))
        return self.head(self.dropout(self.norm(hidden)))


def train_step(model: nn.Module, optimizer: Optimizer, tokens: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(tokens), (tokens + 1) % VOCABULARY)
    loss.backward()
    optimizer.step()
    return loss


def adamw(groups: Any) -> Optimizer:
    return torch.optim.AdamW(groups, lr=0.05)


@dataclass
class Run:
    """Everything that one life of a run has, built from the same seeds each time."""

    make_optimizer: Callable[..., Optimizer] = adamw
    dropout: float = 0.2
    options: dict[str, Any] = field(default_factory=lambda: {"cross_iteration": "all"})
    seed: int = 0

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        self.model = TiedNet(self.dropout)
        slow = [self.model.embedding.weight]
        fast = [p for p in self.model.parameters() if p.requires_grad and p is not slow[0]]
        self.optimizer = self.make_optimizer([{"params": slow}, {"params": fast, "lr": 0.02}])
        self.scheduler: LRScheduler = MultiStepLR(self.optimizer, milestones=[2, 5], gamma=0.5)
        self.position = {"epoch": 0, "seen": [0, 0]}
        self.step: Any = wholestep.compile(train_step, **self.options)
        torch.manual_seed(self.seed + 1)
        self.losses: dict[int, float] = {}

    @property
    def state(self) -> dict[str, Any]:
        """What there is to save, by name."""
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "position": self.position,
        }

    def train(self, first: int, last: int) -> None:
        """Steps `first` to `last`, the latter not included."""
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        for number in range(first, last):
            generator = torch.Generator().manual_seed(number)
            tokens = torch.randint(VOCABULARY, (GLOBAL_BATCH,), generator=generator).chunk(world)[rank]
            self.losses[number] = self.step(self.model, self.optimizer, tokens).item()
            self.scheduler.step()
            self.position["seen"] = [number, number + 1]

    def seen(self) -> dict[str, Tensor]:
        """All that the run has now, with its random number generator."""
        world = World(model=self.model, optimizer=self.optimizer, position=self.position)
        return observe(world) | {"rng": torch.get_rng_state(), "rate": torch.tensor(self.scheduler.get_last_lr())}


def newest(folder: Path) -> Path:
    """The folder of the last checkpoint."""
    return max(folder.glob("step-*"))
