"""Ranks while updates wait for their gradients: peers that die, processes that are forked (ITER-7, P1, P4).

The gradient here is 1 for every element on every rank, so that with a learning rate of 1 each parameter is the number
of updates it has had.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.distributed.ranks import RanksFailed, run_ranks
from tests.waiting import is_anything_waiting
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader, Dataset

import wholestep
from wholestep.errors import RankError

pytestmark = pytest.mark.distributed

MOST_STEPS = 100_000


class Counters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.counters = nn.ParameterList([nn.Parameter(torch.zeros(300)) for _ in range(6)])

    def forward(self, x: Tensor) -> Tensor:
        total = x.sum() * 0
        for counter in self.counters:
            total = total + (counter * x).sum()
        return total


def count(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = -model(x)
    loss.backward()
    optimizer.step()
    return loss


class Training:
    """A training of several buckets, all of which wait."""

    def __init__(self) -> None:
        self.model = Counters()
        self.optimizer = SGD(self.model.parameters(), lr=1.0, momentum=0.0)
        self.held = list(self.model.parameters())
        self.compiled: Any = wholestep.compile(count, data_parallel="replicate", cross_iteration="all", bucket_mb=0.002)

    def step(self) -> None:
        self.compiled(self.model, self.optimizer, torch.ones(300))


def _seen(read: Callable[[], Any]) -> float | str:
    """A value, or the error that says which update is missing."""
    try:
        return float(read())
    except RankError as error:
        return str(error)


def _outlive(seed: int, file: Path) -> None:
    """Train until rank 1 is killed; rank 0 writes down how many calls returned, what it was told and what it sees."""
    training = Training()
    for _ in range(4):
        training.step()
    if dist.get_rank() == 1:
        seconds = random.Random(seed).uniform(0.0, 0.05)
        threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
    num_returned, told = 4, ""
    while not told and num_returned < MOST_STEPS:
        try:
            training.step()
            num_returned += 1
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
    seen: list[list[float | str]] = []
    for _ in range(2):
        seen.append([_seen(lambda counter=counter: counter.detach()[0]) for counter in training.held])
        seen.append([_seen(lambda counter=counter: counter.data[0]) for counter in training.held])
        seen.append([_seen(lambda: training.model.state_dict()["counters.0"][0])])
        seen.append([_seen(lambda: training.model.counters[5].sum() / 300)])
    file.write_text(json.dumps([num_returned, told, seen]))


@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(s, marks=pytest.mark.slow) for s in range(2, 20))])
def test_a_peer_is_killed(seed: int, tmp_path: Path) -> None:
    """P1: on the rank that is left, whole updates, or each read says which one is missing."""
    file = tmp_path / "seen.json"
    with pytest.raises(RanksFailed) as failed:
        run_ranks(_outlive, 2, seed, file)
    assert set(failed.value.failures) == {1}, failed.value
    num_returned, told, seen = json.loads(file.read_text())
    assert told
    values = {value for read in seen for value in read}
    if any(isinstance(value, str) for value in values):
        [message] = values
        assert f"the update of call {num_returned} of count is missing" in message
    else:
        [number] = values
        assert number in (num_returned, num_returned + 1)


class Look(Dataset[float]):
    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> float:
        return float(sum(counter.detach().mean() for counter in self.model.parameters()))


def _load_while_waiting() -> list[float]:
    # The processes of ranks are daemons, which are not allowed children.
    multiprocessing.current_process()._config["daemon"] = False  # pyright: ignore
    training = Training()
    found: list[float] = []
    for _ in range(2):
        training.step()
        training.step()
        assert is_anything_waiting()
        fork = multiprocessing.get_context("fork")
        loader = DataLoader(Look(training.model), batch_size=1, num_workers=2, multiprocessing_context=fork)
        found += [float(batch) for batch in loader]
    training.compiled.flush()
    return [*found, float(training.held[0].detach()[0])]


@pytest.mark.filterwarnings("ignore:.*use of fork.. may lead to deadlocks:DeprecationWarning")
def test_loaders_that_look_at_the_model() -> None:
    """P4: a forked process has no connection to other ranks, and must not need one."""
    assert run_ranks(_load_while_waiting, 2) == [[12.0, 12.0, 24.0, 24.0, 4.0]] * 2
