"""The least bytes to keep, given which ops may run again: a minimum cut.

    source → op            op must not run again: its results exist in the forward only      capacity ∞
                           op may run again, at a price                                      capacity = its price
    value  → op            a second run of the op needs the value                            capacity ∞
    op     → value(in)     a value is there again if its op has run again                    capacity ∞
    value(in) → value(out) keeping the value makes the second run unnecessary                capacity = its weight
    value(out) → sink      a late op reads it                                                capacity ∞

Inputs are resident: available to anyone, they have no vertex. Every path from source to sink is a need of the backward
that goes back to something that cannot be repeated; cutting it somewhere means keeping a value there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from wholestep.remat.flow import FlowNetwork
from wholestep.remat.problem import Problem


@dataclass(frozen=True)
class WayStop:
    """A value on a way that cannot be cut: who makes it, why it may not be kept, and why not repeated.

    `not_repeated` is empty where the op may run again: then it asks for the next value on the way.
    """

    value: str
    num_bytes: int
    op: str
    module: str
    not_kept: str
    not_repeated: str


class NoCutError(ValueError):
    """A late op needs a value that may neither be kept nor computed again; `way` leads there from `late_op`."""

    def __init__(self, late_op: str, way: tuple[WayStop, ...]) -> None:
        self.late_op = late_op
        self.way = way
        super().__init__(f"no value on the way {' <- '.join(self.values)} may be kept")

    @property
    def values(self) -> list[str]:
        """Names of the values on the way, from late to early."""
        return [stop.value for stop in self.way]


def min_cut(
    problem: Problem,
    may_repeat: Callable[[int], bool],
    weight: Callable[[int], int] | None = None,
    *,
    price: Callable[[int], int] | None = None,
    through_unplaced: bool = True,
) -> frozenset[int]:
    """Values to keep, of least total weight (bytes by default), such that no op runs again that must not.

    With a `price` for running ops again, in units of weight, it is the sum of weights and prices that is least.

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
    prices = {} if price is None else {index: price(index) for index in problem.forward_ops}
    infinity = sum(weights.values()) + sum(prices.values()) + 1
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
        elif prices.get(index):
            network.add_edge(source, op_vertex[index], prices[index])
        for value in op.reads:
            if value in leave:
                network.add_edge(leave[value], op_vertex[index], infinity)
    if network.maximum_flow(source, sink) >= infinity:
        raise _no_cut(problem, may_repeat, choosable, through_unplaced)
    behind = network.sink_side(sink)
    return frozenset(value for value in weights if leave[value] in behind and enter[value] not in behind)


def _no_cut(
    problem: Problem, may_repeat: Callable[[int], bool], choosable: frozenset[int], through_unplaced: bool
) -> NoCutError:
    """The error for a way from a late op back to an op that must not run again on which no value may be kept."""
    stack = [(op.name, (value,)) for op in problem.ops if op.is_late for value in op.reads if problem.droppable[value]]
    seen: set[int] = set()
    while stack:
        late_op, way = stack.pop()
        maker = problem.values[way[-1]].maker
        op = problem.ops[maker]
        if way[-1] in seen or way[-1] in choosable or not (op.runs or through_unplaced):
            continue
        seen.add(way[-1])
        if not may_repeat(maker):
            return NoCutError(late_op, tuple(_stop(problem, value, value == way[-1]) for value in way))
        stack += [(late_op, (*way, source)) for source in op.reads if problem.droppable[source]]
    raise AssertionError("a flow without bound has a way")


def _stop(problem: Problem, value: int, is_last: bool) -> WayStop:
    item = problem.values[value]
    op = problem.ops[item.maker]
    not_kept = "it is to be dropped, by annotation" if value in problem.must_drop else "the forward does not compute it"
    not_repeated = "whoever asked for the cut says so" if is_last else ""
    return WayStop(item.name, item.num_bytes, op.name, op.module, not_kept, not_repeated)
