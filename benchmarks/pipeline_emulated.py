"""Stages that do nothing but sleep, for Wholestep's pipelines and for those of torch: only the running of them is left.

What a stage computes is replaced by a sleep and ready-made tensors, everything around it is real: what is kept, looked
up, sent and received. With sleeps of 20 ms, any number of ranks fits on two cores. With none, what remains of a step is
what its run time costs.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

from wholestep.graph import StepGraph
from wholestep.pipe import FAMILIES, Kind, Schedule, StageCosts, build_schedule, simulate
from wholestep.pipe.cut import CutGraph, Program, Stage
from wholestep.runtime.pipeline.batches import split_batch
from wholestep.runtime.pipeline.exchange import ProcessExchange
from wholestep.runtime.pipeline.programs import StageRunner
from wholestep.runtime.pipeline.rank import RankRun

WIDTH = 64
SINGLE: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
MULTI: dict[str, Any] = {
    "interleaved-1f1b": ScheduleInterleaved1F1B,
    "looped-bfs": ScheduleLoopedBFS,
    "interleaved-zb": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipe-v": ScheduleDualPipeV,
}
SHARED = (*SINGLE, *MULTI)
OURS_ONLY = ("zb-h1", "zb-h2", "v-half", "v-min")
_COMPUTE = re.compile(r"\d+[FBIW]\d+")


@dataclass(frozen=True)
class Contender:
    """One step of this rank, and how long it would take if nothing but the sleeps did."""

    step: Callable[[], Any]
    ideal_s: float = 0.0
    num_stages: int = 1
    close: Callable[[], Any] = lambda: None


def stages_per_rank(name: str) -> int:
    return FAMILIES[name].stages_per_rank or 2


def ours(name: str, num_micro_batches: int, sleep_s: float) -> Contender:
    """A rank run over a chain of stages that sleep."""
    schedule = build_schedule(name, dist.get_world_size(), num_micro_batches)
    rank = dist.get_rank()
    cut = chain(schedule.num_stages)
    runners = {stage: SleepingRunner(cut.stages[stage], {}) for stage in schedule.stages_of(rank)}
    for runner in runners.values():
        runner.replace_programs(sleep_s)
    exchange = ProcessExchange(cut, schedule, rank)
    run = RankRun(cut, schedule, rank, runners, exchange)
    batch = torch.zeros(num_micro_batches, WIDTH)

    def step() -> None:
        pieces = split_batch((batch,), num_micro_batches).arguments
        run.run([list(piece) for piece in pieces])

    return Contender(step, _ideal_s(schedule, sleep_s), len(runners), exchange.close)


class SleepingRunner(StageRunner):
    """Runs what it is told to in place of compiled programs; all around that is as in `StageRunner`."""

    def __post_init__(self) -> None:
        self._buffers = {}

    def replace_programs(self, sleep_s: float) -> None:
        shares = {Kind.FORWARD: 1, Kind.INPUT: 1, Kind.WEIGHT: 1, Kind.BACKWARD: 2}
        programs: Any = {
            kind: _SleepingProgram(self.stage.program(kind), count * sleep_s) for kind, count in shares.items()
        }
        self._compiled = programs


class _SleepingProgram:
    """What stands in for a compiled program."""

    def __init__(self, program: Program, sleep_s: float) -> None:
        self.program = program
        self._sleep_s = sleep_s
        self._made = tuple(torch.zeros(1, WIDTH) for _ in program.outputs)

    def __call__(self, inputs: list[Any]) -> tuple[Tensor, ...]:
        sleep(self._sleep_s)
        return self._made


def sleep(seconds: float) -> None:
    """Sleep as long as it says on average: the system wakes everyone up a little late, which is made up for."""
    if seconds:
        time.sleep(seconds - _lateness_s())


@cache
def _lateness_s() -> float:
    late_s: list[float] = []
    for _ in range(25):
        begin = time.perf_counter()
        time.sleep(0.02)
        late_s.append(time.perf_counter() - begin - 0.02)
    return statistics.median(late_s)


def chain(num_stages: int) -> CutGraph:
    """Stages in a row. Each hands on one value and one gradient, and keeps one value for each half of its backward."""
    return CutGraph(tuple(_stage(index, num_stages) for index in range(num_stages)), 1)


def _stage(index: int, num_stages: int) -> Stage:
    is_first, is_last = index == 0, index == num_stages - 1
    value, kept, gradient, half, weight = (f"{letter}{index}" for letter in "vkghw")
    arriving = () if is_first else (f"v{index - 1}",)
    returned = () if is_last else (f"g{index + 1}",)
    leaving = () if is_first else (gradient,)
    programs = (
        _program(arriving, (value, kept)),
        _program((kept, *returned), (*leaving, half)),
        _program((half,), (weight,)),
        _program((kept, *returned), (*leaving, weight)),
    )
    names = {name for program in programs for name in (*program.values, *program.outputs)}
    returns = {0: value} if is_last else {}
    return Stage(index, *programs, {}, {}, returns, {name: torch.zeros(1, WIDTH) for name in names})


def _program(values: tuple[str, ...], outputs: tuple[str, ...]) -> Program:
    graph = fx.Graph()
    graph.output({"outputs": (), "updates": {}, "results": {}})
    return Program(StepGraph(fx.GraphModule(nn.Module(), graph), {}, None), (), values, outputs)


def upstream(name: str, num_micro_batches: int, sleep_s: float) -> Contender:
    """The same with torch's stages and torch's own order of the schedule."""
    num_ranks, each = dist.get_world_size(), stages_per_rank(name)
    own = build_schedule(name, num_ranks, num_micro_batches).stages_of(dist.get_rank())
    stages = [SleepingStage(Scale(), index, num_ranks * each, torch.device("cpu")) for index in own]
    for stage in stages:
        stage.set_sleep(sleep_s)
    schedule = upstream_schedule(name, stages, num_micro_batches, lambda output, _target: output.sum())
    batch = torch.zeros(num_micro_batches, WIDTH)
    args = (batch,) if 0 in own else ()
    kwargs = {"target": batch} if num_ranks * each - 1 in own else {}

    def step() -> None:
        schedule.step(*args, **kwargs, return_outputs=False)

    return Contender(step, _ideal_s(order_of(name, schedule, num_micro_batches), sleep_s), each)


def upstream_schedule(name: str, stages: Sequence[PipelineStage], num_micro_batches: int, loss_fn: Any) -> Any:
    if name in SINGLE:
        return SINGLE[name](stages[0], num_micro_batches, loss_fn=loss_fn)
    return MULTI[name](list(stages), num_micro_batches, loss_fn=loss_fn)


def order_of(name: str, schedule: Any, num_micro_batches: int) -> Schedule:
    """Torch's order as a schedule of ours; with one stage per rank it is the same."""
    if name in SINGLE:
        return build_schedule(name, dist.get_world_size(), num_micro_batches)
    rows = (_COMPUTE.findall(" ".join(map(str, row))) for _, row in sorted(schedule.pipeline_order.items()))
    return Schedule.from_csv("\n".join(map(",".join, rows)), name=name)


