"""Dead code: calls whose result nobody reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from wholestep.graph import StepGraph
from wholestep.passes.base import Pass, register


@register
@dataclass(frozen=True)
class DeadCode(Pass):
    """Erase unused calls; random ops stay, because eager draws their numbers too.

    The manager does this around every pass anyway; as a pass of its own it can stand alone in a pipeline.
    """

    name: ClassVar[str] = "dce"
    repeatable: ClassVar[bool] = True
    needs_functional: ClassVar[bool] = False

    def apply(self, graph: StepGraph) -> StepGraph:
        graph.eliminate_dead_code()
        return graph
