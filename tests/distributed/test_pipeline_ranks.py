"""Pipelines over real processes: the gradients of one process, and a failure that every rank hears of at once."""

from __future__ import annotations

import dataclasses
import functools
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.distributed.ranks import RanksFailed, run_ranks
from torch import Tensor, nn

from wholestep import PipelineError, zoo
from wholestep.capture import Capture, capture, tree
from wholestep.graph import StepGraph
from wholestep.passes import Pipeline, run_passes
from wholestep.pipe import Action, Kind, Schedule, build_schedule
from wholestep.pipe.cut import CutGraph, cut
from wholestep.pipe.placement import forward_calls
from wholestep.runtime.pipeline import failures
from wholestep.runtime.pipeline.exchange import ProcessExchange, sum_shares
from wholestep.runtime.pipeline.local import LocalRun
from wholestep.runtime.pipeline.programs import StageRunner, summed_gradients
from wholestep.runtime.pipeline.rank import RankRun

pytestmark = pytest.mark.distributed

NUM_MICRO_BATCHES = 4
SCHEDULES = ("gpipe", "1f1b", "interleaved-zb", "zbv", "dualpipe-v")

Micro = Callable[[nn.Module, Any, Tensor], Tensor]


@dataclass(frozen=True)
class World:
    """A model with its captured micro-step, and batches to run it on."""

    model: nn.Module
    captured: Capture
    graph: StepGraph
    batches: list[Any]
    scale: Tensor

    @property
    def leaves(self) -> list[list[Any]]:
        return [tree.flatten(((self.model, batch, self.scale), {}))[0] for batch in self.batches]

    def cut(self, num_stages: int) -> CutGraph:
        num_calls = len(forward_calls(self.graph))
        return cut(self.graph, [num_calls * (index + 1) // num_stages for index in range(num_stages - 1)])

    def runners(self, stages: CutGraph) -> list[StageRunner]:
        return [StageRunner(stage, self.captured.bindings) for stage in stages.stages]


@dataclass(frozen=True)
class Result:
    """What a rank has after some steps: losses of the last one by micro-batch, gradients, and all buffers."""

    losses: list[Tensor]
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]


def micro_step_of(name: str) -> Micro:
    def micro_step(model: nn.Module, batch: Any, scale: Tensor) -> Tensor:
        loss = zoo.get(name).loss(model, batch)
        (loss * scale).backward()
        return loss.detach()

    return micro_step


def make_world(name: str, dropout: float = 0.0) -> World:
    torch.manual_seed(0)
    build: Any = zoo.get(name).build
    config, *rest = build.args
    model = build.func(dataclasses.replace(config, dropout=dropout) if hasattr(config, "dropout") else config, *rest)
    batches = [zoo.get(name).make_batch(2, index) for index in range(NUM_MICRO_BATCHES)]
    scale = torch.tensor(1 / NUM_MICRO_BATCHES)
    captured = capture(micro_step_of(name), (model, batches[0], scale), {})
    return World(model, captured, run_passes(captured.graph, Pipeline.parse("simplify,cse,dce")), batches, scale)


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def restore(model: nn.Module, buffers: dict[str, Tensor]) -> None:
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])


def eagerly(world: World, name: str) -> Result:
    before = buffers_of(world.model)
    micro_step = micro_step_of(name)
    losses: list[Tensor] = []
    for _ in range(2):
        world.model.zero_grad()
        losses = [micro_step(world.model, batch, world.scale) for batch in world.batches]
    gradients = {key: one.grad for key, one in world.model.named_parameters() if one.grad is not None}
    world.model.zero_grad()
    found = Result(losses, gradients, buffers_of(world.model))
    restore(world.model, before)
    return found


def locally(world: World, schedule: Schedule) -> Result:
    before = buffers_of(world.model)
    stages = world.cut(schedule.num_stages)
    runners = world.runners(stages)
    run = LocalRun(stages, schedule, runners)
    for step in range(2):
        for runner in runners:
            runner.gradients.clear()
        outputs = run.run(world.leaves, step)
    gradients = summed_gradients([runner.gradients for runner in runners])
    found = Result([one[0] for one in outputs], gradients, buffers_of(world.model))
    restore(world.model, before)
    return found