class Scale(nn.Module):
    """Something with a shape and a parameter, by which torch learns what travels; nobody runs it after that."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, value: Tensor) -> Tensor:
        return value * self.weight


class SleepingStage(PipelineStage):
    """A stage whose computations are sleeps.

    Torch leaves out the first half of the first stage's backward and makes up for it in the second; here all stages
    sleep alike, so that everyone's ideal is counted in the same way.
    """

    def set_sleep(self, sleep_s: float) -> None:
        self._sleep_s = sleep_s
        self._made = torch.zeros(1, WIDTH)

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Tensor:
        sleep(self._sleep_s)
        return self._made

    def backward_maybe_with_nosync(self, backward_type: str, bwd_kwargs: Any, last_backward: bool = False) -> Any:
        return (self._made,), []

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        sleep(self._sleep_s * (2 if full_backward else 1))
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        sleep(self._sleep_s)
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward)


def bare(num_micro_batches: int) -> Contender:
    """1F1B's messages and nothing else: receive, send on, in a loop over `torch.distributed`."""
    schedule = build_schedule("1f1b", dist.get_world_size(), num_micro_batches)
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    data, buffer = torch.zeros(1, WIDTH), torch.zeros(1, WIDTH)

    def step() -> None:
        works: list[Any] = []
        for action in schedule.actions[rank]:
            is_forward = action.kind is Kind.FORWARD
            source, target = (rank - 1, rank + 1) if is_forward else (rank + 1, rank - 1)
            if 0 <= source <= last:
                dist.irecv(buffer, source).wait()  # pyright: ignore[reportOptionalMemberAccess]
            if 0 <= target <= last:
                works.append(dist.isend(data, target))
        for work in works:
            work.wait()

    return Contender(step)


def _ideal_s(schedule: Schedule, sleep_s: float) -> float:
    return simulate(schedule, StageCosts()).makespan * sleep_s


def contenders(names: Sequence[str], num_micro_batches: int, sleep_s: float) -> Mapping[str, Contender]:
    """Both sides of each schedule, by name; made by all ranks in the same order."""
    found: dict[str, Contender] = {}
    for name in names:
        found[f"wholestep {name}"] = ours(name, num_micro_batches, sleep_s)
        if name in SHARED:
            found[f"torch {name}"] = upstream(name, num_micro_batches, sleep_s)
    if not sleep_s:
        found["bare 1f1b"] = bare(num_micro_batches)
    return found
