"""All ranks of a pipeline in one process, one action at a time: for trying out, and for comparing with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from wholestep.pipe.cut import CutGraph
from wholestep.pipe.schedule import Action, Schedule
from wholestep.pipe.validate import checked_order
from wholestep.runtime.pipeline.clock import Clock
from wholestep.runtime.pipeline.messages import Traffic, messages
from wholestep.runtime.pipeline.programs import StageRunner
from wholestep.runtime.pipeline.rank import RankRun


class Mailbox:
    """The exchange of one rank of several in a process; messages of all of them are in `mail`, by number."""

    def __init__(self, traffic: Traffic, rank: int, mail: dict[int, dict[str, Any]]) -> None:
        self._messages = traffic.messages
        self._plan = traffic.ranks[rank]
        self._mail = mail

    def begin(self) -> None: ...

    def receive(self, position: int, values: Sequence[dict[str, Any]]) -> None:
        for number in self._plan.needs[position]:
            values[self._messages[number].micro_batch].update(self._mail.pop(number))

    def send(self, position: int, made: Mapping[str, Any]) -> None:
        for number in self._plan.sends[position]:
            self._mail[number] = {name: made[name] for name in self._messages[number].names}

    def end(self) -> None: ...

    def fail(self, action: Action | None, error: BaseException) -> None: ...


class LocalRun:
    """A pipeline in one process, ready to run step after step."""

    def __init__(
        self,
        cut: CutGraph,
        schedule: Schedule,
        runners: Sequence[StageRunner],
        seed: int = 0,
        clock: Clock | None = None,
        num_large: int | None = None,
    ) -> None:
        traffic = messages(cut, schedule)
        by_stage = dict(enumerate(runners))
        self._mail: dict[int, dict[str, Any]] = {}
        self._order = [rank for rank, _ in checked_order(schedule)]
        self._ranks = [
            RankRun(
                cut,
                schedule,
                rank,
                by_stage,
                Mailbox(traffic, rank, self._mail),
                seed,
                clock=clock,
                num_large=num_large,
            )
            for rank in range(schedule.num_ranks)
        ]

    def spans(self) -> list[list[tuple[Action, float, float]]]:
        """When the actions of each rank ran in the last step, in seconds of the process's clock."""
        return [rank.spans() for rank in self._ranks]

    @torch.no_grad()
    def run(self, micro_batches: Sequence[list[Any]], step: int = 0) -> list[dict[int, Any]]:
        """Run a step of all ranks; returns what it returns for each micro-batch, by position."""
        self._mail.clear()
        for rank in self._ranks:
            rank.begin(micro_batches, step)
        positions = [0] * len(self._ranks)
        for number in self._order:
            self._ranks[number].advance(positions[number])
            positions[number] += 1
        for rank in self._ranks:
            rank.end()
        return [
            {place: value for rank in self._ranks for place, value in rank.outputs[number].items()}
            for number in range(len(micro_batches))
        ]


def run_locally(
    cut: CutGraph, schedule: Schedule, runners: Sequence[StageRunner], micro_batches: Sequence[list[Any]], step: int = 0
) -> list[dict[int, Any]]:
    """Run one step of all ranks, as `LocalRun` does."""
    return LocalRun(cut, schedule, runners).run(micro_batches, step)
