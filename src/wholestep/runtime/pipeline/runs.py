"""A compiled pipeline that runs step after step: all of it in this process, or one rank's part."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from wholestep.capture import Capture
from wholestep.errors import RankError
from wholestep.graph import SlotKind
from wholestep.pipe.cut import CutGraph
from wholestep.pipe.schedule import Action, Schedule
from wholestep.pipe.simulate import Timeline
from wholestep.runtime.agreement import lost_peer, require_same
from wholestep.runtime.pipeline.alike import number_of, options_differ
from wholestep.runtime.pipeline.averages import Averages
from wholestep.runtime.pipeline.calls import Calls
from wholestep.runtime.pipeline.clock import clock_for, lead_s
from wholestep.runtime.pipeline.draws import seed_of
from wholestep.runtime.pipeline.exchange import ProcessExchange, sum_shares
from wholestep.runtime.pipeline.local import LocalRun
from wholestep.runtime.pipeline.processes import Processes
from wholestep.runtime.pipeline.programs import StageRunner, summed_gradients
from wholestep.runtime.pipeline.rank import RankRun

_PARAM = f"{SlotKind.PARAM}."


@dataclass(frozen=True)
class Graphs:
    """What there is to run: the stages of a micro-batch, and of one with a row less if rows are not dealt out evenly.

    `num_large` micro-batches come first, the smaller ones behind them.
    """

    captured: Capture
    cut: CutGraph
    num_large: int
    small: tuple[Capture, CutGraph] | None = None

    def runner(self, stage: int) -> StageRunner:
        small = None if self.small is None else (self.small[1].stages[stage], self.small[0].bindings)
        return StageRunner(self.cut.stages[stage], self.captured.bindings, small)

    @property
    def cuts(self) -> list[CutGraph]:
        return [self.cut] if self.small is None else [self.cut, self.small[1]]


class LocalPipeline:
    """All ranks in one process."""

    def __init__(self, graphs: Graphs, schedule: Schedule, seed: int) -> None:
        cut = graphs.cut
        self._name = schedule.name
        self._runners = [graphs.runner(stage) for stage in range(len(cut.stages))]
        clock = clock_for(cut.device)
        self._run = LocalRun(cut, schedule, self._runners, seed_of(seed, 0), clock, graphs.num_large)
        self.slots = tuple(dict.fromkeys(slot for stage in cut.stages for slot in stage.slots))

    def counts(self, slot: str) -> bool:
        """Whether this process answers for a parameter where each may count once."""
        return slot in self.slots

    def run(self, micro_batches: Sequence[list[Any]], step: int) -> list[dict[int, Any]]:
        """Run a step; returns what it returns for each micro-batch, by position."""
        return self._run.run(micro_batches, step)

    def telling(self) -> AbstractContextManager[None]:
        """There is nobody to be told of a failure."""
        return contextlib.nullcontext()

    def gradients(self, options: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Gradients of the last step by name of the parameter, which are forgotten here."""
        found = summed_gradients([runner.gradients for runner in self._runners])
        for runner in self._runners:
            runner.gradients = {}
        return found

    def total(self, squared: torch.Tensor, max_norm: float) -> torch.Tensor:
        """The sum of a number over all processes, of which there is one."""
        return squared

    def shared_parameters(self) -> list[str]:
        """Nobody else updates anything."""
        return []

    def timeline(self) -> Timeline:
        """When everything ran in the last step: one action at a time, ranks take turns."""
        return _measured(self._name, self._run.spans())

    def close(self) -> None:
        """There is nothing to close."""


