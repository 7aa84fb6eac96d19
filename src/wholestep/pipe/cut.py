"""A placed graph cut into programs: forward, input gradients and weight gradients of each stage.

A program is a step graph of its own. What it reads is an input of the step (a *slot*: a parameter, a buffer, a part of
the batch) or a *value*, called like the node that makes it; what it returns are values. Programs of one stage hand
values to each other, and that is what a stage keeps for its backward; values that another stage reads travel.

    forward    F   bound forward calls of the stage
    backward   I   those backward calls that values for other stages are computed from
               W   the other ones: gradients of weights, mostly
               B   both, in the order of the graph

Parameters that several stages use are replicated or transmitted: see `shares`.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import fx

from wholestep import _torch
from wholestep.graph import Phase, Slot, SlotKind, StepGraph, nodes_in, ops
from wholestep.pipe.placement import Placement, place
from wholestep.pipe.schedule import Kind
from wholestep.pipe.shares import gradient_shares, transmitted
from wholestep.pipe.state import hold_buffers, refuse_unfit

aten = torch.ops.aten

# Backward ops that can be told which of their results are wanted; the position of that argument.
_MASKED = {
    aten.convolution_backward.default: 10,
    aten.native_layer_norm_backward.default: 7,
    aten.native_group_norm_backward.default: 9,
}


@dataclass(frozen=True)
class Program:
    """A graph that takes `slots` and `values`, in this order, and returns the values that `outputs` names."""

    graph: StepGraph
    slots: tuple[str, ...]
    values: tuple[str, ...]
    outputs: tuple[str, ...]

    @cached_property
    def draws(self) -> bool:
        """Whether it draws random numbers."""
        return any(ops.draws(node) for node in self.graph.calls() if ops.is_op(node))


@dataclass(frozen=True)
class Stage:
    """The programs of a stage, and what becomes of values.

    `updates` maps buffers to the values that replace them after a forward, `gradients` parameters to the values that
    are added to their gradient after a backward, `returns` positions in what the step returns to values. `fakes` has
    the shape and type of every value that the stage makes or reads.
    """

    index: int
    forward: Program
    backward_input: Program
    backward_weight: Program
    backward: Program
    updates: Mapping[str, str]
    gradients: Mapping[str, str]
    returns: Mapping[int, str]
    fakes: Mapping[str, torch.Tensor]

    def program(self, kind: Kind) -> Program:
        programs = (self.forward, self.backward, self.backward_input, self.backward_weight)
        return dict(zip((Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT), programs, strict=True))[kind]

    @property
    def programs(self) -> tuple[Program, ...]:
        return (self.forward, self.backward_input, self.backward_weight)

    @cached_property
    def slots(self) -> tuple[str, ...]:
        """Inputs of the step that the stage reads."""
        return tuple(dict.fromkeys(slot for program in self.programs for slot in program.slots))

    @cached_property
    def made(self) -> frozenset[str]:
        return frozenset(name for program in self.programs for name in program.outputs)

    @cached_property
    def wanted(self) -> frozenset[str]:
        """Values of other stages that this one reads."""
        return frozenset(name for program in self.programs for name in program.values if name not in self.made)


@dataclass(frozen=True)
class CutGraph:
    """All stages of a step. `readers` says for each value that travels which stages read it, `source` who makes it."""

    stages: tuple[Stage, ...]
    num_outputs: int

    @cached_property
    def device(self) -> torch.device:
        """Where values are; a GPU if any of them is on one."""
        devices = {fake.device for stage in self.stages for fake in stage.fakes.values()}
        return next((device for device in devices if device.type == "cuda"), torch.device("cpu"))

    @cached_property
    def source(self) -> dict[str, int]:
        return {name: stage.index for stage in self.stages for name in stage.made}

    @cached_property
    def readers(self) -> dict[str, tuple[int, ...]]:
        found: dict[str, list[int]] = {}
        for stage in self.stages:
            for name in sorted(stage.wanted):
                found.setdefault(name, []).append(stage.index)
        return {name: tuple(stages) for name, stages in found.items()}

    @cached_property
    def holders(self) -> dict[str, tuple[int, ...]]:
        """Parameter slots, with the stages that read them or make a share of their gradient."""
        found: dict[str, list[int]] = {}
        for stage in self.stages:
            for slot in dict.fromkeys((*stage.slots, *stage.gradients)):
                found.setdefault(slot, []).append(stage.index)
        return {slot: tuple(stages) for slot, stages in found.items() if slot.startswith(f"{SlotKind.PARAM}.")}


def cut(
    graph: StepGraph, borders: Sequence[int], *, shared: Literal["replicate", "transmit"] = "replicate"
) -> CutGraph:
    """Cut the graph of a micro-batch at borders (see `place`); it is left as it is.

    With `shared="transmit"`, a parameter that several stages use belongs to the first of them only. The others get it
    as a value, for each micro-batch, and their gradients travel back. Raises `SplitError` for a graph that does not
    work in a pipeline: one that reads gradients from before, writes to its arguments or changes a buffer that another
    stage reads.
    """
    graph = graph.copy()
    placement = place(graph, borders)
    stage_of = dict(placement.stage_of)
    refuse_unfit(graph, stage_of)
    hold_buffers(graph, stage_of)
    shares = (transmitted if shared == "transmit" else gradient_shares)(graph, stage_of)
    _split_by_masks(graph, stage_of, set(shares.values()))
    graph.set_returned(results={f"{stage}.{slot}": node for (stage, slot), node in shares.items()})
    graph.eliminate_dead_code()
    return _Cutter(graph, replace(placement, stage_of=stage_of), shares).run()


def _split_by_masks(graph: StepGraph, stage_of: dict[fx.Node, int], shares: set[fx.Node]) -> None:
    """Let ops that make gradients of inputs and of weights in one go make them apart, so that the latter can wait.

    ```
    both = convolution_backward(..., [True, True, False])         i = convolution_backward(..., [True, False, False])
    dx = both[0]; dw = both[1]                             ->     w = convolution_backward(..., [False, True, False])
    ```
    """
    for node in list(graph.calls()):
        target: Any = node.target
        position = _MASKED.get(target)
        items = {index: user for user in node.users if (index := ops.getitem_index(user)) is not None}
        if (
            position is None
            or 0 not in items
            or len(items) < 2
            or not shares.issuperset(set(items.values()) - {items[0]})
        ):
            continue
        mask: Any = node.args[position]
        late = graph.insert(
            target,
            (*node.args[:position], [False, *mask[1:]], *node.args[position + 1 :]),
            like=node,
            after=items[0],
        )
        node.args = (*node.args[:position], [True, *[False] * (len(mask) - 1)], *node.args[position + 1 :])
        node.meta["val"] = (node.meta["val"][0], *[None] * (len(mask) - 1))
        stage_of[late] = stage_of[node]
        for index, item in items.items():
            if index:
                item.args = (late, index)
                late.append(item)


def _join_masks(graph: StepGraph) -> None:
    """Undo `_split_by_masks` where both halves are in one program: one op reads its arguments once."""
    earlier: dict[str, fx.Node] = {}
    for node in list(graph.calls()):
        target: Any = node.target
        position = _MASKED.get(target)
        if position is None:
            continue
        args: list[Any] = list(node.args)
        mask = args.pop(position)
        first = earlier.setdefault(str((target, args)), node)
        if first is node:
            continue
        both: Any = first.args[position]
        joined = [one or other for one, other in zip(both, mask, strict=True)]
        first.args = (*first.args[:position], joined, *first.args[position + 1 :])
        halves = zip(first.meta["val"], node.meta["val"], strict=True)
        first.meta["val"] = tuple(other if one is None else one for one, other in halves)
        graph.replace({node: first})


# Programs


@dataclass
class _Cutter:
    """`kind_of` says of each bound call whether it belongs to F, I or W."""

    graph: StepGraph
    placement: Placement
    shares: Mapping[tuple[int, str], fx.Node]
    kind_of: dict[fx.Node, Kind] = field(default_factory=dict)

    def run(self) -> CutGraph:
        self.bound = [node for node in self.graph.calls() if self.placement.is_bound(node)]
        self._divide()
        self.exported = self._exported()
        stages = tuple(self._stage(index) for index in range(self.placement.num_stages))
        return CutGraph(stages, len(self.graph.outputs))

    def _divide(self) -> None:
        """Forward calls are F. Of the backward, I is what values for other stages are computed from."""
        stage_of = self.placement.stage_of
        needed: set[fx.Node] = set()
        for node in reversed(self.bound):
            if any(stage_of.get(user, stage_of[node]) != stage_of[node] for user in node.users) or node in needed:
                needed |= {node, *node.all_input_nodes}
        for node in self.bound:
            is_early = node.meta["phase"] is Phase.FORWARD and not self._is_behind_backward(node)
            late = Kind.INPUT if node in needed else Kind.WEIGHT
            self.kind_of[node] = Kind.FORWARD if is_early else late
        for node in self.bound:  # tuples stay with their items
            if node.target is operator.getitem:
                self.kind_of[node] = self.kind_of.get(node.args[0], self.kind_of[node])  # pyright: ignore

    def _is_behind_backward(self, node: fx.Node) -> bool:
        return any(self.kind_of.get(source, Kind.FORWARD) is not Kind.FORWARD for source in node.all_input_nodes)

    def _exported(self) -> set[fx.Node]:
        """Bound values that somebody outside their own program wants."""
        wanted = {node for node in nodes_in(self.graph.output_node.args) if self.placement.is_bound(node)}
        for node in self.bound:
            for source in self._bound_sources(node):
                if self._program_of(source) != self._program_of(node):
                    wanted.add(source)
        return wanted

    def _program_of(self, node: fx.Node) -> tuple[int, Kind]:
        return self.placement.stage_of[node], self.kind_of[node]

    def _bound_sources(self, node: fx.Node) -> list[fx.Node]:
        """Bound values that a node reads, itself or through values that are rebuilt for it."""
        found: dict[fx.Node, None] = {}
        self._collect(node.all_input_nodes, set(), {}, {}, found)
        return list(found)

    def _stage(self, index: int) -> Stage:
        own = [node for node in self.bound if self.placement.stage_of[node] == index]
        backward = [node for node in own if self.kind_of[node] is not Kind.FORWARD]
        programs = {
            kind: self._program([node for node in own if self.kind_of[node] is kind], index)
            for kind in (Kind.FORWARD, Kind.INPUT, Kind.WEIGHT)
        }
        whole = self._program(backward, index)
        returned = {
            position: node.name
            for position, node in enumerate(self.graph.outputs)
            if isinstance(node, fx.Node) and self._home(node) == index
        }
        fakes = {node.name: node.meta["val"] for node in self.exported}
        names = {*programs[Kind.FORWARD].outputs, *whole.outputs, *whole.values, *programs[Kind.FORWARD].values}
        return Stage(
            index,
            programs[Kind.FORWARD],
            programs[Kind.INPUT],
            programs[Kind.WEIGHT],
            whole,
            {slot: node.name for slot, node in self.graph.updates.items() if self._home(node) == index},
            {slot: node.name for (stage, slot), node in self.shares.items() if stage == index},
            returned,
            {name: fakes[name] for name in names if name in fakes},
        )

    def _home(self, node: fx.Node) -> int:
        """The stage that has a value; what is free, the first one has."""
        return self.placement.stage_of.get(node, 0)

    def _program(self, nodes: Sequence[fx.Node], stage: int) -> Program:
        """A graph of its own for calls of one stage, with free values rebuilt in it."""
        inside = set(nodes)
        free: dict[fx.Node, None] = {}
        slots: dict[fx.Node, None] = {}
        values: dict[fx.Node, None] = {}
        for node in nodes:
            self._collect(node.all_input_nodes, inside, free, slots, values)
        outputs = [node for node in nodes if node in self.exported and self._leaves_program(node, inside)]
        graph = fx.Graph()
        env: dict[fx.Node, fx.Node] = {}
        known: dict[str, Slot] = {}
        for node in (*slots, *values):
            env[node] = graph.placeholder(node.name)
            env[node].meta = dict(node.meta)
            known[env[node].name] = self.graph.slots.get(node.name) or Slot(SlotKind.CARRY, node.name)
        for node in sorted([*free, *nodes]):
            env[node] = graph.node_copy(node, env.__getitem__)
        graph.output({"outputs": tuple(env[node] for node in outputs), "updates": {}, "results": {}})
        step = StepGraph(_torch.graph_module(torch.nn.Module(), graph), known, self.graph.fake_mode)
        _join_masks(step)
        return Program(
            step,
            tuple(self.graph.slots[node.name].id for node in slots),
            tuple(node.name for node in values),
            tuple(node.name for node in outputs),
        )

    def _leaves_program(self, node: fx.Node, inside: set[fx.Node]) -> bool:
        """Whether somebody outside a set of calls wants a value; halves of a backward hand on more than the whole."""
        return any(user not in inside for user in node.users)

    def _collect(
        self,
        sources: Iterable[fx.Node],
        inside: set[fx.Node],
        free: dict[fx.Node, None],
        slots: dict[fx.Node, None],
        values: dict[fx.Node, None],
    ) -> None:
        for source in sources:
            if source in inside or source in free:
                continue
            if source.op == "placeholder":
                slots[source] = None
            elif self.placement.is_bound(source):
                values[source] = None
            else:
                self._collect(source.all_input_nodes, inside, free, slots, values)
                free[source] = None
