"""From an FX graph to a `Problem`: which nodes are ops, which values share memory, what may run again."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from wholestep import _torch
from wholestep.cost.flops import node_flops
from wholestep.cost.memory import node_bytes, storage_bytes, tensors_in
from wholestep.graph import Phase, SlotKind, StepGraph, nodes_in, ops
from wholestep.graph.replay import num_state_bytes
from wholestep.remat.problem import INPUT, Op, Problem, Value

# They read a generator although their schema does not say so: their results are seeds for ops that are pure.
_SEEDS = ("inductor_seed", "inductor_seeds")


@dataclass(frozen=True)
class Program:
    """A graph and its problem, with the way from one to the other.

    `nodes[i]` is the node of op `i`, None for what has none (the arrival of inputs); `values_of[node]` are the values
    behind a node (a view's are its base's).
    """

    problem: Problem
    nodes: tuple[fx.Node | None, ...]
    values_of: Mapping[fx.Node, tuple[int, ...]]


@dataclass(frozen=True)
class Reading:
    """How to read a graph.

    `is_late` says what runs once only. Inputs are resident but for those `arriving`: they are counted, and go once they
    are used. They arrive in front of the first late op, or at the start if `arriving_first`. `unplaced` nodes run only
    when a late op asks for them. What is `returned` lives to the end, what is `returned_by_forward` until the first
    late op.
    """

    is_late: Callable[[fx.Node], bool]
    arriving: Collection[fx.Node] = ()
    arriving_first: bool = False
    unplaced: Collection[fx.Node] = ()
    returned: Sequence[fx.Node] = ()
    returned_by_forward: Sequence[fx.Node] = ()


def step_program(graph: StepGraph, costs: Mapping[fx.Node, float], *, updates_in_place: bool = False) -> Program:
    """A whole step: all that is forward may run again for the backward and what follows.

    With `updates_in_place` what the optimizer makes takes no memory of its own. A functional update is a second set of
    parameters and state, often more than all that is kept for the backward; a plan that fits beside it would be content
    with much too little. The finished graph has no such set.
    """
    carried = [node for node in graph.nodes if (slot := graph.slot_of(node)) and slot.kind is SlotKind.CARRY]
    reading = Reading(
        is_late=lambda node: node.meta["phase"] is not Phase.FORWARD,
        arriving=carried,
        arriving_first=True,
        returned=graph.output_node.all_input_nodes,
    )
    program = read_program(graph.nodes, reading, costs)
    return _without_second_set(program) if updates_in_place else program


def _without_second_set(program: Program) -> Program:
    problem = program.problem
    makers = [None if value.maker == INPUT else program.nodes[value.maker] for value in problem.values]
    values = tuple(
        replace(value, num_bytes=0) if maker is not None and maker.meta["phase"] is Phase.OPTIMIZER else value
        for value, maker in zip(problem.values, makers, strict=True)
    )
    return replace(program, problem=replace(problem, values=values))


def read_program(nodes: Sequence[fx.Node], reading: Reading, costs: Mapping[fx.Node, float]) -> Program:
    """Turn nodes in execution order into a program; a node's cost is 0 if `costs` does not name it."""
    reader = _Reader(reading, costs)
    for node in nodes:
        reader.add(node)
    return reader.program()