def on_ranks(name: str, schedules: list[Schedule], dropout: float) -> list[Result]:
    """Two steps of each schedule, on one of the ranks."""
    world = make_world(name, dropout)
    before = buffers_of(world.model)
    results: list[Result] = []
    for schedule in schedules:
        stages = world.cut(schedule.num_stages)
        exchange = ProcessExchange(stages, schedule, dist.get_rank())
        run = RankRun(stages, schedule, dist.get_rank(), dict(enumerate(world.runners(stages))), exchange)
        for step in range(2):
            for runner in run.runners.values():
                runner.gradients.clear()
            outputs = run.run(world.leaves, step)
        assert not any(run._values), "a value was kept after its last reader"  # pyright: ignore[reportPrivateUsage]
        gradients, _ = sum_shares(stages, run.runners, exchange)
        exchange.close()
        results.append(Result([one[0] for one in outputs if one], gradients, buffers_of(world.model)))
        restore(world.model, before)
    return results


@functools.cache
def cached_world(name: str, dropout: float) -> World:
    return make_world(name, dropout)


def check(name: str, num_ranks: int, schedule_names: tuple[str, ...] = SCHEDULES, dropout: float = 0.0) -> set[str]:
    """Ranks have the bits of one process, which has what eager has; returns parameters that several ranks have."""
    schedules = [build_schedule(one, num_ranks, NUM_MICRO_BATCHES) for one in schedule_names]
    by_rank = run_ranks(on_ranks, num_ranks, name, schedules, dropout, timeout_s=300)
    world = cached_world(name, dropout)
    shared: set[str] = set()
    for index, schedule in enumerate(schedules):
        wanted = locally(world, schedule)
        results = [results[index] for results in by_rank]
        held = Counter(key for result in results for key in result.gradients)
        assert held.keys() == wanted.gradients.keys()
        shared |= {key for key, times in held.items() if times > 1}
        for found in results:
            assert_bits(found.gradients, {key: wanted.gradients[key] for key in found.gradients})
        assert [result.losses for result in results if result.losses] == [wanted.losses]
        assert_up_to_date([result.buffers for result in results], wanted.buffers)
        if not dropout:
            assert_close(wanted, eagerly(world, name))
    return shared


def assert_bits(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def assert_close(found: Result, eager: Result) -> None:
    torch.testing.assert_close(found.gradients, eager.gradients, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.losses, eager.losses)
    torch.testing.assert_close(found.buffers, eager.buffers)


def assert_up_to_date(by_rank: list[dict[str, Tensor]], wanted: dict[str, Tensor]) -> None:
    """A buffer is up to date on the rank whose stage changes it."""
    for name, buffer in wanted.items():
        assert any(torch.equal(buffers[name], buffer) for buffers in by_rank), name


# Right


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["gpt", "resnet", pytest.param("t5", marks=pytest.mark.slow)])
def test_two_ranks_compute_what_one_process_computes(name: str) -> None:
    shared = check(name, 2)
    assert ("token_embedding.weight" in shared) == (name == "gpt")


def test_four_ranks_compute_what_one_process_computes() -> None:
    assert "token_embedding.weight" in check("gpt", 4)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in zoo.CASES if name != "gpt"])
def test_four_ranks_compute_what_one_process_computes_for_every_model(name: str) -> None:
    check(name, 4)


def test_shares_of_a_gradient_that_are_all_on_one_rank() -> None:
    assert "token_embedding.weight" not in check("gpt", 2, ("zbv",))


def test_dropout_does_not_depend_on_where_a_stage_runs() -> None:
    check("mlp", 2, ("1f1b", "zbv"), dropout=0.5)


# Wrong


Trap = Callable[[Action], None]


def run_with_trap(
    schedule: Schedule, trap: Trap, rank: int | None = None, global_ranks: list[int] | None = None
) -> tuple[RankRun, World]:
    """A rank, after a good step, whose stages call the trap before each action."""
    rank = dist.get_rank() if rank is None else rank
    world = make_world("mlp")
    stages = world.cut(schedule.num_stages)
    exchange = ProcessExchange(stages, schedule, rank, global_ranks)
    run = RankRun(stages, schedule, rank, dict(enumerate(world.runners(stages))), exchange)
    run.run(world.leaves)
    for stage, runner in run.runners.items():
        trapped: Any = functools.partial(_trapped, runner.run, trap, stage, iter(schedule.actions[rank]))
        runner.run = trapped
    return run, world


