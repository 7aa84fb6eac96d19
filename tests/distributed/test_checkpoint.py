"""Checkpoints of several ranks: resumed bit for bit, on more or fewer ranks, after the death of one of them."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.distributed.ranks import RanksFailed, run_ranks
from tests.parity import differences
from tests.training_runs import Run, TiedNet, newest
from torch import Tensor, nn

import wholestep
from wholestep.errors import CheckpointError
from wholestep.runtime.checkpoint.reading import Archive
from wholestep.runtime.checkpoint.writing import Draft

pytestmark = pytest.mark.distributed

ROTATED = {"data_parallel": "replicate", "cross_iteration": "all"}


def life(folder: Path, last: int, options: dict[str, Any], dropout: float = 0.2, every: int = 1000) -> Run:
    """Resume, train up to step `last`, save."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    run = Run(options=options, dropout=dropout, seed=rank)  # ranks draw different masks
    with wholestep.Checkpoints(folder, keep=2) as checkpoints:
        done = checkpoints.resume(**run.state)
        for first in range(done, last, every):
            run.train(first, min(first + every, last))
            checkpoints.save(min(first + every, last), **run.state)
    return run


def broken_and_unbroken(folder: Path) -> tuple[dict[int, float], dict[int, float], list[str]]:
    """Losses of a run that goes on after it has saved, of one that resumes there, and in what else they differ."""
    expected = Run(options=ROTATED, seed=dist.get_rank())
    expected.train(0, 3)
    wholestep.Checkpoints(folder).save(3, **expected.state, wait=True)
    expected.train(3, 8)
    found = life(folder, 8, ROTATED)
    return expected.losses, found.losses, differences(expected.seen(), found.seen())


def test_two_ranks_go_on_bit_for_bit(tmp_path: Path) -> None:
    for rank, (expected, found, differing) in enumerate(run_ranks(broken_and_unbroken, 2, tmp_path)):
        assert found == {number: expected[number] for number in range(3, 8)}
        # Running statistics are each rank's own, as in DDP; those of rank 0 are kept.
        assert all("norm.running_" in line for line in differing) if rank else not differing
    sizes = [file.stat().st_size for file in sorted(newest(tmp_path).glob("*.distcp"))]
    assert len(sizes) == 2
    assert max(sizes) < 3 * min(sizes)  # ranks share the writing


def losses_of_life(folder: Path, last: int) -> dict[int, float]:
    options = ROTATED if dist.is_initialized() else {}
    return life(folder, last, options, dropout=0.0).losses


def test_on_two_then_four_ranks_then_one(tmp_path: Path) -> None:
    """The same global batch: the mean of the losses of all ranks is the loss of one process."""
    expected = Run(options={}, dropout=0.0)
    expected.train(0, 9)
    found: dict[int, float] = {}
    for num_ranks, last in ((2, 3), (4, 6), (1, 9)):
        if num_ranks == 1:
            by_rank = [losses_of_life(tmp_path, last)]
        else:
            by_rank = run_ranks(losses_of_life, num_ranks, tmp_path, last)
        assert all(sorted(losses) == list(range(last - 3, last)) for losses in by_rank)
        found |= {number: sum(losses[number] for losses in by_rank) / num_ranks for number in by_rank[0]}
    # Sums in another order, over nine steps: float32 has an epsilon of 1.2e-7.
    assert found == pytest.approx(expected.losses, rel=1e-6)
    assert found != pytest.approx(losses_without_resuming(), rel=1e-3)


def losses_without_resuming() -> dict[int, float]:
    """What would come of it if every life began anew."""
    losses: dict[int, float] = {}
    for first in (0, 3, 6):
        run = Run(options={}, dropout=0.0)
        run.train(first, first + 3)
        losses |= run.losses
    return losses


def own_things(folder: Path) -> tuple[str, dict[str, int], int]:
    """A dict that differs, saved as if it did not; the same saved for each rank; resumed on all."""
    rank = dist.get_rank()
    checkpoints = wholestep.Checkpoints(folder)
    with pytest.raises(CheckpointError) as caught:
        checkpoints.save(1, loader={"offset": 10 * rank})
    checkpoints.save(2, common={"a": 1}, per_rank={"loader": {"offset": 10 * rank}}, wait=True)
    loader: dict[str, int] = {}
    step = checkpoints.resume(common={}, per_rank={"loader": loader})
    return str(caught.value), loader, step