@dataclass
class _Reader:
    reading: Reading
    costs: Mapping[fx.Node, float]
    ops: list[Op] = field(default_factory=list)
    nodes: list[fx.Node | None] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    values_of: dict[fx.Node, tuple[int, ...]] = field(default_factory=dict)
    _parts: dict[fx.Node, Any] = field(default_factory=dict)
    _by_storage: dict[int, int] = field(default_factory=dict)
    _late: set[fx.Node] = field(default_factory=set)
    _arriving: list[int] = field(default_factory=list)

    def add(self, node: fx.Node) -> None:
        if node.op in ("placeholder", "get_attr"):
            self._note(node, self._new_parts(node, INPUT))
            if node in self.reading.arriving:
                self._arriving += self.values_of[node]
        elif node.op == "call_function":
            if self.reading.is_late(node) and not self._late:
                self._hand_out()
            if self._arriving and (self.reading.arriving_first or self.reading.is_late(node)):
                self._arrive()
            self._add_call(node)

    def _hand_out(self) -> None:
        values = dict.fromkeys(v for node in self.reading.returned_by_forward for v in self.values_of.get(node, ()))
        if values:
            self.ops.append(Op("return", tuple(values), (), unrepeatable="it is the end of the forward"))
            self.nodes.append(None)

    def _arrive(self) -> None:
        for value in self._arriving:
            self.values[value] = replace(self.values[value], maker=len(self.ops))
        self.ops.append(Op("arrival", (), tuple(self._arriving), is_late=True))
        self.nodes.append(None)
        self._arriving = []

    def program(self) -> Program:
        returned = {value for node in self.reading.returned for value in self.values_of.get(node, ())}
        resident = [value for value in self.values if value.maker == INPUT]
        problem = Problem(
            tuple(self.ops),
            tuple(self.values),
            frozenset(value for value in returned if self.values[value].maker != INPUT),
            must_keep=_with_policy(self.nodes, self.ops, "must_save"),
            must_drop=_in_checkpoint_regions(self.nodes, self.values, self.ops, returned)
            - _with_policy(self.nodes, self.ops, "must_save", "prefer_save"),
            resident_bytes=sum(value.num_bytes for value in resident),
        )
        return Program(problem, tuple(self.nodes), self.values_of)

    def _add_call(self, node: fx.Node) -> None:
        if self.reading.is_late(node) or any(source in self._late for source in node.all_input_nodes):
            self._late.add(node)
        if node.target is operator.getitem:
            source, index = node.args
            assert isinstance(source, fx.Node)
            self._note(node, self._parts[source][index])
            return
        if ops.is_op(node) and ops.shares_memory(node.target):  # pyright: ignore[reportArgumentType]
            self._note(node, self._aliased(node))
            return
        is_late = node in self._late
        state = () if is_late or not ops.draws(node) else self._state_of(node)
        number = len(self.ops)
        known = len(self.values)
        self._note(node, self._new_parts(node, number))
        self.nodes.append(node)
        self.ops.append(
            Op(
                node.name,
                tuple(dict.fromkeys(value for source in node.all_input_nodes for value in self.values_of[source])),
                tuple(range(known, len(self.values))),
                is_late=is_late,
                cost=self.costs.get(node, 0.0),
                flops=0 if is_late else node_flops(node),
                moved_bytes=0 if is_late else _moved_bytes(node),
                unrepeatable="" if is_late else unrepeatable(node),
                reads_again=state,
                is_random=ops.draws(node),
                runs=node not in self.reading.unplaced,
                module=node.meta.get("fqn", ""),
                kind=str(node.target),
            )
        )

    def _state_of(self, node: fx.Node) -> tuple[int, ...]:
        """The generator's state in front of a random op; gone at once unless the op runs again."""
        devices = [tensor.device.type for tensor in tensors_in(node.meta.get("val"))]
        if unrepeatable(node) or not devices:
            return ()
        value = len(self.values)
        self.values.append(Value(f"{node.name}.state", num_state_bytes(devices[0]), len(self.ops)))
        self.ops.append(Op(f"{node.name}.state", (), (value,), unrepeatable="it is the state of a generator"))
        self.nodes.append(None)
        return (value,)

    def _aliased(self, node: fx.Node) -> Any:
        """A view is its base; one with several results (`split`) is its base several times."""
        sources = [source for source in node.all_input_nodes if isinstance(source.meta.get("val"), torch.Tensor)]
        base = self._parts[sources[0]] if sources else None
        value = node.meta.get("val")
        return [base] * len(value) if isinstance(value, (list, tuple)) else base

    def _new_parts(self, node: fx.Node, maker: int) -> Any:
        def number(value: Any, name: str) -> Any:
            if isinstance(value, (list, tuple)):
                return [number(item, f"{name}.{index}") for index, item in enumerate(value)]
            if not isinstance(value, torch.Tensor):
                return None
            key = _torch.storage_key(value)
            if key not in self._by_storage:
                self._by_storage[key] = len(self.values)
                self.values.append(Value(name, storage_bytes(value), maker))
            return self._by_storage[key]

        return number(node.meta.get("val"), node.name)

    def _note(self, node: fx.Node, parts: Any) -> None:
        self._parts[node] = parts
        self.values_of[node] = tuple(dict.fromkeys(_flat(parts)))


def _flat(parts: Any) -> list[int]:
    if isinstance(parts, list):
        return [number for item in parts for number in _flat(item)]
    return [] if parts is None else [parts]


def _moved_bytes(node: fx.Node) -> int:
    traffic = node_bytes(node)
    return traffic.read + traffic.written


def unrepeatable(node: fx.Node) -> str:
    """Why a call must not run a second time, "" if it may."""
    target: Any = node.target
    if not ops.is_op(node):
        return "" if ops.is_pure(target) else "it is not a plain operator"
    if _torch.packet_name(target) in _SEEDS:
        return "it draws seeds"
    if ops.is_random(target):
        return "" if not ops.draws(node) or _is_replayable(node) else "its randomness cannot be replayed"
    if ops.is_collective(target):
        return "it talks to other ranks"
    if ops.written_arguments(target):
        return "it writes to its arguments"
    return "" if ops.is_pure(target) else "it may have effects"


def _is_replayable(node: fx.Node) -> bool:
    devices = {
        value.device.type
        for value in [node.meta.get("val"), *(source.meta.get("val") for source in nodes_in((node.args, node.kwargs)))]
        if isinstance(value, torch.Tensor)
    }
    return devices <= {"cpu", "cuda"}


def _with_policy(nodes: Sequence[fx.Node | None], all_ops: Sequence[Op], *policies: str) -> frozenset[int]:
    """Forward values of ops for which a selective checkpoint has one of these policies."""
    return frozenset(
        value
        for node, op in zip(nodes, all_ops)
        if node is not None and not op.is_late and node.meta.get("checkpoint_policy") in policies
        for value in op.makes
    )


def _in_checkpoint_regions(
    nodes: Sequence[fx.Node | None], values: Sequence[Value], all_ops: Sequence[Op], returned: Collection[int]
) -> frozenset[int]:
    """Values that `torch.utils.checkpoint` says to drop: made in a region and read nowhere else in the forward.

    What leaves a region is kept for whoever needs it there, which includes the border of two adjacent regions.
    """
    regions = [
        None if op.is_late or node is None else node.meta.get("checkpoint_region") for node, op in zip(nodes, all_ops)
    ]
    if all(region is None for region in regions):
        return frozenset()
    leaving = set(returned)
    for index, op in enumerate(all_ops):
        if op.runs and not op.is_late:
            leaving.update(
                value
                for value in op.reads
                if values[value].maker != INPUT and regions[values[value].maker] != regions[index]
            )
    return frozenset(
        value
        for index, op in enumerate(all_ops)
        if regions[index] is not None and not op.unrepeatable
        for value in op.makes
        if value not in leaving
    )
