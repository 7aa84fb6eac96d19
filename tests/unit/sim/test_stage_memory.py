"""Predicted peaks of pipelines against what is alive while they run."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import wholestep
from wholestep.cost import DEVICES, Wire, measure_peak
from wholestep.pipe import StageCosts
from wholestep.runtime.pipeline import Pipe
from wholestep.sim import simulate
from wholestep.sim.cluster import Cluster
from wholestep.sim.cut_job import crossings_of, cut_job
from wholestep.sim.stage_memory import pipeline_peaks

WIDTH, ROWS, NUM_MICRO_BATCHES = 64, 32, 4
VALUE_BYTES = ROWS * WIDTH * 4


def made_pipe(schedule: str, num_stages: int, stages_per_rank: int) -> tuple[Pipe, nn.Module, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())])
    pipe = wholestep.pipeline(
        model,
        num_micro_batches=NUM_MICRO_BATCHES,
        num_stages=num_stages,
        schedule=schedule,
        stages_per_rank=stages_per_rank,
        loss_fn=lambda output, target: (output - target).square().mean(),
    )
    batch = torch.randn(ROWS * NUM_MICRO_BATCHES, WIDTH)
    pipe.step(batch, target=batch)
    return pipe, model, batch


@pytest.mark.parametrize(
    ("schedule", "stages"), [("gpipe", 1), ("1f1b", 1), ("zb-h1", 1), ("zbv", 2), ("interleaved-1f1b", 2)]
)
def test_a_rank_holds_what_was_foretold(schedule: str, stages: int) -> None:
    pipe, model, batch = made_pipe(schedule, stages, stages)
    pipe.step(batch, target=batch)  # the first run checks op by op, and holds more
    model.zero_grad()
    measured = measure_peak(lambda: pipe.step(batch, target=batch), held=[model, batch])
    [predicted] = pipeline_peaks(pipe.cut, pipe.schedule, [measured.held_bytes])
    assert predicted == pytest.approx(measured.peak_bytes, rel=0.01)


def test_ranks_of_1f1b_hold_fewer_micro_batches_one_after_the_other() -> None:
    pipe, _, _ = made_pipe("1f1b", 4, 1)
    first, *_, last = pipeline_peaks(pipe.cut, pipe.schedule)
    assert first > last
    held = pipeline_peaks(pipe.cut, pipe.schedule, [10, 20, 30, 40])
    assert held[0] == first + 10
    assert held[3] == last + 40


def test_a_cut_model_is_a_job() -> None:
    pipe, model, _ = made_pipe("1f1b", 2, 1)
    assert {(0, 1)} == set(crossings_of(pipe.cut))
    assert crossings_of(pipe.cut)[0, 1].forward_bytes in (VALUE_BYTES, 2 * VALUE_BYTES)
    job = cut_job("pipe", pipe.cut, pipe.schedule, [StageCosts(10.0, 10.0, 10.0)] * 2)
    parameter_bytes = sum(parameter.nbytes for parameter in model.parameters())
    assert sum(size for stage in job.stages for size in stage.gradient_bytes) == parameter_bytes
    found = simulate(job, Cluster(1, 4, DEVICES["cpu"], Wire(1.0, 1000.0), Wire(1.0, 1000.0)))
    assert found.step_us > NUM_MICRO_BATCHES * 30
    assert found.peak_bytes == max(job.peak_bytes)
