"""Data parallelism is DDP's: losses, parameters, gradients, optimizer state, buffers and random streams, at every step.

Two ranks are compared bit for bit, four within the default tolerance of `torch.testing.assert_close`. Looking at a
model applies what is pending, so every training also runs with nothing but its losses read before the end.
"""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.distributed.ranks import run_ranks
from tests.distributed.reference import (
    MakeSide,
    Outcome,
    Side,
    Trainer,
    assert_ddp_parity,
    ddp_side,
    wholestep_side,
)
from tests.distributed.trainings import Training
from torch import nn

import wholestep
from wholestep import zoo

pytestmark = pytest.mark.distributed

ALL: dict[str, MakeSide] = {"all": partial(wholestep_side, cross_iteration="all")}
NONE: dict[str, MakeSide] = {"none": partial(wholestep_side, cross_iteration="none")}
AUTO: dict[str, MakeSide] = {"auto": partial(wholestep_side, cross_iteration="auto")}


def assert_one_capture(outcomes: list[Outcome], num_captures: int = 1) -> None:
    assert [set(outcome.num_captures.values()) for outcome in outcomes] == [{num_captures}] * len(outcomes)


CASES = {
    "mlp": "sgd",
    "gpt": "adamw_fused",
    "llama": "adamw_foreach",
    "bert": "adam",
    "t5": "sgd_foreach",
    "vit": "adamw_fused_two_groups",
    "resnet": "sgd_nesterov",
    "lstm": "adam_foreach",
    "custom_function": "adamw",
    "checkpointed": "adamw_fused",
    "checkpointed_reentrant": "sgd_fused",
}


def test_every_model_of_the_zoo_is_here() -> None:
    assert set(CASES) == set(zoo.CASES)


# Of these the default run has the likes: compiling them takes seconds.
_LONG = ("t5", "llama", "vit", "bert", "checkpointed", "checkpointed_reentrant")


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] if case in _LONG else []) for case in CASES]
)
def test_every_model(case: str) -> None:
    assert_one_capture(assert_ddp_parity(Training(case, CASES[case]), ALL, plans=("both",)))


@pytest.mark.parametrize("cross_iteration", [pytest.param("all", marks=pytest.mark.slow), "auto"])
def test_within_a_memory_budget(cross_iteration: str) -> None:
    sides: dict[str, MakeSide] = {
        "budget": partial(wholestep_side, cross_iteration=cross_iteration, memory_budget=0.2, dynamic_batch=False)
    }
    training = Training("gpt", "adamw_fused", batch_sizes=((32,),))
    assert_one_capture(assert_ddp_parity(training, sides, plans=("both",)))


OPTIMIZERS = [
    "sgd",
    "sgd_plain",
    "sgd_nesterov",
    "sgd_foreach",
    "sgd_fused",
    "adam",
    "adam_foreach",
    "adam_fused",
    "adamw",
    "adamw_foreach",
    "adamw_fused",
    "adamw_amsgrad",
    "adamw_maximize",
    "adamw_fused_amsgrad",
    "sgd_two_groups",
    "adamw_two_groups",
    "adamw_fused_two_groups",
]
OTHER_OPTIMIZERS = ["adagrad", "adagrad_fused", "rmsprop", "rmsprop_foreach", "adafactor", "nadam"]


@pytest.mark.sample(5)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer(optimizer: str) -> None:
    assert_one_capture(assert_ddp_parity(Training("mlp", optimizer), ALL | NONE, plans=("both",)))


@pytest.mark.sample(2)
@pytest.mark.parametrize("optimizer", OTHER_OPTIMIZERS)
def test_optimizers_that_may_not_split(optimizer: str) -> None:
    assert_one_capture(assert_ddp_parity(Training("mlp", optimizer), ALL, plans=("both",)))


@pytest.mark.sample(1)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw_foreach", "adamw_fused"])
def test_looking_after_every_step_and_only_at_the_end(optimizer: str) -> None:
    assert_one_capture(assert_ddp_parity(Training("mlp", optimizer), ALL | NONE, plans=("every", "end")))


FEATURES: dict[str, Training] = {
    "clip by global norm": Training(step="clip_norm"),
    "clip by value": Training(optimizer="sgd", step="clip_value"),
    "accumulation": Training(step="accumulate"),
    "accumulation and clipping": Training(optimizer="adamw_fused", step="accumulate_clip"),
    "tied weights": Training("tied_words", "sgd_foreach"),
    "tied weights, accumulation": Training("tied_words", "adamw", step="accumulate"),
    "tied weights, clipping": Training("tied_words", "adamw_fused", step="clip_norm"),
    "schedule": Training(schedule=True),
    "schedule, fused": Training(optimizer="adamw_fused_two_groups", schedule=True),
    "schedule of a tensor": Training(optimizer="adamw_tensor_lr", schedule=True),
    "autocast": Training("mlp", "adamw", step="autocast"),
    "autocast, tied weights": Training("tied_words", "adamw_fused", step="autocast"),
    "batch norm": Training("normed", "sgd"),
    "batch norm, accumulation": Training("normed", "adamw_fused", step="accumulate"),
    "frozen at the front": Training(optimizer="adamw_foreach", frozen=("hidden.0",)),
    "frozen in the middle": Training(optimizer="sgd", frozen=("hidden.3.weight",)),
    "one parameter trained": Training(optimizer="adamw_fused", frozen=("hidden", "classifier.bias")),
    "gradients filled with zeros": Training(step="zero_filled"),
    "gradients dropped at the end": Training(step="zero_last"),
    "gradients never dropped": Training(optimizer="sgd_plain", step="never_zero"),
    "the step reads what it updated": Training(step="after_update"),
    # Kernels may compute other bits in memory that is not aligned, and the pieces of its buckets have odd sizes.
    "transformer layer": Training("encoder", "sgd"),
    "batch of one": Training(batch_sizes=((1,),)),
}


