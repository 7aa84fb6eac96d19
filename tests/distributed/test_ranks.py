"""The harness itself: ranks answer, fail and hang as they should, and a candidate that is wrong is found out."""

import os
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.distributed import ranks
from tests.distributed.ranks import RanksFailed, run_ranks
from tests.distributed.reference import (
    NUM_STEPS,
    Eager,
    MakeSide,
    Side,
    Trainer,
    assert_ddp_parity,
    compare_scenario,
    ddp_side,
    eager_side,
)
from tests.distributed.trainings import Training, get_case
from torch import Tensor, nn
from torch.optim import Optimizer

from wholestep.zoo import Batch

pytestmark = pytest.mark.distributed


def _describe(factor: int) -> dict[str, Any]:
    total = torch.ones(2) * factor * (dist.get_rank() + 1)
    dist.all_reduce(total)
    return {"rank": dist.get_rank(), "total": total, "threads": torch.get_num_threads(), "pid": os.getpid()}


def _fail(failing: int, hanging: int | None = None) -> None:
    if dist.get_rank() == failing:
        raise KeyError("the label of the batch")
    if dist.get_rank() == hanging:
        time.sleep(1000)
    dist.barrier()


def _hang(hanging: int) -> None:
    print(f"rank {dist.get_rank()} is about to wait")
    if dist.get_rank() == hanging:
        _sleep_for_ever()


def _sleep_for_ever() -> None:
    time.sleep(1000)


def _die(dying: int) -> None:
    if dist.get_rank() == dying:
        os._exit(7)
    dist.barrier()


def _warn() -> None:
    warnings.warn("this is deprecated", DeprecationWarning, stacklevel=1)


def _function() -> Callable[[], None]:
    return lambda: None


def test_every_rank_answers_with_a_process_group_and_one_thread() -> None:
    answers = run_ranks(_describe, 2, 10)
    assert [answer["rank"] for answer in answers] == [0, 1]
    assert all(torch.equal(answer["total"], torch.full((2,), 30.0)) for answer in answers)
    assert [answer["threads"] for answer in answers] == [1, 1]
    assert os.getpid() not in {answer["pid"] for answer in answers}


def test_processes_are_used_again_in_the_same_order() -> None:
    first = [answer["pid"] for answer in run_ranks(_describe, 2, 1)]
    four = run_ranks(_describe, 4, 1)
    second = [answer["pid"] for answer in run_ranks(_describe, 2, 1)]
    assert first == second
    assert len({*first, *(answer["pid"] for answer in four)}) == 6
    assert all(torch.equal(answer["total"], torch.full((2,), 10.0)) for answer in four)


def test_a_rank_that_raises_is_shown_with_its_traceback() -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(_fail, 2, 1)
    assert "KeyError: 'the label of the batch'" in caught.value.failures[1]
    assert "_fail" in caught.value.failures[1]
    assert "--- rank 1 raised" in str(caught.value)
    # Rank 0 waits for rank 1 in the barrier: it fails with gloo's error as soon as its peer has gone.
    assert "hung" not in caught.value.failures[0]


def test_a_rank_that_hangs_after_another_failed_does_not_wait_for_the_time_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ranks, "AFTER_FAILURE_S", 1.0)
    started = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        run_ranks(_fail, 2, 0, 1, timeout_s=300)
    assert time.monotonic() - started < 60
    assert "KeyError" in caught.value.failures[0]
    assert "hung: not done 1 s after rank 0 failed" in caught.value.failures[1]


def test_a_rank_that_hangs_is_named_with_its_stack_and_output_and_replaced() -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(_hang, 2, 1, timeout_s=3)
    assert list(caught.value.failures) == [1]
    assert "hung: not done after 3 s" in caught.value.failures[1]
    assert "_sleep_for_ever" in caught.value.failures[1]
    assert "rank 1 is about to wait" in caught.value.failures[1]
    assert [answer["rank"] for answer in run_ranks(_describe, 2, 1)] == [0, 1]


def test_a_rank_that_dies_is_named_and_replaced() -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(_die, 2, 0)
    assert "died with exit code 7" in caught.value.failures[0]
    assert [answer["rank"] for answer in run_ranks(_describe, 2, 1)] == [0, 1]


def test_a_result_that_cannot_travel_is_an_error_of_its_rank() -> None:
    with pytest.raises(RanksFailed, match="pickle"):
        run_ranks(_function, 2)


def test_warnings_are_errors_on_the_ranks_too() -> None:
    with pytest.raises(RanksFailed, match="DeprecationWarning: this is deprecated"):
        run_ranks(_warn, 2)


@pytest.mark.filterwarnings("ignore:this is deprecated")
def test_a_warning_that_the_test_ignores_is_ignored_on_the_ranks() -> None:
    assert run_ranks(_warn, 2) == [None, None]


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", ["mlp", "resnet"])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ddp_is_equal_to_itself_with_other_buckets(case: str, num_ranks: int) -> None:
    candidates: dict[str, MakeSide] = {"small": partial(ddp_side, bucket_cap_mb=0.004)}
    assert_ddp_parity(Training(case, "sgd"), candidates, plans=("every", "end", "both"), num_ranks=num_ranks)


