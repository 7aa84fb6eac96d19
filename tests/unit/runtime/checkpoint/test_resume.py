"""A run that is saved, ended and resumed goes on as if nothing had happened, bit for bit."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.parity import differences
from tests.training_runs import Run
from tests.twins import World, observe
from torch import nn
from torch.optim import Optimizer

import wholestep
from wholestep.runtime.checkpoint.ranks import warn_of_the_dead
from wholestep.runtime.checkpoint.writing import Draft
from wholestep.runtime.held import GuardedParameter
from wholestep.zoo.optimizers import OPTIMIZERS


def test_a_resumed_run_is_the_unbroken_one(tmp_path: Path) -> None:
    expected = Run()
    expected.train(0, 9)
    losses: dict[int, float] = {}
    for seed, last in ((0, 3), (7, 7), (8, 9)):  # each life has other weights until it resumes
        run, checkpoints = Run(seed=seed), wholestep.Checkpoints(tmp_path)
        done = checkpoints.resume(**run.state)
        assert done == max(losses, default=-1) + 1
        run.train(done, last)
        checkpoints.save(last, **run.state)
        checkpoints.wait()
        losses |= run.losses
        assert run.step.num_captures == 1
    assert losses == expected.losses
    assert not differences(expected.seen(), run.seen())


def small_life(name: str) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Flatten(), nn.Linear(3, 2))
    model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    return model, OPTIMIZERS[name](model.parameters())


def train_eagerly(model: nn.Module, optimizer: Optimizer, steps: range) -> None:
    for number in steps:
        optimizer.zero_grad()
        images = torch.randn(4, 2, 2, 2, generator=torch.Generator().manual_seed(number))
        model(images).square().mean().backward()
        optimizer.step()


def all_optimizers() -> dict[str, Any]:
    """A model and its optimizer for each kind of optimizer, under names of their own."""
    lives = {name: small_life(name) for name in OPTIMIZERS}
    return {
        f"{name}_{kind}": value for name, life in lives.items() for kind, value in zip(("model", "optimizer"), life)
    }


def test_state_of_every_optimizer_comes_back(tmp_path: Path) -> None:
    """Values, options, and the way tensors lie in memory: that of channels last would be lost otherwise."""
    first, second = all_optimizers(), all_optimizers()
    for name in OPTIMIZERS:
        train_eagerly(first[f"{name}_model"], first[f"{name}_optimizer"], range(2))
    wholestep.Checkpoints(tmp_path).save(2, **first, wait=True)
    assert wholestep.Checkpoints(tmp_path).resume(**second) == 2
    for steps in (range(2, 4), range(0)):
        worlds = [observe(World(**state)) for state in (first, second)]
        without = [{key: value for key, value in world.items() if not key.endswith(".grad")} for world in worlds]
        assert not differences(*without)
        strides = [{key: value.stride() for key, value in world.items()} for world in without]
        assert strides[0] == strides[1]
        for name, state in ((name, state) for name in OPTIMIZERS for state in (first, second)):
            train_eagerly(state[f"{name}_model"], state[f"{name}_optimizer"], steps)


def test_state_lies_in_memory_as_its_parameter_does_here(tmp_path: Path) -> None:
    """A run in channels last goes on with a checkpoint of one that was not."""
    (source, optimizer), (model, fresh) = small_life("adam"), small_life("adam")
    source.to(memory_format=torch.contiguous_format)  # pyright: ignore[reportCallIssue]
    train_eagerly(source, optimizer, range(1))
    wholestep.Checkpoints(tmp_path).save(1, model=source, optimizer=optimizer, wait=True)
    wholestep.Checkpoints(tmp_path).resume(model=model, optimizer=fresh)
    states = [next(iter(each.state.values()))["exp_avg"] for each in (optimizer, fresh)]
    assert torch.equal(*states)
    assert states[1].stride() == next(model.parameters()).stride() != states[0].stride()


def test_what_is_pending_is_applied_before_it_is_saved(tmp_path: Path) -> None:
    plain = Run(options={"cross_iteration": "none"})
    plain.train(0, 2)
    expected = without_gradients(plain)
    run = Run()
    weight = run.model.hidden.weight
    run.train(0, 2)
    assert type(weight) is GuardedParameter
    wholestep.Checkpoints(tmp_path).save(2, **run.state, wait=True)
    assert type(weight) is nn.Parameter
    fresh = Run()
    wholestep.Checkpoints(tmp_path).resume(**fresh.state)
    assert not differences(expected, without_gradients(fresh))


def without_gradients(run: Run) -> dict[str, torch.Tensor]:
    return {name: value for name, value in run.seen().items() if not name.endswith(".grad")}


def test_resuming_in_the_middle_of_a_run(tmp_path: Path) -> None:
    """Going back to a checkpoint drops the update that is pending, and needs no new capture."""
    run, checkpoints = Run(), wholestep.Checkpoints(tmp_path)
    run.train(0, 4)
    checkpoints.save(4, **run.state)
    run.train(4, 7)
    ahead = dict(run.losses)
    assert checkpoints.resume(**run.state) == 4
    assert run.position["seen"] == [3, 4]
    run.train(4, 7)
    assert run.losses == ahead
    assert run.step.num_captures == 1


def test_a_snapshot_is_of_the_moment_it_was_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training goes on, in place, while the writer has not even begun."""
    finish, gate = Draft.finish, threading.Event()

    def held(draft: Draft) -> Path:
        assert gate.wait(30)
        return finish(draft)

    monkeypatch.setattr(Draft, "finish", held)
    run, checkpoints = Run(), wholestep.Checkpoints(tmp_path)
    run.train(0, 2)
    checkpoints.save(2, **run.state)
    run.train(2, 5)
    gate.set()
    checkpoints.wait()
    fresh = Run()
    assert wholestep.Checkpoints(tmp_path).resume(**fresh.state) == 2
    assert fresh.position["seen"] == [1, 2]
    fresh.train(2, 5)
    assert fresh.losses == {number: run.losses[number] for number in (2, 3, 4)}


def test_every_random_number_generator_goes_on(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    random.seed(3)
    np.random.seed(4)
    torch.manual_seed(5)
    wholestep.Checkpoints(tmp_path).save(1, model=model, wait=True)
    expected = (torch.rand(2).tolist(), random.random(), np.random.rand(), random.gauss(0, 1), np.random.randn())
    wholestep.Checkpoints(tmp_path).resume(model=model)
    assert (
        torch.rand(2).tolist(),
        random.random(),
        np.random.rand(),
        random.gauss(0, 1),
        np.random.randn(),
    ) == expected


@pytest.mark.parametrize(
    ("restarts", "is_shared", "is_told"), [("3", "True", True), ("3", "False", False), ("0", "True", False)]
)
def test_restarts_that_would_fail_are_told(
    restarts: str,
    is_shared: str,
    is_told: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", restarts)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", is_shared)
    warn_of_the_dead()
    assert ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in caplog.text) is is_told


def test_without_a_checkpoint_nothing_is_done(tmp_path: Path) -> None:
    run = Run()
    before = run.seen()
    assert wholestep.Checkpoints(tmp_path / "none").resume(**run.state) == 0
    assert not differences(before, run.seen())
    assert not (tmp_path / "none").exists()


def test_as_a_context_it_waits(tmp_path: Path) -> None:
    with wholestep.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, position={"seen": 1})
    position: dict[str, int] = {}
    assert checkpoints.resume(position=position) == 1
    assert position == {"seen": 1}
