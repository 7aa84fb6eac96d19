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
from datetime import timedelta
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
from wholestep.errors import CheckpointError, RankError
from wholestep.runtime import data_parallel

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
        seen.append([_seen(lambda: training.model.counters[5].detach().sum() / 300)])
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
        missing = f"the update of call {num_returned} of count is missing"
        assert all(isinstance(value, str) and missing in value for value in values), values
    else:
        [number] = values
        assert number in (num_returned, num_returned + 1)


def _outlive_where_ranks_compare(file: Path) -> None:
    """Rank 1 is gone between its word and the comparison of options, which is in the fourth call."""

    def die(number: int) -> bool:
        if number == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return is_due(number)

    training, is_due = Training(), data_parallel.is_due
    if dist.get_rank() == 1:
        data_parallel.is_due = die
    for _ in range(3):
        training.step()
    with pytest.raises(RankError) as told:
        training.step()
    file.write_text(str(told.value))


def test_a_peer_is_gone_where_ranks_compare(tmp_path: Path) -> None:
    """The connection tells at once; the job's store would have been waited at until the group's time-out."""
    file = tmp_path / "told.txt"
    with pytest.raises(RanksFailed) as failed:
        run_ranks(_outlive_where_ranks_compare, 2, file)
    assert set(failed.value.failures) == {1}, failed.value
    assert "waited in vain for the other ranks" in file.read_text()


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


# Ranks that are out of step


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 3)
        self.last = nn.Linear(3, 2)

    def forward(self, rows: Tensor) -> Tensor:
        return self.last(self.table(rows))


def train_rows(model: nn.Module, optimizer: Optimizer, rows: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = model(rows).square().mean()
    loss.backward()
    optimizer.step()
    return loss


GOOD, BAD = torch.tensor([0, 1, 2]), torch.tensor([0, 1, 9])


def _skip_a_batch_on_one_rank(moved: str) -> str:
    """Rank 1 has a batch that fails in the third call before anything is sent, and goes on with the next."""
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=3))  # pyright: ignore[reportPrivateUsage]
    torch.manual_seed(0)
    model = Rows()
    optimizer = SGD(model.parameters(), lr=0.1)
    step = wholestep.compile(train_rows, data_parallel="replicate", cross_iteration=moved)
    for _ in range(2):
        step(model, optimizer, GOOD)
    step.flush()
    if dist.get_rank() == 1:
        with pytest.raises(IndexError):
            step(model, optimizer, BAD)
    try:
        for _ in range(2):
            step(model, optimizer, GOOD)
        step.flush()
    except RankError as error:
        return type(error).__name__
    return ""


@pytest.mark.parametrize("moved", ["none", "all"])
def test_a_rank_that_has_skipped_a_call_sends_nothing_more(moved: str) -> None:
    """Only their order tells what gradients are for: those of the next call would be taken for those of this one."""
    assert run_ranks(_skip_a_batch_on_one_rank, 2, moved) == ["RankError", "RankError"]


def _save_both(folder: Path, lost: nn.Module, other: nn.Module) -> list[str]:
    """A checkpoint of each model, and what all ranks are told."""
    told: list[str] = []
    for step, model in enumerate((other, lost), 1):
        try:
            wholestep.Checkpoints(folder).save(step, model=model, wait=True)
            told.append("")
        except CheckpointError as error:
            told.append(str(error))
    wholestep.load_checkpoint(folder / "step-00000001", model=other)
    return told


def _lose_an_update_and_train_another_model(folder: Path) -> tuple[list[float], list[str]]:
    """Rank 1 leaves after three calls, so that the last update of rank 0 can never come."""
    training = Training()
    local: Any = wholestep.compile(count)
    for _ in range(3):
        training.step()
    if dist.get_rank() == 1:
        training.compiled.flush()
        return [1.0, 2.0, 3.0], _save_both(folder, training.model, Counters())
    waiting = training.compiled._current.rotation.pending
    journal = waiting.begin(waiting._flush)
    journal.tries[min(journal.tries)].append(None)  # as if it had been waited for in vain
    with pytest.raises(RankError, match=r"the update of call 3 of \w+ is missing"):
        training.model.counters[0].sum()
    found: list[float] = []
    other = Counters()
    optimizer = SGD(other.parameters(), lr=1.0)
    for _ in range(3):
        local(other, optimizer, torch.ones(300))
        found.append(float(other.counters[0].detach()[0]))
    with pytest.raises(RankError, match=r"the update of call 3 of \w+ is missing"):
        local(training.model, training.optimizer, torch.ones(300))
    told = _save_both(folder, training.model, other)
    journal.tries[min(journal.tries)].clear()
    training.compiled.flush()
    return found, told


def test_a_lost_update_is_told_to_those_who_need_it_only(tmp_path: Path) -> None:
    """Others can be trained, saved and loaded: who goes on from a checkpoint may do so beside what is lost."""
    for found, (saved, told) in run_ranks(_lose_an_update_and_train_another_model, 2, tmp_path):
        assert found == [1.0, 2.0, 3.0]
        assert saved == ""
        assert "the update of call 3 of " in told
