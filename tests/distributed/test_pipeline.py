"""`wholestep.pipeline` over real processes: what one process makes of the same micro-batches, step after step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.distributed.ranks import RanksFailed, run_ranks
from tests.pipelines import MODELS, SETUPS, reference
from torch import Tensor, nn

import wholestep
from wholestep import zoo
from wholestep.zoo import gpt
from wholestep.zoo.optimizers import two_groups

pytestmark = pytest.mark.distributed

NUM_MICRO_BATCHES = 4
NUM_STEPS = 5


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def train(options: dict[str, Any], num_replicas: int) -> dict[str, Any]:
    """Some steps of a GPT with tied weights and dropout; returns what this rank knows."""
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)  # rank 0's parameters count
    model = gpt.GPT(gpt.GPTConfig(layers=4)).double()
    pipe = wholestep.pipeline(model, num_micro_batches=NUM_MICRO_BATCHES, loss_fn=loss_fn, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses: list[Tensor | None] = []
    case = zoo.get("gpt")
    replica = dist.get_rank() * num_replicas // dist.get_world_size() if dist.is_initialized() else 0
    for number in range(NUM_STEPS):
        optimizer.zero_grad()
        batch = case.make_batch(8, number + 100 * replica)
        losses.append(pipe.step(batch["tokens"], target=batch["targets"]).loss)
        optimizer.step()
    model.eval()
    batch = case.make_batch(8, 7)
    evaluated = pipe.evaluate(batch["tokens"], target=batch["targets"]).loss
    own = {name: parameter.detach().clone() for name, parameter in pipe.named_parameters()}
    return {"losses": losses, "evaluated": evaluated, "parameters": own}


@pytest.mark.parametrize(
    ("num_ranks", "options"),
    [
        (2, {"num_stages": 4, "schedule": "zbv"}),
        pytest.param(2, {"num_stages": 2, "schedule": "1f1b"}, marks=pytest.mark.slow),
        pytest.param(2, {"num_stages": 2, "schedule": "zb-h1", "shared": "transmit"}, marks=pytest.mark.slow),
        pytest.param(4, {"num_stages": 4, "schedule": "gpipe"}, marks=pytest.mark.slow),
        pytest.param(4, {"num_stages": 8, "schedule": "interleaved-zb"}, marks=pytest.mark.slow),
    ],
)
def test_training_is_that_of_one_process(num_ranks: int, options: dict[str, Any]) -> None:
    """Five steps with dropout, tied weights on several ranks, then evaluation with the trained values."""
    expected = train(options, 1)
    found = run_ranks(train, num_ranks, options, 1)
    losses = [
        [loss for loss in each if loss is not None] for each in zip(*(one["losses"] for one in found), strict=True)
    ]
    assert all(len(each) == 1 for each in losses)
    torch.testing.assert_close([each[0] for each in losses], expected["losses"])
    [evaluated] = [one["evaluated"] for one in found if one["evaluated"] is not None]
    torch.testing.assert_close(evaluated, expected["evaluated"])
    assert set().union(*(one["parameters"] for one in found)) == set(expected["parameters"])
    for one in found:
        for name, value in one["parameters"].items():
            torch.testing.assert_close(value, expected["parameters"][name], msg=lambda text, n=name: f"{n}: {text}")


def replicas(options: dict[str, Any]) -> dict[str, Tensor]:
    """One step of replicas with batches of their own; dropout is off, so that their masks play no part."""
    torch.manual_seed(0)
    model = gpt.GPT(gpt.GPTConfig(layers=4, dropout=0.0)).double()
    pipe = wholestep.pipeline(model, num_micro_batches=NUM_MICRO_BATCHES, loss_fn=loss_fn, **options)
    batch = zoo.get("gpt").make_batch(8, dist.get_rank() // 2)
    pipe.step(batch["tokens"], target=batch["targets"])
    return {name: p.grad for name, p in pipe.named_parameters() if p.grad is not None}


def test_replicas_average_their_gradients() -> None:
    """Two pipelines of two ranks: the gradient of both batches together."""
    found = run_ranks(replicas, 4, {"num_stages": 2, "schedule": "1f1b"})
    torch.manual_seed(0)
    model = gpt.GPT(gpt.GPTConfig(layers=4, dropout=0.0)).double()
    for replica in range(2):
        batch = zoo.get("gpt").make_batch(8, replica)
        (loss_fn(model(batch["tokens"]), batch["targets"]) / 2).backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert set().union(*found) == set(expected)
    for one in found:
        for name, gradient in one.items():
            torch.testing.assert_close(gradient, expected[name], msg=lambda text, n=name: f"{n}: {text}")


def train_replicas(schedule: str, num_stages: int) -> dict[str, Any]:
    """Steps of replicas with batches of their own and uneven micro-batches, clipped and updated by the pipeline."""
    torch.manual_seed(0)
    model = gpt.GPT(gpt.GPTConfig(layers=4, dropout=0.0)).double()
    optimizer = torch.optim.AdamW(two_groups(model), lr=0.01)
    pipe = wholestep.pipeline(
        model,
        num_micro_batches=NUM_MICRO_BATCHES,
        loss_fn=loss_fn,
        num_stages=num_stages,
        schedule=schedule,
        optimizer=optimizer,
        max_grad_norm=0.3,
    )
    norms: list[Tensor | None] = []
    for number in range(3):
        batch = zoo.get("gpt").make_batch(9, 2 * number + dist.get_rank() // 2)
        norms.append(pipe.step(batch["tokens"], target=batch["targets"]).grad_norm)
    own = dict(pipe.named_parameters())
    timeline = pipe.measured()
    assert [[span.action for span in row] for row in timeline.spans] == [list(row) for row in pipe.schedule.actions]
    assert {id(p) for p in optimizer.state} == {id(p) for p in own.values()}, "state of other ranks' parameters"
    return {"norms": norms, "parameters": {name: p.detach() for name, p in own.items()}}


@pytest.mark.parametrize(
    ("schedule", "num_stages"), [("zbv", 4), pytest.param("interleaved-1f1b", 4, marks=pytest.mark.slow)]
)
def test_replicas_train_like_one_process_with_all_rows(schedule: str, num_stages: int) -> None:
    """Gradients of one stage are averaged while another computes; norms are those of the whole model."""
    found = run_ranks(train_replicas, 4, schedule, num_stages)
    torch.manual_seed(0)
    model = gpt.GPT(gpt.GPTConfig(layers=4, dropout=0.0)).double()
    optimizer = torch.optim.AdamW(two_groups(model), lr=0.01)
    norms: list[Tensor] = []
    for number in range(3):
        optimizer.zero_grad()
        for replica in range(2):
            batch = zoo.get("gpt").make_batch(9, 2 * number + replica)
            (loss_fn(model(batch["tokens"]), batch["targets"]) / 2).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.3))
        optimizer.step()
    expected = dict(model.named_parameters())
    assert set().union(*(one["parameters"] for one in found)) == set(expected)
    for one in found:
        torch.testing.assert_close(one["norms"], norms)
        for name, value in one["parameters"].items():
            torch.testing.assert_close(value, expected[name].detach(), msg=lambda text, n=name: f"{n}: {text}")


def hugging_face_step(name: str, setup: str) -> tuple[Tensor | None, dict[str, Tensor]]:
    case = MODELS[name]
    schedule, num_ranks, stages_per_rank = SETUPS[setup]
    torch.manual_seed(0)
    model = case.build()
    pipe = wholestep.pipeline(
        model,
        num_micro_batches=NUM_MICRO_BATCHES,
        num_stages=num_ranks * stages_per_rank,
        schedule=schedule,
        stages_per_rank=stages_per_rank,
        loss_fn=case.loss_fn,
    )
    result = pipe.step(**case.arguments(case.make_batch(2 * NUM_MICRO_BATCHES, 1)))
    return result.loss, {n: p.grad for n, p in pipe.named_parameters() if p.grad is not None}


QUICK = {("t5", "dualpipe-v")}
RUNS = [
    pytest.param(name, setup, marks=[] if (name, setup) in QUICK else [pytest.mark.slow])
    for name in MODELS
    for setup in SETUPS
]


@pytest.mark.parametrize(("name", "setup"), RUNS)
def test_hugging_face_gradients_are_those_of_the_plain_model(name: str, setup: str) -> None:
    case = MODELS[name]
    torch.manual_seed(0)
    model = case.build()
    batch = case.make_batch(2 * NUM_MICRO_BATCHES, 1)
    expected_loss, expected = reference(case, copy.deepcopy(model), batch, NUM_MICRO_BATCHES)
    found = run_ranks(hugging_face_step, SETUPS[setup][1], name, setup, timeout_s=120)
    [loss] = [loss for loss, _ in found if loss is not None]
    torch.testing.assert_close(loss, expected_loss)
    assert set().union(*(gradients for _, gradients in found)) == set(expected)
    for _, gradients in found:
        for parameter, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[parameter], rtol=1e-5, atol=1e-7)


def disagree() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    pipe = wholestep.pipeline(model, num_micro_batches=2, num_stages=2, loss_fn=lambda out, _: out.square().mean())
    pipe.step(torch.randn(4 + 4 * dist.get_rank(), 4))


def too_many_stages() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 1))
    pipe = wholestep.pipeline(model, num_micro_batches=2, num_stages=3, loss_fn=lambda out, _: out.square().mean())
    pipe.step(torch.randn(4, 4))


def test_ranks_that_disagree_are_told_so_before_anything_is_sent() -> None:
    with pytest.raises(RanksFailed, match="the number of rows is 4 on rank 0 and 8 on rank 1 in call 1"):
        run_ranks(disagree, 2)


def test_a_schedule_that_does_not_fit_the_job_is_refused() -> None:
    with pytest.raises(RanksFailed, match="a schedule for 3 ranks does not fit a job of 2"):
        run_ranks(too_many_stages, 2)
