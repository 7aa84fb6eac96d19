"""A choice put into effect on a step graph: forward nodes are duplicated in front of the late nodes that need them.

```
relu = aten.relu(addmm)                                relu = aten.relu(addmm)
...                                              ->    ...
t = aten.t(relu)                                       relu_1 = aten.relu(addmm)         # again, addmm is kept
mm = aten.mm(t, grad)                                  t_1 = aten.t(relu_1)
                                                       mm = aten.mm(t_1, grad)
```
"""

from __future__ import annotations

import operator

from torch import fx

from wholestep.cost.memory import tensors_in
from wholestep.graph import Phase, Replay, StepGraph, map_nodes, ops, rng_state
from wholestep.remat.build import Program
from wholestep.remat.problem import INPUT, Decision
from wholestep.remat.simulate import Simulator


def rematerialize(graph: StepGraph, program: Program, decision: Decision) -> int:
    """Let late nodes read what is not kept from second runs; returns how many ops run again.

    Originals that nobody reads any more are dead code, for whoever called to remove. Random ops draw the same numbers
    again: the state of their generator is read in front of the first run.
    """
    simulator = Simulator(program.problem)
    rewriter = _Rewriter(graph, program, simulator.kept_flags(decision.kept), simulator.segments(decision.starts))
    waiting: list[tuple[int, int]] = []
    for op, segment in simulator.events(decision):
        if segment is not None:
            waiting.append((op, segment))
        elif program.problem.ops[op].is_late:
            rewriter.place(op, waiting)
            waiting = []
    return rewriter.num_again


class _Rewriter:
    def __init__(self, graph: StepGraph, program: Program, is_kept: list[bool], segment_of: list[int]) -> None:
        self.graph = graph
        self.program = program
        self.is_kept = is_kept
        self.num_again = 0
        self._segment_of = segment_of
        self._again: dict[tuple[fx.Node, int], fx.Node] = {}
        self._states: dict[fx.Node, fx.Node] = {}

    def place(self, op: int, again: list[tuple[int, int]]) -> None:
        """Run `again` in front of a late op, and let that op read the results."""
        node = self.program.nodes[op]
        if node is None:
            return
        for repeated, segment in again:
            source = self.program.nodes[repeated]
            assert source is not None
            self._again[source, segment] = self._copy(source, segment, node)
            self._take_apart(source, segment, node)
            self.num_again += 1
        segment = self._segment_of[op]
        node.args = map_nodes(node.args, lambda source: self._resolved(source, segment, node))
        node.kwargs = map_nodes(node.kwargs, lambda source: self._resolved(source, segment, node))

    def _resolved(self, source: fx.Node, segment: int, before: fx.Node) -> fx.Node:
        """What a late node of a segment reads in place of `source`."""
        if (source, segment) in self._again:
            return self._again[source, segment]
        if not self._is_dropped(source):
            return source
        copy = self._copy(source, segment, before)  # a view or an item: its base has run again
        self._again[source, segment] = copy
        return copy

    def _take_apart(self, source: fx.Node, segment: int, before: fx.Node) -> None:
        """Items of a tuple come right behind it: as long as the tuple is there, none of them is freed."""
        for item in source.users:
            if item.target is operator.getitem and self._is_dropped(item):
                self._again[item, segment] = self._copy(item, segment, before)
                self._take_apart(item, segment, before)

    def _is_dropped(self, node: fx.Node) -> bool:
        values = self.program.problem.values
        return any(
            not self.is_kept[value] and values[value].maker != INPUT for value in self.program.values_of.get(node, ())
        )

    def _copy(self, source: fx.Node, segment: int, before: fx.Node) -> fx.Node:
        args = map_nodes(source.args, lambda node: self._resolved(node, segment, before))
        kwargs = map_nodes(source.kwargs, lambda node: self._resolved(node, segment, before))
        target = source.target
        assert callable(target)
        if ops.draws(source):
            device = next(str(tensor.device) for tensor in tensors_in(source.meta["val"]))
            args = (self._state_before(source, device), *args)
            target = Replay(target, device)
        copy = self.graph.insert(target, args, kwargs, like=source, before=before, phase=Phase.BACKWARD)
        copy.meta["again"] = source.name
        return copy

    def _state_before(self, node: fx.Node, device: str) -> fx.Node:
        if node not in self._states:
            self._states[node] = self.graph.insert(rng_state, (device,), like=node, before=node)
            self._states[node].meta["effect"] = node.meta.get("effect")
        return self._states[node]
