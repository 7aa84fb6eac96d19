"""Schedules as data: which rank computes what, in which order.

A model is cut into stages, numbered in the order in which data passes them; a rank has one stage or several. A batch is
cut into micro-batches. What is left to decide is the order in which each rank runs the pieces of work that this makes:

    2F0   forward of stage 2 for micro-batch 0
    2B0   whole backward
    2I0   gradients of the stage's inputs only: what the stages before it wait for
    2W0   gradients of its weights: nobody waits for them, so they can fill gaps

Sends and receives are not in a schedule. They follow from the data that flows between stages: a value goes from the
stage that makes it to every later stage that reads it, its gradient the other way. `validate` proves that a schedule
can run, `simulate` says how long it takes and what it holds.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from wholestep.errors import ScheduleError

# Far above what anybody runs and low enough that a hostile file is refused before it costs time or memory.
MAX_RANKS = 4096
MAX_STAGES = 65_536
MAX_MICRO_BATCHES = 1_000_000
MAX_ACTIONS = 2_000_000
_MAX_TEXT = 32 * 2**20
_MAX_SHOWN = 24

_ACTION = re.compile(r"([0-9]{1,7})([FBIW])([0-9]{1,7})", re.ASCII)


class Kind(StrEnum):
    """What an action computes. A backward is either whole, or in two parts of which the second may wait."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT = "I"
    WEIGHT = "W"


@dataclass(frozen=True, slots=True)
class Action:
    """One piece of work: a stage, for one micro-batch. Written as stage, letter, micro-batch: `2F0`."""

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.micro_batch}"

    @staticmethod
    def from_text(text: str) -> Action:
        """The action that `str` wrote; raises `ScheduleError` for anything else."""
        match = _ACTION.fullmatch(text)
        if match is None:
            raise ScheduleError(
                f"{_shown(text)} is no action; write stage, one of F, B, I, W, and micro-batch, as in 2F0"
            )
        stage, kind, micro_batch = match.groups()
        if int(stage) >= MAX_STAGES:
            raise ScheduleError(f"{text} names stage {int(stage)}; there are at most {MAX_STAGES} stages")
        if int(micro_batch) >= MAX_MICRO_BATCHES:
            raise ScheduleError(
                f"{text} names micro-batch {int(micro_batch)}; there are at most {MAX_MICRO_BATCHES} micro-batches"
            )
        return Action(Kind(kind), int(stage), int(micro_batch))


@dataclass(frozen=True)
class Schedule:
    """The compute actions of each rank, in order, and where each stage lives.

    `stage_ranks[stage]` is the rank that has the stage. A schedule without any backward is one for evaluation. Nothing
    is checked here: `validate` does that.
    """

    name: str
    actions: tuple[tuple[Action, ...], ...]
    stage_ranks: tuple[int, ...]
    num_micro_batches: int

    @property
    def num_ranks(self) -> int:
        return len(self.actions)

    @property
    def num_stages(self) -> int:
        return len(self.stage_ranks)

    @property
    def is_forward_only(self) -> bool:
        return all(action.kind is Kind.FORWARD for row in self.actions for action in row)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank, first to last."""
        return tuple(stage for stage, owner in enumerate(self.stage_ranks) if owner == rank)

    def to_csv(self) -> str:
        """One line for each rank, one cell for each action; `from_csv` reads it."""
        return "".join(",".join(map(str, row)) + "\n" for row in self.actions)

    @staticmethod
    def from_csv(text: str, *, name: str = "custom") -> Schedule:
        """Read a schedule: line by line the ranks, cell by cell their actions; empty cells are ignored.

        The ranks of the stages and the number of micro-batches follow from the actions. Raises `ScheduleError`, which
        names line, column and rank, if the text is no schedule; that the schedule can run is for `validate` to say.
        """
        if len(text) > _MAX_TEXT:
            raise ScheduleError(f"the schedule has {len(text)} characters; at most {_MAX_TEXT} are read")
        lines = text.removeprefix("\ufeff").rstrip().split("\n", MAX_RANKS)
        if len(lines) > MAX_RANKS:
            raise ScheduleError(f"the schedule has more than {MAX_RANKS} lines, one for each rank")
        if text.count(",") >= MAX_ACTIONS:
            raise ScheduleError(f"the schedule has more than {MAX_ACTIONS} cells")
        owners: dict[int, int] = {}
        rows = tuple(_row(line, rank, owners) for rank, line in enumerate(lines))
        num_micro_batches = 1 + max(action.micro_batch for row in rows for action in row)
        return Schedule(name, rows, _stage_ranks(owners), num_micro_batches)


def loop_placement(num_ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """Stages dealt out in turn: 0 1 2 0 1 2. The last rank has the loss."""
    return tuple(range(num_ranks)) * stages_per_rank


def v_placement(num_ranks: int) -> tuple[int, ...]:
    """Two stages for each rank, down and up again: 0 1 2 2 1 0. Rank 0 has the input and the loss."""
    return (*range(num_ranks), *reversed(range(num_ranks)))


def _row(line: str, rank: int, owners: dict[int, int]) -> tuple[Action, ...]:
    """The actions of a line; a stage belongs to the rank that names it first, and no other may run it."""
    actions: list[Action] = []
    for column, cell in enumerate(line.split(","), 1):
        text = cell.strip()
        if not text:
            continue
        try:
            action = Action.from_text(text)
        except ScheduleError as error:
            raise ScheduleError(f"line {rank + 1}, column {column} (rank {rank}): {error}") from None
        owner = owners.setdefault(action.stage, rank)
        if owner != rank:
            raise ScheduleError(
                f"line {rank + 1}, column {column} (rank {rank}): {action} belongs to rank {owner}, which has stage "
                f"{action.stage}"
            )
        actions.append(action)
    if not actions:
        raise ScheduleError(f"line {rank + 1} (rank {rank}) has no action; each rank has at least one stage")
    return tuple(actions)


def _stage_ranks(owners: dict[int, int]) -> tuple[int, ...]:
    """Where the stages are, of which none may be missing."""
    missing = next((stage for stage in range(len(owners)) if stage not in owners), None)
    if missing is not None:
        raise ScheduleError(f"stage {missing} has no action, but stage {max(owners)} has some; stages count from 0")
    return tuple(owners[stage] for stage in range(len(owners)))


def _shown(text: str) -> str:
    return repr(text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 1]}…")