class PipelineRank:
    """The part of this process in a job of several."""

    def __init__(self, graphs: Graphs, schedule: Schedule, seed: int, processes: Processes, calls: Calls) -> None:
        cut = graphs.cut
        own = schedule.stages_of(processes.rank)
        self._cut = cut
        self._name = schedule.name
        self._processes = processes
        self._calls = calls
        self._runners = {stage: graphs.runner(stage) for stage in own}
        self._exchange = ProcessExchange(
            cut, schedule, processes.rank, processes.pipeline, calls, small=graphs.cuts[-1], num_large=graphs.num_large
        )
        self._averages = Averages(processes.equals, processes.num_replicas, self._exchange.wait_for, cut.device)
        replica = processes.pipeline[0] // len(processes.pipeline)  # each draws masks of its own
        self._run = RankRun(
            cut,
            schedule,
            processes.rank,
            self._runners,
            self._exchange,
            seed_of(seed, replica),
            self._start_averages,
            clock_for(cut.device),
            graphs.num_large,
        )
        self.slots = tuple(dict.fromkeys(slot for stage in own for slot in cut.stages[stage].slots))

    def counts(self, slot: str) -> bool:
        """Whether this rank answers for a parameter where each may count once: it has the first of its stages."""
        holders = self._cut.holders.get(slot)
        return holders is not None and holders[0] in self._runners

    def run(self, micro_batches: Sequence[list[Any]], step: int) -> list[dict[int, Any]]:
        """Run a step; returns what this rank's stages return for each micro-batch, by position."""
        return self._run.run(micro_batches, step)

    @contextlib.contextmanager
    def telling(self) -> Generator[None]:
        """If the block raises on this rank, the others, who may be in their next step, raise too.

        Not if ranks differ, which all of them find out.
        """
        try:
            yield
        except RankError:
            raise
        except BaseException as error:
            self._exchange.fail(None, error)
            raise

    def gradients(self, options: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Gradients of the last step, summed over the stages that share a parameter and averaged over replicas.

        Raises `RankError` if ranks that update the same parameters have other `options` for that.
        """
        mark = number_of(options)
        self._averages.start_comparison(mark)
        found, others = sum_shares(self._cut, self._runners, self._exchange, mark)
        for runner in self._runners.values():
            runner.gradients = {}
        self._averages.start(found, [name for name in found if self._is_shared(f"{_PARAM}{name}")])
        is_same = self._averages.finish()
        if others or not is_same:
            replicas = [] if is_same else dist.get_process_group_ranks(self._processes.equals)
            error = options_differ(self._calls, options, {*others, *replicas})
            self._exchange.refuse(error)
            raise error
        return found

    def shared_parameters(self) -> list[str]:
        """Names of the parameters of this rank's stages that other ranks update, too."""
        own = [slot for slot in self._cut.holders if slot in self.slots and slot.startswith(_PARAM)]
        is_everything = self._processes.num_replicas > 1
        return [slot.removeprefix(_PARAM) for slot in own if is_everything or self._is_on_others(slot)]

    def _is_on_others(self, slot: str) -> bool:
        return any(stage not in self._runners for stage in self._cut.holders[slot])

    def total(self, squared: torch.Tensor, max_norm: float) -> torch.Tensor:
        """The sum of a number over all ranks of the job, replicas counted once; all of them must clip to one norm."""
        own = torch.stack([squared.double(), torch.tensor(max_norm, dtype=torch.float64, device=squared.device)])
        found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        self._exchange.wait_for(dist.all_gather(found, own, async_op=True))
        together = torch.stack(found)
        require_same("the norms that gradients are clipped to", together[:, 1].tolist())
        return (together[:, 0].sum() / self._processes.num_replicas).to(squared.dtype)

    def timeline(self) -> Timeline:
        """When everything ran in the last step on all ranks of this pipeline; to be called by all ranks of the job."""
        lead = lead_s()
        own = [(action, start - lead, end - lead) for action, start, end in self._run.spans()]
        found: list[Any] = [None] * dist.get_world_size()
        try:
            dist.all_gather_object(found, [(str(action), start, end) for action, start, end in own])
        except RuntimeError as error:
            raise lost_peer("what they measured", error) from error
        rows = [found[rank] for rank in self._processes.pipeline]
        return _measured(self._name, [[(Action.from_text(text), *times) for text, *times in row] for row in rows])

    def _start_averages(self, stage: int) -> None:
        """A stage is done with its gradients: average those that no other stage has a share of."""
        gradients = self._runners[stage].gradients
        self._averages.start(gradients, [slot for slot in gradients if not self._is_shared(slot)])

    def _is_shared(self, slot: str) -> bool:
        return len(self._cut.holders[slot]) > 1

    def close(self) -> None:
        """Give connections back; to be called by all ranks."""
        self._exchange.close()


def _measured(name: str, rows: Sequence[Sequence[tuple[Action, float, float]]]) -> Timeline:
    in_ms = [[(action, start * 1e3, end * 1e3) for action, start, end in row] for row in rows]
    return Timeline.measured(name, in_ms, unit="ms")