def test_what_ranks_have_of_their_own(tmp_path: Path) -> None:
    for rank, (message, loader, step) in enumerate(run_ranks(own_things, 2, tmp_path)):
        assert "'loader.offset' is not the same on ranks 0 and 1" in message
        assert "per_rank={...}" in message
        assert (loader, step) == ({"offset": 10 * rank}, 2)
    with pytest.raises(CheckpointError, match="saved by 2 ranks and there are 1"):
        wholestep.Checkpoints(tmp_path).resume(common={}, per_rank={"loader": {}})


def other_steps(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        wholestep.Checkpoints(folder).save(5 + dist.get_rank(), extra={"a": 1})
    return str(caught.value)


def test_ranks_save_the_same_step(tmp_path: Path) -> None:
    for message in run_ranks(other_steps, 2, tmp_path):
        assert message.endswith("it saves step 6 while rank 0 saves step 5")


def saved_by_some(folder: Path) -> list[str]:
    """What save says if ranks have other keys, if one module refuses to load, if only rank 0 saves."""
    rank, texts = dist.get_rank(), list[str]()

    def noted(call: Callable[[], Any]) -> None:
        try:
            call()
            texts.append("")
        except CheckpointError as error:
            texts.append(str(error))

    checkpoints = wholestep.Checkpoints(folder)
    noted(lambda: checkpoints.save(1, wait=True, note={"a": 1} if rank == 0 else {"a": 1, "b": 2}))
    model = nn.Linear(2, 2)
    checkpoints.save(2, wait=True, model=model)
    if rank == 1:
        model.register_load_state_dict_post_hook(_refuse)
    with torch.no_grad():
        before = model.weight.fill_(rank).clone()
    noted(lambda: checkpoints.resume(model=model))
    texts.append("kept" if torch.equal(model.weight, before) else "changed")
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1))  # pyright: ignore[reportPrivateUsage]
    if rank == 0:
        noted(lambda: checkpoints.save(3, note={}))
    return texts


def _refuse(*_: Any) -> None:
    raise KeyError("a hook refuses")


def test_what_only_some_ranks_do_is_told(tmp_path: Path) -> None:
    """Not a hang, not the union of what they have, not half of them loaded."""
    first, second = run_ranks(saved_by_some, 2, tmp_path)
    for texts in (first, second):
        assert "'note.b' is there on rank 1 and not on rank 0" in texts[0]
        assert "a hook refuses" in texts[1]
        assert texts[2] == "kept"
    assert "rank 1 does not take part in Checkpoints.save" in first[3]


def one_rank_cannot(folder: Path, monkey: str) -> list[str]:
    """Rank 1 fails at one point or another; what each rank raises, and that the next save works."""
    checkpoints, messages = wholestep.Checkpoints(folder), list[str]()
    good, bad = {"extra": {"a": 1}}, {"extra": {"a": object() if dist.get_rank() else 1}}
    write = Draft._write

    def fail(self: Draft) -> Any:
        raise OSError("the disk is full")

    if monkey == "write" and dist.get_rank() == 1:
        Draft._write = fail
    try:
        checkpoints.save(1, **(bad if monkey == "collect" else good), wait=True)
    except CheckpointError as error:
        messages.append(str(error))
    finally:
        Draft._write = write
    checkpoints.save(2, **good, wait=True)
    return [*messages, *sorted(path.name for path in folder.glob("step-*"))]


@pytest.mark.parametrize(("moment", "cause"), [("write", "rank 1: the disk is full"), ("collect", "is a object")])
def test_what_one_rank_cannot_save_no_rank_saves(moment: str, cause: str, tmp_path: Path) -> None:
    for message, *names in run_ranks(one_rank_cannot, 2, tmp_path, moment):
        assert cause in message
        assert names == ["step-00000002"]


def resume_torn(folder: Path) -> tuple[int, str]:
    """A checkpoint whose second file is torn, which only one rank looks at, and one that does not fit on one rank."""
    run = Run(options={})
    step = wholestep.Checkpoints(folder).resume(**run.state)
    model = run.model if dist.get_rank() else nn.Linear(1, 1)
    with pytest.raises(CheckpointError) as caught:
        wholestep.Checkpoints(folder).resume(model=model)
    return step, str(caught.value)


