"""Pipelines on a CUDA device: in one process, and over two ranks that share it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.distributed.ranks import run_ranks
from torch import Tensor, nn

import wholestep
from wholestep import zoo
from wholestep.zoo import gpt

pytestmark = pytest.mark.gpu

NUM_STEPS = 3


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def build() -> nn.Module:
    torch.manual_seed(0)
    return gpt.GPT(gpt.GPTConfig(layers=4, dropout=0.0)).double().cuda()


def batch_of(number: int) -> tuple[Tensor, Tensor]:
    batch = zoo.get("gpt").make_batch(9, number)
    return batch["tokens"].cuda(), batch["targets"].cuda()


def train(options: dict[str, Any]) -> dict[str, Tensor]:
    """Some steps, clipped and updated; returns the parameters of this rank."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    pipe = wholestep.pipeline(
        model, num_micro_batches=4, loss_fn=loss_fn, optimizer=optimizer, max_grad_norm=0.3, **options
    )
    for number in range(NUM_STEPS):
        tokens, target = batch_of(number)
        pipe.step(tokens, target=target)
    timeline = pipe.measured()
    assert [[span.action for span in row] for row in timeline.spans] == [list(row) for row in pipe.schedule.actions]
    assert all(span.end > span.start for row in timeline.spans for span in row)
    return {name: parameter.detach().cpu() for name, parameter in pipe.named_parameters()}


def expected() -> dict[str, Tensor]:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    for number in range(NUM_STEPS):
        optimizer.zero_grad()
        tokens, target = batch_of(number)
        loss_fn(model(tokens), target).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
    return {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    "options",
    [
        {"num_stages": 2, "schedule": "1f1b"},
        {"num_stages": 4, "schedule": "zbv"},
        {"num_stages": 2, "schedule": "zb-h1", "memory_budget": 0.3},
        {"num_stages": 2, "schedule": "1f1b", "lower": "inductor"},
    ],
    ids=["1f1b", "zbv", "budget", "lowered"],
)
def test_one_process(options: dict[str, Any]) -> None:
    torch.testing.assert_close(train(options), expected())


def test_masks_are_those_of_any_other_cut() -> None:
    """With dropout: every op draws from a stream of its own on the device."""
    found: list[dict[str, Tensor]] = []
    torch.manual_seed(0)
    whole = gpt.GPT(gpt.GPTConfig(layers=4, dropout=0.3)).double().cuda()
    tokens, target = batch_of(0)
    for num_stages, schedule in ((1, "gpipe"), (4, "zbv")):
        model = copy.deepcopy(whole)
        pipe = wholestep.pipeline(model, num_micro_batches=3, loss_fn=loss_fn, num_stages=num_stages, schedule=schedule)
        pipe.step(tokens, target=target)
        found.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    torch.testing.assert_close(found[1], found[0])


def test_two_ranks_on_one_device() -> None:
    """Values travel through the host: NCCL wants a device for each rank."""
    found = run_ranks(train, 2, {"num_stages": 4, "schedule": "zbv"})
    wanted = expected()
    assert set().union(*found) == set(wanted)
    for one in found:
        for name, value in one.items():
            torch.testing.assert_close(value, wanted[name], msg=lambda text, n=name: f"{n}: {text}")
