"""Data parallel on CUDA: NCCL with the one rank a single GPU allows, gloo with two ranks on it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.parity import assert_parity
from torch import multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel

import wholestep
from wholestep import zoo
from wholestep.zoo.optimizers import OPTIMIZERS

pytestmark = pytest.mark.gpu

STEPS = 5


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: zoo.Batch) -> torch.Tensor:
    optimizer.zero_grad()
    loss = zoo.get("gpt").loss(model, batch)
    loss.backward()
    optimizer.step()
    return loss


def worker(rank: int, world: int, backend: str, store: str, cross_iteration: str, optimizer: str) -> None:
    """Train beside DDP and compare losses at every step, parameters, gradients and state at the end."""
    torch.cuda.set_device(0)
    torch.use_deterministic_algorithms(True)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world)
    torch.manual_seed(rank)
    eager = zoo.get("gpt").build().cuda()
    ours = copy.deepcopy(eager)
    wrapped = DistributedDataParallel(eager, device_ids=[0])
    sides: list[tuple[Any, nn.Module, torch.optim.Optimizer]] = [
        (train_step, wrapped, OPTIMIZERS[optimizer](eager.parameters())),
        (
            wholestep.compile(train_step, data_parallel="replicate", bucket_mb=0.01, cross_iteration=cross_iteration),
            ours,
            OPTIMIZERS[optimizer](ours.parameters()),
        ),
    ]
    for number in range(STEPS):
        batch = {key: value.cuda() for key, value in zoo.get("gpt").make_batch(4, 10 * number + rank).items()}
        losses: list[torch.Tensor] = []
        for step, model, opt in sides:
            torch.manual_seed(100 * rank + number)
            losses.append(step(model, opt, batch).detach())
        torch.testing.assert_close(losses[1], losses[0])
    for (name, parameter), other in zip(eager.named_parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(other, parameter, msg=name)
        torch.testing.assert_close(other.grad, parameter.grad, msg=name)
        for key, value in sides[0][2].state[parameter].items():
            torch.testing.assert_close(sides[1][2].state[other][key], value, msg=f"{name}.{key}")
    del wrapped, sides
    dist.destroy_process_group()


@pytest.mark.parametrize("optimizer", ["sgd", "adamw_fused", "adamw_foreach"])
@pytest.mark.parametrize("cross_iteration", ["all", "none", "auto"])
@pytest.mark.parametrize(("backend", "world"), [("nccl", 1), ("gloo", 2)])
def test_parity_with_ddp(tmp_path: Path, backend: str, world: int, cross_iteration: str, optimizer: str) -> None:
    arguments = (world, backend, str(tmp_path / "store"), cross_iteration, optimizer)
    multiprocessing.spawn(worker, arguments, nprocs=world)  # pyright: ignore[reportPrivateImportUsage]


def test_updates_of_the_call_before_on_one_device(deterministic: None) -> None:
    step = assert_parity(
        zoo.get("gpt"),
        "adamw_fused",
        compile_options={"cross_iteration": "all"},
        rtol=1.3e-6,
        atol=1e-5,
        prepare=lambda model: model.cuda(),
    )
    assert step.iteration.flush.num_ops
