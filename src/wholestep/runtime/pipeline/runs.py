"""A compiled pipeline that runs step after step: all of it in this process, or one rank's part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from wholestep.capture import Capture
from wholestep.pipe.cut import CutGraph
from wholestep.pipe.schedule import Schedule
from wholestep.runtime.pipeline.draws import seed_of
from wholestep.runtime.pipeline.exchange import ProcessExchange, sum_shares
from wholestep.runtime.pipeline.local import LocalRun
from wholestep.runtime.pipeline.processes import Processes
from wholestep.runtime.pipeline.programs import StageRunner, summed_gradients
from wholestep.runtime.pipeline.rank import RankRun


class LocalPipeline:
    """All ranks in one process."""

    def __init__(self, captured: Capture, cut: CutGraph, schedule: Schedule, seed: int) -> None:
        self._runners = [StageRunner(stage, captured.bindings) for stage in cut.stages]
        self._run = LocalRun(cut, schedule, self._runners, seed_of(seed, 0))
        self.slots = tuple(dict.fromkeys(slot for stage in cut.stages for slot in stage.slots))

    def run(self, micro_batches: Sequence[list[Any]], step: int) -> list[dict[int, Any]]:
        """Run a step; returns what it returns for each micro-batch, by position."""
        return self._run.run(micro_batches, step)

    def gradients(self) -> dict[str, torch.Tensor]:
        """Gradients of the last step by name of the parameter, which are forgotten here."""
        found = summed_gradients([runner.gradients for runner in self._runners])
        for runner in self._runners:
            runner.gradients = {}
        return found

    def close(self) -> None:
        """There is nothing to close."""


class PipelineRank:
    """The part of this process in a job of several."""

    def __init__(self, captured: Capture, cut: CutGraph, schedule: Schedule, seed: int, processes: Processes) -> None:
        own = schedule.stages_of(processes.rank)
        self._cut = cut
        self._processes = processes
        self._runners = {stage: StageRunner(cut.stages[stage], captured.bindings) for stage in own}
        self._exchange = ProcessExchange(cut, schedule, processes.rank, processes.pipeline)
        replica = processes.pipeline[0] // len(processes.pipeline)  # each draws masks of its own
        self._run = RankRun(cut, schedule, processes.rank, self._runners, self._exchange, seed_of(seed, replica))
        self.slots = tuple(dict.fromkeys(slot for stage in own for slot in cut.stages[stage].slots))

    def run(self, micro_batches: Sequence[list[Any]], step: int) -> list[dict[int, Any]]:
        """Run a step; returns what this rank's stages return for each micro-batch, by position."""
        return self._run.run(micro_batches, step)

    def gradients(self) -> dict[str, torch.Tensor]:
        """Gradients of the last step, summed over the stages that share a parameter and averaged over replicas."""
        found = sum_shares(self._cut, self._runners, self._exchange)
        for runner in self._runners.values():
            runner.gradients = {}
        self._processes.average(found)
        return found

    def close(self) -> None:
        """Give connections back; to be called by all ranks."""
        self._exchange.close()
