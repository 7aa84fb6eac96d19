"""The `remat` pass: what is not kept runs again where the backward needs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from wholestep.errors import PassError
from wholestep.graph import StepGraph
from wholestep.passes import Pass, register
from wholestep.remat.apply import rematerialize
from wholestep.remat.build import step_program
from wholestep.remat.problem import Decision
from wholestep.remat.search import Planner

EVERYTHING = "*"


@register
@dataclass(frozen=True)
class Remat(Pass):
    """Keep the named forward values for the backward and compute everything else again, just in time.

    `kept` are names of values (a node's name, or `node.index` for one of several results) between spaces, `"*"` is all
    of them: then only `torch.utils.checkpoint` regions run again. `starts` are the nodes behind the forward with which
    a new segment begins: what one segment has computed again is not held for the next.

    ```
    remat{kept="addmm addmm_1",starts="mm_4"}
    ```
    """

    name: ClassVar[str] = "remat"
    after: ClassVar[tuple[str, ...]] = ("simplify", "cse")
    kept: str = EVERYTHING
    starts: str = ""

    def apply(self, graph: StepGraph) -> StepGraph:
        program = step_program(graph, {})
        problem = program.problem
        if self.kept == EVERYTHING:
            decision = Planner(problem).everything.decision
        else:
            values = {value.name: index for index, value in enumerate(problem.values)}
            ops = {op.name: index for index, op in enumerate(problem.ops)}
            kept = _numbers(self.kept, values, "value to keep")
            decision = Decision(
                frozenset(value for value in kept if problem.droppable[value]),
                frozenset(_numbers(self.starts, ops, "node to start with")),
            )
        rematerialize(graph, program, decision)
        return graph


def _numbers(names: str, known: dict[str, int], role: str) -> list[int]:
    for name in names.split():
        if name not in known:
            raise PassError(f"remat: there is no {role} called '{name}' in this graph")
    return [known[name] for name in names.split()]