def _trapped(
    real: Any, trap: Trap, stage: int, actions: Iterator[Action], kind: Kind, *args: Any, **options: Any
) -> Any:
    action = next(action for action in actions if (action.kind, action.stage) == (kind, stage))
    trap(action)
    return real(kind, *args, **options)


def story(run: RankRun, world: World) -> list[str]:
    """What a rank has to tell of a step that fails, and of another one that it tries."""
    told: list[str] = []
    for step in range(2):
        with pytest.raises(Exception) as caught:
            run.run(world.leaves, step)
        told += [f"{caught.type.__name__}: {caught.value}", *getattr(caught.value, "__notes__", [])]
    return told


def story_with_trap(schedule: Schedule, trap: Trap) -> list[str]:
    return story(*run_with_trap(schedule, trap))


def raise_at(text: str, action: Action) -> None:
    if str(action) == text:
        raise KeyError("the label of the batch")


def die_at(text: str, action: Action) -> None:
    if str(action) == text:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("schedule_name", "num_ranks", "action"),
    [("1f1b", 2, "1F2"), ("1f1b", 2, "0B1"), ("zbv", 2, "3I3"), ("1f1b", 4, "1B0"), ("interleaved-zb", 4, "5W0")],
)
def test_a_rank_that_raises_stops_all_and_is_shown_by_all(schedule_name: str, num_ranks: int, action: str) -> None:
    schedule = build_schedule(schedule_name, num_ranks, NUM_MICRO_BATCHES)
    stage, micro_batch = int(action[0]), int(action[2])
    failing = schedule.stage_ranks[stage]
    stories = run_ranks(story_with_trap, num_ranks, schedule, functools.partial(raise_at, action), timeout_s=30)
    place = f"in {action} (stage {stage}, micro-batch {micro_batch})"
    shown = f"rank {failing} failed {place}: KeyError: 'the label of the batch'"
    again = f"PipelineError: this pipeline cannot be used any more; make a new one: {shown}"
    own = ["KeyError: 'the label of the batch'", f"{place} of a pipeline", again]
    assert stories == [own if rank == failing else [f"PipelineError: {shown}", again] for rank in range(num_ranks)]


