"""Hugging Face models in pipelines, all ranks in one process: losses and gradients are those of the plain model."""

from __future__ import annotations

import pytest
import torch
from tests.pipelines import MODELS, SETUPS, reference

from wholestep.runtime.pipeline.pipe import Pipe, PipeOptions

NUM_MICRO_BATCHES = 4
QUICK = {("gpt2_tied", "interleaved-zb"), ("llama", "zbv"), ("mamba", "gpipe")}


RUNS = [
    pytest.param(name, setup, marks=[] if (name, setup) in QUICK else [pytest.mark.slow])
    for name in MODELS
    for setup in SETUPS
]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("name", "setup"), RUNS)
def test_gradients_are_those_of_the_plain_model(name: str, setup: str) -> None:
    case = MODELS[name]
    schedule, num_ranks, stages_per_rank = SETUPS[setup]
    torch.manual_seed(0)
    model = case.build()
    batch = case.make_batch(2 * NUM_MICRO_BATCHES, 1)
    expected_loss, expected = reference(case, model, batch, NUM_MICRO_BATCHES)
    options = PipeOptions(
        num_micro_batches=NUM_MICRO_BATCHES,
        num_stages=num_ranks * stages_per_rank,
        schedule=schedule,
        stages_per_rank=stages_per_rank,
        loss_fn=case.loss_fn,
    )
    result = Pipe(model, options).step(**case.arguments(batch))
    assert result.loss is not None
    torch.testing.assert_close(result.loss, expected_loss)
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert found.keys() == expected.keys()
    for parameter, gradient in expected.items():
        torch.testing.assert_close(
            found[parameter], gradient, rtol=1e-5, atol=1e-7, msg=lambda text, p=parameter: f"{p}: {text}"
        )