def _not_reduced(train_step: Callable[..., Any], model: nn.Module, training: Training) -> Side:
    return eager_side(train_step, model, training)


class _ByHand:
    """Data parallelism written out, with one thing wrong."""

    num_captures = 1

    def __init__(self, wrong: str, training: Training) -> None:
        self._wrong = wrong
        self._case = get_case(training.case)
        self._gradients: list[Tensor] = []
        self._num_calls = 0

    def __call__(self, model: nn.Module, optimizer: Optimizer, batch: Batch) -> Tensor:
        self._num_calls += 1
        optimizer.zero_grad()
        loss = self._case.loss(model, batch)
        loss.backward()
        fresh = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        for gradient in fresh:
            dist.all_reduce(gradient.div_(1 if self._wrong == "sum" else dist.get_world_size()))
        if self._wrong == "random numbers":
            torch.rand(1)
        if self._wrong == "late update":
            self._apply_late(model, optimizer, fresh)
        else:
            optimizer.step()
        if self._wrong == "last digit" and self._num_calls == 3:
            self._disturb(model)
        return loss

    def _apply_late(self, model: nn.Module, optimizer: Optimizer, fresh: list[Tensor]) -> None:
        """Apply the gradients of the step before, at the end both: forwards have then read stale parameters."""
        due = [self._gradients] if self._gradients else []
        for gradients in [*due, fresh] if self._num_calls == NUM_STEPS else due:
            for parameter, gradient in zip(model.parameters(), gradients):
                parameter.grad = gradient
            optimizer.step()
        self._gradients = fresh

    def _disturb(self, model: nn.Module) -> None:
        parameter = next(model.parameters())
        with torch.no_grad():
            parameter.view(-1)[0] = torch.nextafter(parameter.view(-1)[0], torch.tensor(100.0))


def _by_hand(train_step: Callable[..., Any], model: nn.Module, training: Training, *, wrong: str) -> Side:
    return Side(_ByHand(wrong, training), model)


@pytest.mark.parametrize("plan", ["every", "end", "both"])
def test_data_parallelism_by_hand_passes(plan: str) -> None:
    assert_ddp_parity(Training(), {"by hand": partial(_by_hand, wrong="")}, plans=(plan,))


@pytest.mark.parametrize("wrong", ["sum", "random numbers", "last digit"])
@pytest.mark.parametrize("plan", ["every", "end"])
def test_a_wrong_candidate_is_found(wrong: str, plan: str) -> None:
    with pytest.raises(AssertionError, match="not what DDP computes") as caught:
        assert_ddp_parity(Training(optimizer="sgd"), {"wrong": partial(_by_hand, wrong=wrong)}, plans=(plan,))
    assert f"rank 0: wrong, {plan}: step" in str(caught.value)
    assert f"rank 1: wrong, {plan}: step" in str(caught.value)


def test_gradients_that_are_not_reduced_are_found_in_the_first_step() -> None:
    with pytest.raises(AssertionError, match=r"rank 1: local, every: step 1: grad\.hidden\.0\.weight"):
        assert_ddp_parity(Training(), {"local": _not_reduced}, plans=("every",))


def test_an_update_that_a_forward_did_not_see_is_found_in_the_loss() -> None:
    with pytest.raises(AssertionError, match="rank 0: late, end: step 2: output: max abs difference"):
        assert_ddp_parity(Training(), {"late": partial(_by_hand, wrong="late update")}, plans=("end",))


def _look_on_the_way(trainer: Trainer) -> None:
    trainer.steps(2)
    trainer.see("first parameter", next(trainer.model.parameters()))
    trainer.steps(1)
    trainer.compiled.flush()
    with trainer.compiled:
        trainer.step(last=True)
    trainer.see("memory", trainer.aliases)


def test_a_scenario_is_compared_on_the_way_and_at_the_end() -> None:
    same = run_ranks(compare_scenario, 2, _look_on_the_way, Training(), ddp_side, ddp_side)
    assert same == [[], []]
    others = run_ranks(compare_scenario, 2, _look_on_the_way, Training(), ddp_side, eager_side)
    for lines in others:
        assert lines[0].startswith("step 2: : max abs difference")
        assert any(line.startswith("first parameter: ") for line in lines)


def test_a_scenario_needs_no_process_group() -> None:
    assert compare_scenario(_look_on_the_way, Training(), eager_side, eager_side) == []
    assert not dist.is_initialized()


def test_eager_has_the_handles_of_a_compiled_step() -> None:
    calls: list[int] = []
    eager = Eager(calls.append)
    with eager:
        eager(3, last=True)
    eager.flush()
    assert calls == [3]
