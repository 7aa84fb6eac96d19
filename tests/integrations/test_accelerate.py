"""Accelerate needs no adapter: a step that uses what `accelerator.prepare` returns is compiled as it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.parity import differences, named_leaves, snapshot
from torch import Tensor, nn

import wholestep

accelerate: Any = pytest.importorskip("accelerate", reason="needs accelerate")

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
]

NUM_EPOCHS = 4


class Job:
    """A classifier, its optimizer, schedule and data, prepared by an Accelerator."""

    def __init__(self, num_rows: int = 12, **options: Any) -> None:
        from accelerate.state import AcceleratorState  # pyright: ignore[reportMissingImports]

        AcceleratorState._reset_state(reset_partial_state=True)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        data = torch.utils.data.TensorDataset(torch.randn(num_rows, 4), torch.randint(3, (num_rows,)))
        batches = torch.utils.data.DataLoader(data, batch_size=2, shuffle=True)
        self.accelerator = accelerate.Accelerator(cpu=True, **options)
        prepared = self.accelerator.prepare(model, optimizer, batches, schedule)
        self.model, self.optimizer, self.batches, self.schedule = prepared

    def look(self) -> dict[str, Tensor]:
        return snapshot(self.model, self.optimizer) | named_leaves("schedule", self.schedule.state_dict())


def simple_step(job: Job, features: Tensor, classes: Tensor) -> Tensor:
    job.optimizer.zero_grad()
    loss = F.cross_entropy(job.model(features), classes)
    job.accelerator.backward(loss)
    job.optimizer.step()
    return loss.detach()


def accumulating_step(job: Job, features: Tensor, classes: Tensor) -> Tensor:
    with job.accelerator.accumulate(job.model):
        loss = F.cross_entropy(job.model(features), classes)
        job.accelerator.backward(loss)
        if job.accelerator.sync_gradients:
            job.accelerator.clip_grad_norm_(job.model.parameters(), 1.0)
        job.optimizer.step()
        job.schedule.step()
        job.optimizer.zero_grad()
    return loss.detach()


def train_both(
    step: Callable[..., Any], between: Callable[[Job], Any] = lambda job: None, num_rows: int = 12, **options: Any
) -> Any:
    """Train as it is and compiled, compare after each call, return the compiled step."""
    seen: list[list[dict[str, Tensor]]] = []
    compiled = wholestep.compile(step)
    for run in (step, compiled):
        job = Job(num_rows, **options)
        pictures: list[dict[str, Tensor]] = []
        for _ in range(NUM_EPOCHS):
            for features, classes in job.batches:
                loss = run(job, features, classes)
                pictures.append(job.look() | {"loss": loss.clone()})
            between(job)
        seen.append(pictures)
    assert len(seen[0]) == len(seen[1])
    for number, (expected, actual) in enumerate(zip(*seen), 1):
        assert not differences(expected, actual), f"after call {number}"
    return compiled


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_simple_loop_is_one_capture(precision: str) -> None:
    assert train_both(simple_step, mixed_precision=precision).num_captures == 1


def test_accumulate_is_a_few_captures_however_many_epochs() -> None:
    # One that accumulates, one that updates, one for the last batch of an epoch, which begins a new group; and the
    # first step of the schedule, which torch tells from the others.
    compiled = train_both(accumulating_step, num_rows=10, gradient_accumulation_steps=2)
    assert compiled.num_captures <= 4, compiled.recompile_reasons


def test_states_saved_and_loaded_between_epochs_cost_no_capture(tmp_path: Path) -> None:
    def between(job: Job) -> None:
        job.accelerator.save_state(str(tmp_path))
        job.accelerator.load_state(str(tmp_path))

    assert train_both(simple_step, between).num_captures == 1