def story_without_watch(schedule: Schedule, trap: Trap) -> list[str]:
    """Nobody looks into the store by itself, and no connection goes because its owner does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(failures, "_POLL_S", 1000.0)
        run, world = run_with_trap(schedule, trap)
        told = story(run, world)
        dist.barrier()
        del run
        return told


def test_connections_that_are_closed_wake_one_rank_after_the_other() -> None:
    schedule = build_schedule("1f1b", 4, NUM_MICRO_BATCHES)
    stories = run_ranks(story_without_watch, 4, schedule, functools.partial(raise_at, "0F1"), timeout_s=30)
    shown = "PipelineError: rank 0 failed in 0F1 (stage 0, micro-batch 1): KeyError: 'the label of the batch'"
    assert [told[0] for told in stories[1:]] == [shown] * 3


def the_store() -> Any:
    return dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]


def fail_or_block(action: Action) -> None:
    if str(action) == "0F1":
        raise ValueError("no luck")
    block_until_somebody_has_stopped(action)


def block_until_somebody_has_stopped(action: Action) -> None:
    if str(action) == "1F0":
        the_store().wait(["somebody has stopped"])


def story_of_three(schedule: Schedule) -> list[str]:
    """Rank 0 fails, rank 1 computes until rank 2 has stopped, which waits for rank 1 alone."""
    told = story_with_trap(schedule, fail_or_block)
    if dist.get_rank() == 2:
        the_store().set("somebody has stopped", "yes")
    return told


def test_a_rank_stops_even_if_the_one_that_it_waits_for_computes() -> None:
    schedule = build_schedule("1f1b", 3, NUM_MICRO_BATCHES)
    for told in run_ranks(story_of_three, 3, schedule, timeout_s=30)[1:]:
        assert told[0] == "PipelineError: rank 0 failed in 0F1 (stage 0, micro-batch 1): ValueError: no luck"


def story_of_replicas(schedule: Schedule) -> list[str]:
    """Ranks 2 and 3 fail; of ranks 0 and 1, which are another pipeline, 1 computes until 0 has stopped."""
    replica, rank = divmod(dist.get_rank(), 2)
    trap = functools.partial(raise_at, "0F1") if replica else block_until_somebody_has_stopped
    told = story(*run_with_trap(schedule, trap, rank, [2 * replica, 2 * replica + 1]))
    if dist.get_rank() == 0:
        the_store().set("somebody has stopped", "yes")
    return told


def test_a_pipeline_stops_if_one_beside_it_fails() -> None:
    stories = run_ranks(story_of_replicas, 4, build_schedule("1f1b", 2, NUM_MICRO_BATCHES), timeout_s=30)
    shown = "PipelineError: rank 2 failed in 0F1 (stage 0, micro-batch 1): KeyError: 'the label of the batch'"
    assert [told[0] for told in stories] == [shown, shown, "KeyError: 'the label of the batch'", shown]


def run_to_the_end(schedule: Schedule, trap: Trap) -> None:
    run, world = run_with_trap(schedule, trap)
    run.run(world.leaves)


@pytest.mark.sample(1)
@pytest.mark.parametrize("dying", [0, 1, 3])
def test_a_rank_that_dies_is_reported_as_gone(dying: int) -> None:
    schedule = build_schedule("1f1b", 4, NUM_MICRO_BATCHES)
    with pytest.raises(RanksFailed) as caught:
        run_ranks(run_to_the_end, 4, schedule, functools.partial(die_at, f"{dying}F1"), timeout_s=30)
    failures = caught.value.failures
    assert "died with exit code -9" in failures.pop(dying)
    assert len(failures) == 3
    for text in failures.values():
        assert f"RankError: rank {dying} is gone: " in text


def die_before_shares(dying: int) -> None:
    schedule = build_schedule("1f1b", 2, NUM_MICRO_BATCHES)
    world = make_world("gpt")
    stages = world.cut(2)
    exchange = ProcessExchange(stages, schedule, dist.get_rank())
    run = RankRun(stages, schedule, dist.get_rank(), dict(enumerate(world.runners(stages))), exchange)
    run.run(world.leaves)
    if dist.get_rank() == dying:
        os.kill(os.getpid(), signal.SIGKILL)
    sum_shares(stages, run.runners, exchange)


def test_a_rank_that_dies_before_gradients_are_summed_is_reported_as_gone() -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(die_before_shares, 2, 1, timeout_s=30)
    assert "RankError: rank 1 is gone: " in caught.value.failures[0]


def leave(rank: int, folder: str) -> None:
    """The life of a process whose pipeline fails, and who neither expects it nor cleans up."""
    store = dist.FileStore(f"{folder}/store", 2)  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    run_to_the_end(build_schedule("1f1b", 2, NUM_MICRO_BATCHES), functools.partial(raise_at, "1B1"))


def test_processes_end_by_themselves_after_a_failure(tmp_path: Path) -> None:
    code = "import sys; from tests.distributed.test_pipeline_ranks import leave; leave(int(sys.argv[1]), sys.argv[2])"
    processes = [
        subprocess.Popen([sys.executable, "-c", code, str(rank), str(tmp_path)], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    ends = [process.communicate(timeout=60)[1] for process in processes]
    assert [process.returncode for process in processes] == [1, 1]
    shown = "rank 1 failed in 1B1 (stage 1, micro-batch 1): KeyError: 'the label of the batch'"
    assert ends[0].rstrip().endswith(f"PipelineError: {shown}")
    assert ends[1].rstrip().endswith("in 1B1 (stage 1, micro-batch 1) of a pipeline")


def connect_and_stop(schedule: Schedule) -> list[int]:
    """How many threads there are before, while and after there is an exchange."""
    stages = make_world("mlp").cut(schedule.num_stages)
    counts = [threading.active_count()]
    exchange = ProcessExchange(stages, schedule, dist.get_rank())
    counts.append(threading.active_count())
    dist.barrier()
    exchange.close()
    for thread in threading.enumerate():
        if thread.name.startswith("wholestep"):
            thread.join()
    with pytest.raises(PipelineError, match="cannot be used any more; make a new one: it was closed"):
        exchange.begin()
    return [count - counts[0] for count in (*counts, threading.active_count())]


def test_an_exchange_that_is_closed_leaves_no_thread() -> None:
    assert run_ranks(connect_and_stop, 2, build_schedule("1f1b", 2, NUM_MICRO_BATCHES)) == [[0, 1, 0]] * 2
