"""One capture for many lengths: any dimension of the arguments that changes becomes symbolic."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.twins import Twins, World, momentum
from torch import Tensor, nn
from torch.optim import Optimizer

SIZES = [(2, 12), (2, 10), (2, 7), (3, 12), (4, 5), (2, 9)]


class Attends(nn.Module):
    """Tokens with positions, one layer of attention, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(16, 8), nn.Embedding(12, 8)
        self.project, self.norm, self.drop = nn.Linear(8, 24), nn.LayerNorm(8), nn.Dropout(0.2)
        self.head = nn.Linear(8, 16)

    def forward(self, ids: Tensor) -> Tensor:
        batch, length = ids.shape
        hidden = self.norm(self.tokens(ids) + self.positions(torch.arange(length)))
        query, key, value = self.project(hidden).view(batch, length, 3, 2, 4).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.head(self.drop(mixed.transpose(1, 2).reshape(batch, length, 8)))


def build() -> World:
    model = Attends()
    return World(model=model, optimizer=momentum(model.parameters()))


def step(model: nn.Module, optimizer: Optimizer, ids: Tensor, mask: Tensor | None = None) -> float:
    optimizer.zero_grad()
    logits = model(ids)
    losses = F.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="none")
    loss = losses.mean() if mask is None else (losses * mask.flatten()).sum() / mask.sum()
    loss.backward()
    optimizer.step()
    return loss.item()


def tokens(*size: int, seed: int = 0) -> Tensor:
    return torch.randint(16, size, generator=torch.Generator().manual_seed(seed))


def trained(twins: Twins, sizes: list[tuple[int, int]], *, masked: bool = False) -> Twins:
    for seed, size in enumerate(sizes):
        twins.step(tokens(*size, seed=seed), *([torch.ones(size)] if masked else []))
    return twins


@pytest.mark.parametrize("masked", [False, True])
def test_lengths_and_batches_in_three_captures(masked: bool) -> None:
    twins = trained(Twins(build, step), SIZES, masked=masked)
    assert twins.num_captures == 3, twins.reasons
    assert sorted(twins.compiled.captured.dynamic_dims) == [
        (i, dim) for i in ([2, 3] if masked else [2]) for dim in (0, 1)
    ]


def test_sizes_that_were_equal_by_chance() -> None:
    def pooled(model: Attends, optimizer: Optimizer, features: Tensor) -> float:
        optimizer.zero_grad()
        loss = model.head(features).square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    twins = Twins(build, pooled)
    for size in ((4, 4), (5, 5), (6, 6), (3, 7), (5, 4), (2, 9)):
        twins.step(torch.randn(*size, 8))
    assert twins.num_captures <= 4, twins.reasons
    assert "that were equal differ now: 3 and 7" in twins.reasons[1]


def test_where_lengths_cannot_be_symbolic_batches_are(caplog: pytest.LogCaptureFixture) -> None:
    def counted(model: nn.Module, optimizer: Optimizer, ids: Tensor) -> float:
        weights = torch.tensor([1.0 / (position + 1) for position in range(ids.shape[1])])
        return step(model, optimizer, ids, weights.expand(ids.shape))

    twins = trained(Twins(build, counted), [(2, 12), (2, 10), (3, 10), (4, 10), (5, 10), (5, 12)])
    assert twins.num_captures <= 5, twins.reasons


def test_a_length_of_one_is_captured_apart() -> None:
    twins = trained(Twins(build, step), [(2, 12), (2, 10), (2, 1), (2, 11)])
    assert twins.num_captures == 3
    assert "size 1 is captured apart" in twins.reasons[-1]


def test_strides_that_do_not_follow_from_sizes() -> None:
    twins = Twins(build, step)
    for seed, length in enumerate((10, 8, 6, 8)):
        twins.step(tokens(2, 12, seed=seed)[:, :length])  # a part of something larger
    assert twins.num_captures == 3
    twins = trained(Twins(build, step), [(2, 12), (2, 10)])
    twins.step(tokens(9, 2).t())
    assert twins.num_captures == 3
    assert "stride" in twins.reasons[-1]


@pytest.mark.parametrize("dynamic_batch", [False, True])
def test_not_unless_they_may(dynamic_batch: Any) -> None:
    twins = trained(Twins(build, step, dynamic_batch=dynamic_batch), [(2, 12), (2, 10), (3, 10), (2, 12)])
    assert twins.num_captures == (2 if dynamic_batch else 3)


def test_a_length_that_decides_something() -> None:
    def doubled(model: nn.Module, optimizer: Optimizer, ids: Tensor) -> float:
        return step(model, optimizer, ids[:, :8] if ids.shape[1] > 8 else ids)

    twins = trained(Twins(build, doubled), [(2, 12), (2, 11), (2, 10), (2, 7), (2, 6), (2, 9)])
    assert twins.num_captures == 3
    assert "break what the captured step assumes" in twins.reasons[1]
