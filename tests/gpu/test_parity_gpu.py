"""Parity with eager on a CUDA device: kernels there may reorder sums, so within the dtype's default tolerance."""

from __future__ import annotations

import pytest
import torch
from tests.parity import assert_parity

from wholestep import zoo

pytestmark = pytest.mark.gpu

RTOL, ATOL = 1.3e-6, 1e-5


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw_foreach", "adamw_fused", "adafactor"])
@pytest.mark.parametrize("name", ["mlp", "gpt", "llama", "bert", "vit", "resnet", "custom_function", "checkpointed"])
def test_parity_at_every_step(name: str, optimizer: str, deterministic: None) -> None:
    case = zoo.get(name)
    if name == "checkpointed" and optimizer != "adamw_fused":
        pytest.skip("one optimizer is enough for what checkpoints change")
    step = assert_parity(case, optimizer, steps=3, rtol=RTOL, atol=ATOL, prepare=lambda model: model.cuda())
    assert step.num_captures == 1


def test_dynamic_batch_on_cuda(deterministic: None) -> None:
    step = assert_parity(
        zoo.get("gpt"),
        "adamw_fused",
        steps=3,
        batch_sizes=(4, 7, 16),
        rtol=RTOL,
        atol=ATOL,
        compile_options={"dynamic_batch": True},
        prepare=lambda model: model.cuda(),
    )
    assert step.num_captures == 1


def test_bfloat16_autocast_on_cuda(deterministic: None) -> None:
    case = zoo.get("gpt")

    def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: zoo.Batch) -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = case.loss(model, batch)
        loss.backward()
        optimizer.step()
        return loss

    assert_parity(
        case, "adamw_fused", steps=3, train_step=train_step, rtol=1e-4, atol=1e-4, prepare=lambda model: model.cuda()
    )
