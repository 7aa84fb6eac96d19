"""The plan of a step: which rewrites it gets, why, and what is expected of it. One object for all who ask."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from wholestep.comm import AllReduce
from wholestep.comm.plan import DataParallelPlan
from wholestep.compiler.made_for import MadeFor
from wholestep.compiler.predictions import Predictions
from wholestep.passes import Pass, Pipeline
from wholestep.remat import RematPlan


@dataclass(frozen=True)
class Choice:
    """What a stage of the compiler has decided: passes, and the reason in words."""

    stage: str
    passes: Pipeline
    reason: str

    def __str__(self) -> str:
        return f"{self.stage}: {self.passes or 'nothing'} ({self.reason})"


@dataclass(frozen=True)
class Plan:
    """All that is done to a captured step, in order.

    Passes of `rewrites` rewrite the step as one function. From what they leave the graphs of the loop are derived, and
    passes of `loop` run on each of them. `communication` says how gradients travel, None on one rank; `memory` what is
    kept for the backward, None if nobody has asked; `predictions` what all that is going to take, if somebody has.

    `print(plan)` is a table of the stages with their reasons. `save` writes a file that
    `wholestep.compile(plan="plan.json")` runs.
    """

    made_for: MadeFor
    rewrites: tuple[Choice, ...]
    loop: tuple[Choice, ...]
    communication: DataParallelPlan | None = None
    memory: RematPlan | None = None
    predictions: Predictions | None = None

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read what `save` has written; raises `PlanFileError` for anything else. Nothing in the file is run."""
        from wholestep.compiler.plan_file import load_plan

        return load_plan(Path(path))

    def save(self, path: str | Path) -> Path:
        """Write the plan as JSON, with its fingerprint, creating folders on the way."""
        from wholestep.compiler.plan_file import save_plan

        return save_plan(self, Path(path))

    @property
    def is_lowered(self) -> bool:
        """Whether parts of the step are compiled by Inductor."""
        return any(choice.stage == "lower" for choice in self.loop)

    def step_passes(self, group: str = "") -> tuple[Pass, ...]:
        """The rewrites of the step as a function, for the ranks of a process group (by name)."""
        return named(group, [item for choice in self.rewrites for item in choice.passes])

    def loop_passes(self) -> tuple[Pass, ...]:
        """The rewrites of each graph of the loop."""
        return tuple(item for choice in self.loop for item in choice.passes)

    @property
    def passes(self) -> Pipeline:
        """All rewrites, in order."""
        return Pipeline((*self.step_passes(), *self.loop_passes()))

    @property
    def fingerprint(self) -> str:
        """What ranks compare: equal for plans that do the same."""
        travel = "" if self.communication is None else self.communication.to_json()
        return hashlib.sha256(f"{self.passes}\n{travel}".encode()).hexdigest()[:16]

    def __str__(self) -> str:
        rows = [(choice.stage, _shown(choice.passes), choice.reason) for choice in (*self.rewrites, *self.loop)]
        widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
        return "\n".join(f"{stage:{widths[0]}}  {names:{widths[1]}}  {reason}" for stage, names, reason in rows)


def named(group: str, passes: Iterable[Pass]) -> tuple[Pass, ...]:
    """Passes for the ranks of a process group: a plan does not know its name, which is another in each job."""
    return tuple(replace(item, group=group) if isinstance(item, AllReduce) else item for item in passes)


def _shown(passes: Pipeline) -> str:
    """Names of passes: their options may be as long as the step."""
    return ", ".join(item.name for item in passes) or "-"