@pytest.mark.sample(8)
@pytest.mark.parametrize("feature", FEATURES)
def test_every_feature(feature: str) -> None:
    # Gradients that stay are there before the second call, but not before the first.
    num_captures = 2 if FEATURES[feature].step in ("zero_filled", "never_zero") else 1
    assert_one_capture(assert_ddp_parity(FEATURES[feature], ALL | NONE, plans=("both",)), num_captures)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "training",
    [
        Training("mlp", "adamw_fused"),
        Training("mlp", "adamw_fused", "clip_norm"),
        Training("tied_words", "adamw_fused", "accumulate"),
        Training("one_block_gpt", "sgd"),
    ],
    ids=lambda training: f"{training.case}-{training.step}",
)
def test_buckets_chosen_by_the_cost_model(training: Training) -> None:
    assert_one_capture(assert_ddp_parity(training, AUTO, plans=("both",)))


@pytest.mark.parametrize(
    "names", [["classifier"], ["hidden.0.weight"], ["hidden.0", "hidden.3.bias"], ["hidden", "classifier.weight"]]
)
def test_buckets_chosen_by_name(names: list[str]) -> None:
    named: dict[str, MakeSide] = {"named": partial(wholestep_side, cross_iteration=names)}
    assert_one_capture(assert_ddp_parity(Training(), named, plans=("both",)))


@pytest.mark.sample(1)
@pytest.mark.parametrize("bucket_mb", [0.00001, 0.001, 25])
def test_every_size_of_buckets(bucket_mb: float) -> None:
    candidates: dict[str, MakeSide] = {
        moved: partial(wholestep_side, cross_iteration=moved, bucket_mb=bucket_mb) for moved in ("all", "none")
    }
    assert_one_capture(assert_ddp_parity(Training(optimizer="adamw_fused"), candidates, plans=("both",)))


@pytest.mark.sample(1)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "adamw_fused"])
def test_a_parameter_that_one_rank_does_not_use(optimizer: str) -> None:
    training = Training("two_heads", optimizer, "branch", find_unused=True)
    assert_ddp_parity(training, ALL | NONE, plans=("both",))


def test_a_parameter_that_the_ranks_use_in_turn() -> None:
    training = Training("two_heads", "adamw", "branch_in_turn", find_unused=True)
    assert_ddp_parity(training, ALL | NONE, plans=("both",))


@pytest.mark.parametrize("case", ["mlp", "offset"])
def test_parameters_and_buffers_come_from_rank_0(case: str) -> None:
    assert_one_capture(assert_ddp_parity(Training(case, seed_by_rank=True), ALL | NONE, plans=("both",)))


def test_batch_sizes_that_change_on_all_ranks() -> None:
    assert_ddp_parity(Training(batch_sizes=((4, 4, 6, 4, 5, 3),)), ALL | NONE, plans=("both",))


def test_batch_sizes_of_each_rank() -> None:
    assert_one_capture(assert_ddp_parity(Training(batch_sizes=((4,), (6,))), ALL | NONE, plans=("both",)))


def test_a_batch_size_that_changes_on_one_rank_only() -> None:
    """One rank captures again while the others do not: they must not wait for each other elsewhere."""
    assert_ddp_parity(Training(batch_sizes=((4,), (4, 4, 6, 4, 5, 3))), ALL | NONE, plans=("both",))


@pytest.mark.parametrize("kind", ["group", "mesh"])
def test_a_process_group_or_mesh(kind: str) -> None:
    candidates: dict[str, MakeSide] = {kind: partial(wholestep_side, data_parallel=kind)}
    assert_one_capture(assert_ddp_parity(Training(), candidates, plans=("both",)))


def test_one_rank() -> None:
    assert_one_capture(assert_ddp_parity(Training(), ALL | NONE, num_ranks=1, plans=("both",)))


FOUR_RANKS = {
    "mlp": Training("mlp", "adamw_fused"),
    "tied": Training("tied_words", "adamw"),
    "batch norm": Training("normed", "sgd_plain"),
    "clipped": Training("mlp", "adamw", "clip_norm"),
    "accumulated": Training("mlp", "sgd_foreach", "accumulate"),
    "unused": Training("two_heads", "sgd", "branch", find_unused=True),
}


