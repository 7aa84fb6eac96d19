"""Models that are little more than a loss head, and losses of all shapes over them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wholestep.zoo import gpt
from wholestep.zoo.case import Batch, ZooCase

Loss = Callable[[nn.Module, Batch], Tensor]
SIZES: dict[str, Any] = {"context": 6, "width": 16, "heads": 2, "layers": 1}
TIGHT: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-12}


class Tied(nn.Module):
    """The outer parts of a language model: an embedding, a hidden layer with dropout, and a head of the same weight."""

    def __init__(self, config: gpt.GPTConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.hidden = nn.Linear(config.width, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.dropout(torch.tanh(self.hidden(self.embedding(tokens)))))


class Untied(Tied):
    """With a weight and a bias of the head's own."""

    def __init__(self, config: gpt.GPTConfig) -> None:
        super().__init__(config)
        self.head = nn.Linear(config.width, config.vocab_size)


def mean_loss(model: nn.Module, batch: Batch, **options: Any) -> Tensor:
    return F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["targets"].flatten(), **options)


def shifted_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Each position predicts the next; the last one predicts nothing."""
    logits = model(batch["tokens"])[..., :-1, :].contiguous()
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), batch["tokens"][..., 1:].reshape(-1))


def time_major_loss(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch["tokens"]).transpose(0, 1)
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), batch["targets"].t().reshape(-1))


def capped_loss(model: nn.Module, batch: Batch) -> Tensor:
    logits = 3 * torch.tanh(model(batch["tokens"]) / 3)
    return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


def scaled_loss(model: nn.Module, batch: Batch) -> Tensor:
    """A loss scale that is a tensor computed after the loss, and a term beside it."""
    loss = mean_loss(model, batch)
    scale = batch["targets"].sum().double() / 1000
    return scale * loss + sum(parameter.square().sum() for parameter in model.parameters())


def some_ignored_loss(model: nn.Module, batch: Batch) -> Tensor:
    """A whole chunk may be without a target that counts."""
    targets = batch["targets"].masked_fill(batch["tokens"] < 40, 7)
    targets = torch.where(torch.arange(targets.shape[0]).unsqueeze(1) == 1, 7, targets)
    return F.cross_entropy(model(batch["tokens"]).flatten(0, 1), targets.flatten(), ignore_index=7)


LOSSES: dict[str, Loss] = {
    "mean": mean_loss,
    "sum": partial(mean_loss, reduction="sum"),
    "smoothed": partial(mean_loss, label_smoothing=0.1),
    "smoothed_sum": partial(mean_loss, label_smoothing=0.2, reduction="sum"),
    "shifted": shifted_loss,
    "time_major": time_major_loss,
    "capped": capped_loss,
    "scaled": scaled_loss,
    "some_ignored": some_ignored_loss,
}


def case_of(loss: Loss = mean_loss, model: type[nn.Module] = Tied, **sizes: Any) -> ZooCase:
    config = gpt.GPTConfig(**(SIZES | sizes))
    return ZooCase("language model", partial(model, config), partial(gpt.make_batch, config), loss)


def double(model: nn.Module) -> nn.Module:
    return model.double()
