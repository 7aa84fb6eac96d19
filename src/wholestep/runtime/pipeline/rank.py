"""What one rank does in a step: its actions in order, and the values that come and go between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from wholestep.errors import PipelineError, RankError
from wholestep.pipe.cut import CutGraph
from wholestep.pipe.schedule import Action, Kind, Schedule
from wholestep.runtime.pipeline.clock import Clock, HostClock
from wholestep.runtime.pipeline.draws import seed_of
from wholestep.runtime.pipeline.programs import StageRunner


class Exchange(Protocol):
    """How values get to other ranks and come from them, around each action of a rank."""

    def begin(self) -> None:
        """A step begins."""
        ...

    def receive(self, position: int, values: Sequence[dict[str, Any]]) -> None:
        """Wait for what the action at a position reads from other ranks, and store it by micro-batch and name."""
        ...

    def send(self, position: int, made: Mapping[str, Any]) -> None:
        """Send what the action at a position made to whoever reads it."""
        ...

    def end(self) -> None:
        """A step is over: everything sent has left."""
        ...

    def fail(self, action: Action | None, error: BaseException) -> None:
        """This rank cannot go on: let the others know."""
        ...


@dataclass(frozen=True)
class _Task:
    """An action and all that can be said about it before a step.

    `kept` are values that it makes and a later action of the rank reads, `dropped` those that it is the last to read,
    `returned` those that the step returns, by position. An action `completes` its stage if it is the last that adds to
    the stage's gradients; `is_small` tells that its micro-batch has a row less than the first.
    """

    action: Action
    runner: StageRunner
    kept: tuple[str, ...]
    dropped: tuple[str, ...]
    returned: tuple[tuple[int, str], ...]
    completes: bool
    is_small: bool
    draws: bool


class RankRun:
    """Runs a rank's part of a schedule, step by step.

    A value is kept until the last action of this rank that reads it has run. If an action raises, the other ranks are
    told, and the error is raised with a note that says where it happened. `on_gradients` is called with a stage as soon
    as nothing is added to its gradients any more; the rank may have other stages to go on with. Micro-batches from
    number `num_large` on have a row less than the others.
    """

    def __init__(
        self,
        cut: CutGraph,
        schedule: Schedule,
        rank: int,
        runners: Mapping[int, StageRunner],
        exchange: Exchange,
        seed: int = 0,
        on_gradients: Callable[[int], None] | None = None,
        clock: Clock | None = None,
        num_large: int | None = None,
    ) -> None:
        self.runners = {stage: runners[stage] for stage in schedule.stages_of(rank)}
        self.exchange = exchange
        self.seed = seed
        self.outputs: list[dict[int, Any]] = []
        num_large = schedule.num_micro_batches if num_large is None else num_large
        self._tasks = _tasks(cut, schedule.actions[rank], self.runners, num_large)
        self._on_gradients = on_gradients
        self._clock = clock or HostClock()
        self._marks: list[Any] = [None] * (2 * len(self._tasks))
        self._values: list[dict[str, Any]] = []
        self._micro_batches: Sequence[list[Any]] = ()
        self._step = 0

    @torch.no_grad()
    def run(self, micro_batches: Sequence[list[Any]], step: int = 0) -> list[dict[int, Any]]:
        """Run a step; returns what it returns for each micro-batch, by position, as far as this rank makes it."""
        self.begin(micro_batches, step)
        for position in range(len(self._tasks)):
            self.advance(position)
        self.end()
        return self.outputs

    def spans(self) -> list[tuple[Action, float, float]]:
        """When the actions of the last step ran: start and end, in seconds of the process's clock."""
        seconds = self._clock.seconds(self._marks)
        pairs = zip(seconds[::2], seconds[1::2], strict=True)
        return [(task.action, start, end) for task, (start, end) in zip(self._tasks, pairs, strict=True)]

    def begin(self, micro_batches: Sequence[list[Any]], step: int) -> None:
        """Get ready for a step over micro-batches, each as the leaves of its arguments."""
        self._micro_batches = micro_batches
        self._step = step
        self.outputs = [{} for _ in micro_batches]
        self._values = [{} for _ in micro_batches]
        self.exchange.begin()

    def advance(self, position: int) -> None:
        """Run the action at a position, which waits for what it needs from other ranks."""
        task = self._tasks[position]
        try:
            self._run(position, task)
        except BaseException as error:
            self._fail(task.action, error)
            raise

    def end(self) -> None:
        """Wait until everything sent has left, and write buffers to the model."""
        try:
            self.exchange.end()
            for runner in self.runners.values():
                runner.finish()
        except BaseException as error:
            self._fail(None, error)
            raise

    def _run(self, position: int, task: _Task) -> None:
        action = task.action
        values = self._values[action.micro_batch]
        self.exchange.receive(position, self._values)
        seed = seed_of(self.seed, self._step, action.micro_batch) if task.draws else 0
        self._marks[2 * position] = self._clock.mark()
        leaves = self._micro_batches[action.micro_batch]
        made = task.runner.run(action.kind, leaves, values, seed, task.dropped, is_small=task.is_small)
        self._marks[2 * position + 1] = self._clock.mark()
        self.exchange.send(position, made)
        for name in task.kept:
            values[name] = made[name]
        for place, name in task.returned:
            self.outputs[action.micro_batch][place] = made[name]
        if task.completes and self._on_gradients is not None:
            self._on_gradients(action.stage)

    def _fail(self, action: Action | None, error: BaseException) -> None:
        """Values of a step that nobody will finish are let go: they may be most of the memory."""
        self._values = []
        self.exchange.fail(action, error)
        if action is not None and not isinstance(error, PipelineError | RankError):
            error.add_note(f"in {action} (stage {action.stage}, micro-batch {action.micro_batch}) of a pipeline")


def _tasks(cut: CutGraph, row: Sequence[Action], runners: Mapping[int, StageRunner], num_large: int) -> list[_Task]:
    """Walk backwards: the first read that is met is the last."""
    read: set[tuple[int, str]] = set()
    complete: set[int] = set()
    tasks: list[_Task] = []
    for action in reversed(row):
        stage = cut.stages[action.stage]
        program = stage.program(action.kind)
        kept = tuple(name for name in program.outputs if (action.micro_batch, name) in read)
        dropped = tuple(name for name in program.values if (action.micro_batch, name) not in read)
        read |= {(action.micro_batch, name) for name in program.values}
        returned = tuple((place, name) for place, name in stage.returns.items() if name in program.outputs)
        completes = action.kind in (Kind.BACKWARD, Kind.WEIGHT) and action.stage not in complete
        complete |= {action.stage} if completes else set()
        is_small = action.micro_batch >= num_large
        tasks.append(_Task(action, runners[action.stage], kept, dropped, returned, completes, is_small, program.draws))
    return tasks[::-1]
