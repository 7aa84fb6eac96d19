"""Updates that wait for the next step are never seen missing (ITER-5): each way of looking, changing and leaving.

A scenario is played by eager, or DDP, and by a compiled step that moves all it can into the next iteration; what they
saw on the way and everything at the end must be equal, bit for bit. `Trainer.aliases` are the parameters' memory: where
only that is looked at, nothing can apply pending work in the last moment.
"""

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.distributed.ranks import run_ranks
from tests.distributed.reference import (
    Eager,
    MakeSide,
    Scenario,
    Side,
    Trainer,
    compare_scenario,
    ddp_side,
    eager_side,
    wholestep_side,
)
from tests.distributed.scenarios import FUSED, IN_ONE_PROCESS, ON_RANKS, SCENARIOS, three_steps_and_no_more
from tests.distributed.trainings import Training, get_case
from torch import Tensor, nn
from torch.optim import Optimizer

from wholestep.zoo import Batch

pytestmark = pytest.mark.distributed

ONE_PROCESS: Callable[..., MakeSide] = partial(partial, wholestep_side, data_parallel=None, cross_iteration="all")
TWO_RANKS: Callable[..., MakeSide] = partial(partial, wholestep_side, cross_iteration="all")


def assert_no_differences(*by_rank: list[str]) -> None:
    lines = [f"rank {rank}: {line}" for rank, differing in enumerate(by_rank) for line in differing]
    if lines:
        raise AssertionError("\n  ".join(["not what eager, or DDP, computes", *lines]))


@pytest.mark.sample(15)
@pytest.mark.parametrize("name", SCENARIOS | IN_ONE_PROCESS)
def test_in_one_process(name: str) -> None:
    scenario, training = (SCENARIOS | IN_ONE_PROCESS)[name]
    assert_no_differences(compare_scenario(scenario, training, eager_side, ONE_PROCESS()))


@pytest.mark.sample(15)
@pytest.mark.parametrize("name", SCENARIOS | ON_RANKS)
def test_on_two_ranks(name: str) -> None:
    scenario, training = (SCENARIOS | ON_RANKS)[name]
    assert_no_differences(*run_ranks(compare_scenario, 2, scenario, training, ddp_side, TWO_RANKS()))


@pytest.mark.sample(2)
@pytest.mark.parametrize("step", ["plain", "clip_norm", "accumulate"])
@pytest.mark.parametrize("moved", ["auto", "all"])
def test_max_iters_ends_with_everything_applied(step: str, moved: str) -> None:
    training = Training(step=step)
    alone = ONE_PROCESS(cross_iteration=moved, max_iters=3)
    assert_no_differences(compare_scenario(three_steps_and_no_more, training, eager_side, alone))
    ranked = TWO_RANKS(cross_iteration=moved, max_iters=3)
    assert_no_differences(*run_ranks(compare_scenario, 2, three_steps_and_no_more, training, ddp_side, ranked))


def _num_ops_of_flush(make_side: MakeSide) -> int:
    trainer = Trainer(FUSED, make_side)
    trainer.steps(3)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        trainer.compiled.flush()
    return sum(event.name.startswith("aten::_fused_adamw") for event in profiler.events() or [])


def test_there_is_something_pending_to_be_found() -> None:
    """Otherwise all other tests here would pass without looking."""
    assert _num_ops_of_flush(ONE_PROCESS()) >= 1
    assert min(run_ranks(_num_ops_of_flush, 2, TWO_RANKS())) >= 2
    assert run_ranks(_num_ops_of_flush, 2, TWO_RANKS(cross_iteration="none")) == [0, 0]


class _Leaky(Eager):
    """Applies an update when the next step begins, when flushed and after the last step, and at no other time."""

    def __init__(self, training: Training) -> None:
        self._case = get_case(training.case)
        self._pending: tuple[nn.Module, Optimizer, list[Tensor | None]] | None = None

    def __call__(self, model: nn.Module, optimizer: Optimizer, batch: Batch, last: bool = False) -> Tensor:
        self.flush()
        optimizer.zero_grad()
        loss = self._case.loss(model, batch)
        loss.backward()
        for parameter in model.parameters():
            if parameter.grad is not None and dist.is_initialized():
                dist.all_reduce(parameter.grad.div_(dist.get_world_size()))
        self._pending = model, optimizer, [parameter.grad for parameter in model.parameters()]
        # Schedulers warn if they are stepped first; that is not how a leak should be found.
        optimizer._opt_called = True  # pyright: ignore[reportAttributeAccessIssue]
        if last:
            self.flush()
        return loss

    def flush(self) -> None:
        if self._pending is None:
            return
        model, optimizer, gradients = self._pending
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
        self._pending = None

    def __exit__(self, *exception: object) -> None:
        self.flush()


def _leaky_side(train_step: Callable[..., Any], model: nn.Module, training: Training) -> Side:
    return Side(_Leaky(training), model)


def _flushed_at_the_end(trainer: Trainer, scenario: Scenario) -> None:
    """Play a scenario such that only what it sees on the way, or does, can tell the sides apart."""
    scenario(trainer)
    if trainer.compiled is not None:
        trainer.compiled.flush()


# These do not depend on when an update is applied, or use another step than the leaky one has.
BLIND = {
    "gradients",
    "gradients of a clipped step",
    "other batch sizes",
    "two steps share a model",
    "flush()",
    "with block",
    "last=True",
    "last=True at once",
    "the user raises midway",
    "a batch that does not fit",
    "a token out of range",
    "a target out of range",
    "the first step fails",
    "only rank 1 evaluates",
    "another model",
    "parameters added midway",
    "frozen midway",
}


@pytest.mark.parametrize("name", [name for name in SCENARIOS | IN_ONE_PROCESS if name not in BLIND])
def test_a_step_that_leaks_is_found(name: str) -> None:
    scenario, training = (SCENARIOS | IN_ONE_PROCESS)[name]
    observed = partial(_flushed_at_the_end, scenario=scenario)
    assert compare_scenario(observed, training, eager_side, eager_side) == []
    assert compare_scenario(observed, training, eager_side, _leaky_side) != []


@pytest.mark.parametrize("name", [name for name in SCENARIOS | ON_RANKS if name not in BLIND])
@pytest.mark.slow
def test_a_step_that_leaks_is_found_on_ranks(name: str) -> None:
    scenario, training = (SCENARIOS | ON_RANKS)[name]
    observed = partial(_flushed_at_the_end, scenario=scenario)
    assert run_ranks(compare_scenario, 2, observed, training, ddp_side, ddp_side) == [[], []]
    assert run_ranks(compare_scenario, 2, observed, training, ddp_side, _leaky_side) != [[], []]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("num_ranks", "how", "code"),
    [
        (1, "raise", 1),
        pytest.param(1, "return", 0, marks=pytest.mark.slow),
        pytest.param(2, "return", 0, marks=pytest.mark.slow),
        (2, "destroy", 0),
        pytest.param(1, "sys.exit", 3, marks=pytest.mark.slow),
        pytest.param(2, "raise", 1, marks=pytest.mark.slow),
    ],
)
def test_leaving_the_interpreter(num_ranks: int, how: str, code: int, tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.distributed.leave", str(rank), str(num_ranks), str(tmp_path), how],
            cwd=root,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    try:
        printed = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    found = [(tmp_path / f"found{rank}.txt") for rank in range(num_ranks)]
    assert all(file.exists() for file in found), "\n".join(printed)
    assert [file.read_text() for file in found] == ["equal"] * num_ranks, "\n".join(printed)
    assert [process.returncode for process in processes] == [code] * num_ranks, "\n".join(printed)
