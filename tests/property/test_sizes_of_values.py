"""Random programs of masks and indices, compiled and eager, with another number of rows at each step."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.twins import Twins, small_world
from torch import Tensor, nn

NUM_ROWS, NUM_FEATURES = 8, 3
COUNTS = st.lists(st.integers(0, NUM_ROWS), min_size=3, max_size=6)


def rows_of_batch(values: Tensor, mask: Tensor, classes: Tensor) -> Tensor:
    return values[mask]


def rows_of_values(values: Tensor, mask: Tensor, classes: Tensor) -> Tensor:
    return values[values[:, 0] > 0]


def rows_twice(values: Tensor, mask: Tensor, classes: Tensor) -> Tensor:
    return values[mask][classes[mask] > 0]


def rows_by_place(values: Tensor, mask: Tensor, classes: Tensor) -> Tensor:
    return values.index_select(0, mask.nonzero().squeeze(1))


def rows_repeated(values: Tensor, mask: Tensor, classes: Tensor) -> Tensor:
    return values.repeat_interleave(classes, dim=0)


def rows_left(values: Tensor, mask: Tensor, classes: Tensor) -> Tensor:
    return torch.cat([values[mask], values[~mask] * 2, values[:1]])


def rows_assigned(values: Tensor, mask: Tensor, classes: Tensor) -> Tensor:
    changed = values.clone()
    changed[mask] = changed[mask] * 2 + 1
    changed[classes == 0] += values.sum(0)
    return changed[mask]


def rows_dropped(values: Tensor, mask: Tensor, classes: Tensor) -> Tensor:
    kept = F.dropout(values, 0.5)
    return F.dropout(kept[kept.sum(-1) != 0], 0.3)


def as_they_are(rows: Tensor) -> Tensor:
    return rows


def normalised(rows: Tensor) -> Tensor:
    return F.layer_norm(rows, (NUM_FEATURES,)).softmax(-1)


def attended(rows: Tensor) -> Tensor:
    return (rows @ rows.t()).softmax(-1) @ rows


def turned(rows: Tensor) -> Tensor:
    return torch.tanh(rows.t()).contiguous().t() - rows.mean(0, keepdim=True)


def sorted_rows(rows: Tensor) -> Tensor:
    return rows.sort(0).values.cumsum(0) * torch.arange(rows.shape[0]).unsqueeze(1)


def grouped(rows: Tensor) -> Tensor:
    kinds, places = torch.unique((rows[:, 0] > 0.2).long(), return_inverse=True)
    return torch.zeros(kinds.shape[0], NUM_FEATURES).index_add(0, places, rows)


def summed(rows: Tensor) -> Tensor:
    return rows.square().sum() / max(len(rows), 1)


def averaged(rows: Tensor) -> Tensor:
    return rows.square().mean()


def divided(rows: Tensor) -> Tensor:
    return rows.sum() / rows.shape[0] + rows.norm()


def branched(rows: Tensor) -> Tensor:
    return rows.square().sum() if rows.shape[0] > 2 else rows.sum() * 0.5


def compared(rows: Tensor) -> Tensor:
    return F.mse_loss(rows, torch.zeros_like(rows)) + F.smooth_l1_loss(rows, rows.detach() + 1, reduction="sum")


SELECTIONS = (
    rows_of_batch,
    rows_of_values,
    rows_twice,
    rows_by_place,
    rows_repeated,
    rows_left,
    rows_assigned,
    rows_dropped,
)
CHANGES = (as_they_are, normalised, attended, turned, sorted_rows, grouped)
LOSSES = (summed, averaged, divided, branched, compared)
PROGRAMS = st.tuples(st.sampled_from(SELECTIONS), st.sampled_from(CHANGES), st.sampled_from(LOSSES))


def batch(count: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.zeros(NUM_ROWS, dtype=torch.bool)
    mask[torch.randperm(NUM_ROWS, generator=generator)[:count]] = True
    return torch.randn(NUM_ROWS, 4, generator=generator), mask, torch.randint(3, (NUM_ROWS,), generator=generator)


def run(program: Any, counts: list[int]) -> None:
    select, change, reduce = program

    def step(
        model: nn.Module, optimizer: Any, features: Tensor, mask: Tensor, classes: Tensor
    ) -> tuple[Tensor, Tensor]:
        optimizer.zero_grad()
        rows = change(select(model(features), mask, classes))
        loss = reduce(rows)
        loss.nan_to_num().backward()
        nn.utils.clip_grad_value_(model.parameters(), 1.0)
        optimizer.step()
        return loss, rows.detach()

    twins = Twins(small_world(), step)
    for seed, count in enumerate(counts):
        twins.step(*batch(count, seed))


@settings(derandomize=True, database=None, deadline=None, max_examples=3)
@given(PROGRAMS, COUNTS)
def test_parity(program: Any, counts: list[int]) -> None:
    run(program, counts)


@pytest.mark.slow
@settings(derandomize=True, database=None, deadline=None, max_examples=60)
@given(PROGRAMS, COUNTS)
def test_parity_of_more(program: Any, counts: list[int]) -> None:
    run(program, counts)