def test_ranks_take_the_same_checkpoint_or_none(tmp_path: Path) -> None:
    run_ranks(life_for_nothing, 2, tmp_path)
    second = newest(tmp_path) / "__1_0.distcp"
    second.write_bytes(second.read_bytes()[:-1] + b"x")
    found = run_ranks(resume_torn, 2, tmp_path)
    assert [step for step, _ in found] == [2, 2]
    assert all("it has no model.bias" in message for _, message in found)


def life_for_nothing(folder: Path) -> None:
    run, checkpoints = Run(options={}), wholestep.Checkpoints(folder)
    for step in (2, 4):
        checkpoints.save(step, **run.state, wait=True)


class Blocks(nn.Sequential):
    """Something to cut, with an embedding that the first and the last stage share, batch norm and dropout."""

    def __init__(self) -> None:
        middle = [nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 8), nn.BatchNorm1d(8)]
        super().__init__(nn.Linear(8, 8, bias=False), *middle, nn.Linear(8, 8, bias=False))
        self[-1].weight = self[0].weight


def pipelined(folder: Path, last: int) -> tuple[list[float], dict[str, Tensor]]:
    """A life of a pipeline over the ranks there are, or in one process; losses of the rank that has them."""
    torch.manual_seed(0)
    model = Blocks()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    pipe = wholestep.pipeline(model, num_stages=2, num_micro_batches=2, loss_fn=nn.functional.mse_loss)
    checkpoints, losses = wholestep.Checkpoints(folder), list[float]()
    for number in range(checkpoints.resume(model=pipe, optimizer=optimizer), last):
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(number))
        optimizer.zero_grad()
        result = pipe.step(x, target=x.flip(1))
        optimizer.step()
        losses += [] if result.loss is None else [result.loss.item()]
    checkpoints.save(last, model=pipe, optimizer=optimizer, wait=True)
    return losses, model.state_dict()


def test_a_pipeline_goes_on_and_its_checkpoint_is_the_models(tmp_path: Path) -> None:
    expected, weights = pipelined(tmp_path / "unbroken", 6)
    lives = [run_ranks(pipelined, 2, tmp_path / "run", last) for last in (3, 6)]
    found = [loss for by_rank in lives for losses, _ in by_rank for loss in losses]
    assert found == pytest.approx(expected, rel=1e-6)
    plain = Blocks()
    optimizer = torch.optim.AdamW(plain.parameters())
    wholestep.load_checkpoint(newest(tmp_path / "run"), model=plain, optimizer=optimizer)
    assert not differences(weights, plain.state_dict(), rtol=1e-5, atol=1e-6)
    assert len(optimizer.state) == len(list(plain.parameters()))
    state = Archive(newest(tmp_path / "run")).read([("optimizer",)])["optimizer"]["state"]
    assert {name: float(entry["step"]) for name, entry in state.items()} == dict.fromkeys(state, 6.0)


def life_with_a_death(folder: Path, victim: int, delay_s: float) -> None:
    """Train with checkpoints every other step; one rank is killed at some moment behind the first checkpoint."""

    def die() -> None:
        while not list(folder.glob("step-*")):
            time.sleep(0.01)
        time.sleep(delay_s)
        os.kill(os.getpid(), signal.SIGKILL)

    if dist.get_rank() == victim:
        threading.Thread(target=die).start()
    life(folder, 10_000, ROTATED, every=2)


def resumed_and_unbroken(folder: Path, last: int) -> tuple[dict[int, float], dict[int, float]]:
    unbroken = Run(options=ROTATED, seed=dist.get_rank())
    unbroken.train(0, last)
    return life(folder, last, ROTATED, every=2).losses, unbroken.losses


def test_a_rank_is_killed_and_the_run_goes_on(tmp_path: Path) -> None:
    chance = random.Random(5)
    with pytest.raises(RanksFailed) as caught:
        run_ranks(life_with_a_death, 2, tmp_path, chance.randrange(2), 0.2 * chance.random())
    assert "died with exit code -9" in str(caught.value)
    complete = [path for path in tmp_path.glob("step-*") if (path / "manifest.json").exists()]
    first = max(int(path.name[5:13]) for path in complete)
    for found, expected in run_ranks(resumed_and_unbroken, 2, tmp_path, first + 4):
        assert found == {number: expected[number] for number in range(first, first + 4)}


def test_the_model_of_these_tests_has_what_matters() -> None:
    model = TiedNet()
    assert model.head.weight is model.embedding.weight
    assert not model.hidden.bias.requires_grad
    assert {"norm.running_mean"} <= set(model.state_dict())
    assert "scratch" in dict(model.named_buffers())
