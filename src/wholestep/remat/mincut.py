"""The least bytes to keep, given which ops may run again: a minimum cut.

    source → op            op must not run again: its results exist in the forward only      capacity ∞
    value  → op            a second run of the op needs the value                            capacity ∞
    op     → value(in)     a value is there again if its op has run again                    capacity ∞
    value(in) → value(out) keeping the value makes the second run unnecessary                capacity = its weight
    value(out) → sink      a late op reads it                                                capacity ∞

Inputs are resident: available to anyone, they have no vertex. Every path from source to sink is a need of the backward
that goes back to something that cannot be repeated; cutting it somewhere means keeping a value there.
"""

from __future__ import annotations

from collections.abc import Callable

from wholestep.remat.flow import FlowNetwork
from wholestep.remat.problem import INPUT, Problem


class NoCutError(ValueError):
    """A late op needs a value that may neither be kept nor computed again; `values` leads there."""

    def __init__(self, values: list[str]) -> None:
        super().__init__(f"no value on the way {' <- '.join(values)} may be kept")
        self.values = values


def min_cut(
    problem: Problem,
    may_repeat: Callable[[int], bool],
    weight: Callable[[int], int] | None = None,
    *,
    through_unplaced: bool = True,
) -> frozenset[int]:
    """Values to keep, of least total weight (bytes by default), such that no op runs again that must not.

    Values the problem cannot drop are not among them; `must_drop` values are not kept unless they cannot be repeated.
    Without `through_unplaced`, what late ops need by way of ops that have no place of their own does not count: fewer
    bytes are kept, and ops run again that must not, if those needs have to be met.
    """
    weigh = weight or (lambda value: problem.values[value].num_bytes)
    needed = problem.asked_for(through_unplaced=through_unplaced)
    network = FlowNetwork(2)
    source, sink = 0, 1
    choosable = frozenset(problem.choices)
    weights = {value: max(1, weigh(value)) for value in needed if value in choosable}
    infinity = sum(weights.values()) + 1
    enter: dict[int, int] = {}
    leave: dict[int, int] = {}
    op_vertex: dict[int, int] = {}
    edges: dict[int, int] = {}
    for value in needed:
        enter[value], leave[value] = network.add_vertex(), network.add_vertex()
        capacity = weights.get(value, infinity)
        edges[value] = network.add_edge(enter[value], leave[value], capacity)
    for index, op in enumerate(problem.ops):
        if op.is_late:
            for value in op.reads:
                if value in leave:
                    network.add_edge(leave[value], sink, infinity)
            continue
        made = [value for value in op.makes if value in enter]
        if not made or not (op.runs or through_unplaced):
            continue
        op_vertex[index] = network.add_vertex()
        for value in made:
            network.add_edge(op_vertex[index], enter[value], infinity)
        if not may_repeat(index):
            network.add_edge(source, op_vertex[index], infinity)
        for value in op.reads:
            if value in leave:
                network.add_edge(leave[value], op_vertex[index], infinity)
    if network.maximum_flow(source, sink) >= infinity:
        raise NoCutError(_uncut_path(problem, may_repeat, choosable))
    behind = network.sink_side(sink)
    return frozenset(value for value in weights if leave[value] in behind and enter[value] not in behind)


def _uncut_path(problem: Problem, may_repeat: Callable[[int], bool], choosable: frozenset[int]) -> list[str]:
    """A way from a late op back to an op that must not run again on which no value may be kept."""
    stack = [[value] for op in problem.ops if op.is_late for value in op.reads if problem.droppable[value]]
    seen: set[int] = set()
    while stack:
        path = stack.pop()
        value = path[-1]
        if value in seen or value in choosable or problem.values[value].maker == INPUT:
            continue
        seen.add(value)
        maker = problem.values[value].maker
        if not may_repeat(maker):
            return [problem.values[item].name for item in path]
        stack += [[*path, source] for source in problem.ops[maker].reads if problem.droppable[source]]
    return []