_AS_ON_TWO = ("mlp", "tied", "clipped")


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in _AS_ON_TWO else []) for name in FOUR_RANKS]
)
def test_four_ranks(name: str) -> None:
    assert_ddp_parity(FOUR_RANKS[name], ALL | NONE, num_ranks=4, plans=("both",))


def test_two_groups_of_two_ranks() -> None:
    """Each pair is a data parallel world of its own, with its own parameters: exact, since two summands are."""
    candidates: dict[str, MakeSide] = {"pairs": partial(wholestep_side, data_parallel="pairs")}
    reference = partial(ddp_side, data_parallel="pairs")
    training = Training(seed_by_rank=True)
    assert_ddp_parity(training, candidates, plans=("both",), num_ranks=4, num_summands=2, reference=reference)


def _side_with_a_past(train_step: Callable[..., Any], model: nn.Module, training: Training, *, past: str) -> Side:
    """Some ranks have compiled and run other steps before: alone, or in a group without the others."""
    pair = dist.new_group([0, 1])
    earlier, optimizer = training.build(0)
    arguments = training.arguments(0, 1)
    if past == "rank 0 alone" and dist.get_rank() == 0:
        side = wholestep_side(training.train_step(), earlier, training, data_parallel=None)
        side.function(earlier, optimizer, *arguments)
    if past == "ranks 0 and 1" and dist.get_rank() < 2:
        wholestep.compile(training.train_step(), data_parallel=pair)(earlier, optimizer, *arguments)
    if past == "compiled, not called" and dist.get_rank() == 0:
        wholestep_side(training.train_step(), earlier, training)
    return wholestep_side(train_step, model, training)


@pytest.mark.sample(1)
@pytest.mark.parametrize("past", ["rank 0 alone", "compiled, not called", "ranks 0 and 1"])
def test_ranks_with_different_pasts(past: str) -> None:
    candidates: dict[str, MakeSide] = {past: partial(_side_with_a_past, past=past)}
    num_ranks = 4 if past == "ranks 0 and 1" else 2
    assert_ddp_parity(Training(), candidates, plans=("end",), num_ranks=num_ranks, timeout_s=30)


def _num_reductions(training: Training, make_side: MakeSide, num_steps: int) -> int:
    """How many all-reduces some steps in the middle of a training start."""
    trainer = Trainer(training, make_side)
    trainer.steps(2)
    dist.barrier()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        trainer.steps(num_steps)
        dist.barrier()
    return sum(event.name == "gloo:all_reduce" for event in profiler.events() or [])


def _reductions_per_step(training: Training, make_side: MakeSide) -> list[float]:
    return [count / 3 for count in run_ranks(_num_reductions, 2, training, make_side, 3)]


@pytest.mark.parametrize("moved", ["all", "none"])
def test_gradients_travel_in_several_buckets_once_per_step(moved: str) -> None:
    small: Callable[..., MakeSide] = partial(partial, wholestep_side, cross_iteration=moved)
    plain = _reductions_per_step(Training(), small())
    assert plain[0] == plain[1]
    assert 2 <= plain[0] <= 6
    assert _reductions_per_step(Training(), small(bucket_mb=0.00001)) == [6, 6]
    assert _reductions_per_step(Training(step="accumulate"), small()) == plain


FULL_OPTIMIZERS = ["sgd", "adam", "adamw", "adamw_foreach", "adamw_fused", "adamw_amsgrad", "adamw_two_groups"]


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", FULL_OPTIMIZERS)
@pytest.mark.parametrize("case", CASES)
def test_every_model_with_every_optimizer(case: str, optimizer: str) -> None:
    assert_one_capture(assert_ddp_parity(Training(case, optimizer), ALL | NONE | AUTO, plans=("both",), timeout_s=600))


@pytest.mark.slow
def test_an_optimizer_that_branches_on_its_step_count() -> None:
    """RAdam changes its formula after some steps: on all ranks in the same call."""
    outcomes = assert_ddp_parity(Training("mlp", "radam"), ALL | NONE | AUTO, plans=("both",), timeout_s=600)
    assert all(number <= 2 for outcome in outcomes for number in outcome.num_captures.values())


FULL_STEPS = ["clip_norm", "accumulate", "accumulate_clip", "autocast", "after_update"]
# Torch warns of checkpoints that are reentrant where nothing requires a gradient, and warnings are errors here.
WARNING_IN_EAGER = [("after_update", "checkpointed_reentrant")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "case"), [pair for pair in itertools.product(FULL_STEPS, CASES) if pair not in WARNING_IN_EAGER]
)
def test_every_model_with_every_step(case: str, step: str) -> None:
    training = Training(case, "adamw_fused", step)
    assert_one_capture(assert_ddp_parity(training, ALL | NONE, plans=("both",), timeout_s=600))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_model_on_four_ranks(case: str) -> None:
    training = Training(case, "sgd")
    assert_one_capture(assert_ddp_parity(training, ALL | NONE, plans=("both",), num_ranks=4, timeout_s=600))
