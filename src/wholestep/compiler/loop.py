"""The graphs of the loop that a plan makes of a step, each made when somebody needs it."""

from __future__ import annotations

from functools import cached_property

import torch

from wholestep.compiler.plan import Plan
from wholestep.graph import StepGraph
from wholestep.iteration import Kind, derive, moved_nodes
from wholestep.iteration.moves import SHARED
from wholestep.passes import run_passes


class LoopGraphs:
    """The graphs of a step's loop: `setup` for the first call, `main` for the middle ones, `cleanup` for the last.

    `flush` applies what is pending at any other time, `whole` leaves nothing pending at all. `source` is the functional
    graph that all are derived from. If nothing crosses from one call to the next, all but `flush` are one.
    """

    def __init__(self, source: StepGraph, plan: Plan) -> None:
        self.source = source
        self.plan = plan
        self.blocks = frozenset(node.meta["next_iteration"] for node in moved_nodes(source)) - {SHARED}

    @cached_property
    def whole(self) -> StepGraph:
        return self._finished(self.source.copy())

    @cached_property
    def setup(self) -> StepGraph:
        return self._derived(Kind.SETUP)

    @cached_property
    def main(self) -> StepGraph:
        return self._derived(Kind.MAIN)

    @cached_property
    def cleanup(self) -> StepGraph:
        return self._derived(Kind.CLEANUP)

    @cached_property
    def flush(self) -> StepGraph:
        if not self.blocks:
            return derive(self.source, Kind.FLUSH)
        return self._finished(derive(self.source, Kind.FLUSH), applies=True)

    def by_name(self) -> dict[str, StepGraph]:
        """The graphs that run, which are one if nothing crosses from one call to the next."""
        if not self.blocks:
            return {"step": self.main}
        return {"setup": self.setup, "main": self.main, "cleanup": self.cleanup, "flush": self.flush}

    def _derived(self, kind: Kind) -> StepGraph:
        if not self.blocks:
            return self.whole
        return self._finished(derive(self.source, kind), applies=kind is not Kind.SETUP)

    def _finished(self, graph: StepGraph, *, applies: bool = False) -> StepGraph:
        """A graph as it runs; one that `applies` the call before leaves that in the slots."""
        finished = run_passes(graph, self.plan.loop_passes())
        if applies:
            _write_moved_updates(finished)
        return finished


def _write_moved_updates(graph: StepGraph) -> None:
    """Where no pass has put updates in their slots: do so with those of the call before, as the graph's last acts."""
    slots = graph.placeholders()
    moved = {slot_id: value for slot_id, value in graph.updates.items() if "applies" in value.meta}
    for slot_id, value in moved.items():
        graph.insert(torch.ops.aten.copy_.default, (slots[slot_id], value), like=value, before=graph.output_node)
    if moved:
        graph.set_returned(updates={slot_id: v for slot_id, v in graph.updates.items() if slot_id not in moved})
        graph.is_functional = False
