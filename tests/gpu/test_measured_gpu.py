"""Steps measured on a CUDA device, and resumed from a checkpoint there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.parity import default_step

import wholestep
from wholestep import zoo

pytestmark = pytest.mark.gpu

CASE = zoo.get("gpt")


def batch_of(number: int) -> zoo.Batch:
    return {name: value.cuda() for name, value in CASE.make_batch(4, number).items()}


def world() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = CASE.build().cuda()
    return model, torch.optim.AdamW(model.parameters(), fused=True)


@pytest.mark.parametrize("options", [{}, {"cross_iteration": "all"}, {"cuda_graphs": True}], ids=str)
def test_measured_steps_train_like_others(options: dict[str, Any]) -> None:
    losses: list[list[float]] = []
    steps = [wholestep.compile(default_step(CASE), **options) for _ in range(2)]
    for call in (steps[0], steps[1].measure):
        model, optimizer = world()
        torch.manual_seed(1)
        losses.append([call(model, optimizer, batch_of(number)).item() for number in range(8)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    typical = steps[1].measured.typical
    assert typical is not None
    assert sum(typical.totals.values()) <= typical.step_us
    assert bool(typical.parts) is not ("cuda_graphs" in options)
    assert all(length > 0 for length in typical.totals.values())


def test_a_run_is_resumed_with_its_masks(tmp_path: Path) -> None:
    """Dropout draws from the generator of the device, whose state is saved, too."""
    step: Any = wholestep.compile(default_step(CASE))
    model, optimizer = world()
    checkpoints = wholestep.Checkpoints(tmp_path)
    losses = [step(model, optimizer, batch_of(number)).item() for number in range(3)]
    checkpoints.save(3, model=model, optimizer=optimizer, wait=True)
    losses += [step(model, optimizer, batch_of(number)).item() for number in range(3, 6)]
    again, other = world()
    torch.cuda.manual_seed(123)
    assert wholestep.Checkpoints(tmp_path).resume(model=again, optimizer=other) == 3
    resumed: Any = wholestep.compile(default_step(CASE))
    assert [resumed(again, other, batch_of(number)).item() for number in range(3, 6)] == pytest.approx(
        losses[3:], rel=1e-5
    )
