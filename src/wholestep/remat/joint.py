"""A joint graph (forward and backward in one, as AOTAutograd traces it) cut in two.

    forward(primals)                    -> outputs, saved tensors, saved sizes
    backward(sizes, tensors, tangents)  -> gradients

What the forward's outputs depend on is forward; what depends on a tangent is late. The rest is needed by the backward
alone and runs there when it is asked for. Kept values are saved by the op that makes them, views of them are taken
anew in the backward, sizes are saved as sizes. The backward runs in the order of the simulation, so that its peak is
the one that was planned.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from wholestep import _aot_torch, _torch
from wholestep.cost.memory import tensors_in
from wholestep.graph import Replay, map_nodes, nodes_in, ops, rng_state
from wholestep.passes.cse import freeze, is_uninitialised
from wholestep.remat.build import Program, Reading, read_program
from wholestep.remat.problem import Decision, Problem
from wholestep.remat.simulate import Simulator


@dataclass(frozen=True)
class Joint:
    """A joint graph, its nodes sorted by where they belong, and its program."""

    module: fx.GraphModule
    num_forward_outputs: int
    forward: frozenset[fx.Node]
    late: frozenset[fx.Node]
    program: Program

    @property
    def outputs(self) -> Sequence[Any]:
        return _outputs(self.module)

    @property
    def forward_outputs(self) -> Sequence[Any]:
        return self.outputs[: self.num_forward_outputs]

    @property
    def backward_outputs(self) -> Sequence[Any]:
        return self.outputs[self.num_forward_outputs :]

    @property
    def problem(self) -> Problem:
        return self.program.problem


def _outputs(module: fx.GraphModule) -> Sequence[Any]:
    [output] = module.graph.find_nodes(op="output")
    returned = output.args[0]
    assert isinstance(returned, (list, tuple))
    return returned


def is_tangent(node: fx.Node) -> bool:
    return node.op == "placeholder" and "tangents" in str(node.target)


def read_joint(module: fx.GraphModule, num_forward_outputs: int, costs: Mapping[fx.Node, float]) -> Joint:
    """Sort a joint graph's nodes and make its problem; `costs` by node of the same graph."""
    nodes = list(module.graph.nodes)
    outputs = _outputs(module)
    late = _depending_on(nodes, [node for node in nodes if is_tangent(node)])
    effects = [node for node in nodes if node not in late and node.op == "call_function" and _must_run(node)]
    forward = _needed_by([*nodes_in(outputs[:num_forward_outputs]), *effects])
    needed = forward | _needed_by(nodes_in(outputs[num_forward_outputs:])) | {node for node in late if _must_run(node)}
    unplaced = {node for node in needed if node not in forward and node not in late and node.op == "call_function"}
    reading = Reading(
        is_late=lambda node: node in late,
        arriving=[node for node in nodes if is_tangent(node)],
        unplaced=unplaced,
        returned=nodes_in(outputs[num_forward_outputs:]),
        returned_by_forward=nodes_in(outputs[:num_forward_outputs]),
    )
    order = [node for node in nodes if node not in late] + [node for node in nodes if node in late]
    program = read_program([node for node in order if node in needed or node.op == "placeholder"], reading, costs)
    return Joint(module, num_forward_outputs, frozenset(forward), frozenset(late), program)


def _must_run(node: fx.Node) -> bool:
    return node.op == "call_function" and ops.has_effect(node) and not ops.is_random(node.target)


def _depending_on(nodes: Sequence[fx.Node], roots: Iterable[fx.Node]) -> set[fx.Node]:
    found = set(roots)
    for node in nodes:
        if node.op != "output" and any(source in found for source in node.all_input_nodes):
            found.add(node)
    return found


def _needed_by(roots: Iterable[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack += node.all_input_nodes
    return found


def split_joint(joint: Joint, decision: Decision) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Forward and backward modules that follow a decision, in AOTAutograd's calling convention."""
    simulator = Simulator(joint.program.problem)
    backward = _Backward(joint, simulator.kept_flags(decision.kept))
    backward.emit(simulator.events(decision), simulator.segments(decision.starts))
    forward = _forward_graph(joint, backward)
    return (
        _torch.graph_module(joint.module, forward),
        _torch.graph_module(joint.module, backward.finished()),
    )


@dataclass
class _Backward:
    """Writes the backward graph and notes what it wants from the forward."""

    joint: Joint
    is_kept: list[bool]
    saved: dict[fx.Node, fx.Node] = field(default_factory=dict)
    states: dict[fx.Node, fx.Node] = field(default_factory=dict)
    sizes: dict[fx.Node, fx.Node] = field(default_factory=dict)
    _env: dict[tuple[fx.Node, int], fx.Node] = field(default_factory=dict)
    _late: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Inputs are found one by one while the body is written; each goes in front of the end of its kind.
        self.graph = fx.Graph()
        self._ends = {kind: self.graph.placeholder(f"end_of_{kind}") for kind in ("sizes", "saved", "states")}

    def emit(self, events: Iterable[tuple[int, int | None]], segment_of: Sequence[int]) -> None:
        program = self.joint.program
        for node in self.joint.module.graph.nodes:
            if is_tangent(node):
                self._late[node] = self.graph.node_copy(node)
        for op, segment in events:
            node = program.nodes[op]
            if node is None or (segment is None and not program.problem.ops[op].is_late):
                continue
            if segment is not None:
                self._env[node, segment] = self._copy(node, segment)
            else:
                self._late[node] = self._copy(node, segment_of[op])
            self._take_apart(node, segment_of[op] if segment is None else segment)
        last = max(segment_of, default=0)
        wanted = self.joint.backward_outputs
        returned = [self._resolved(item, last) if isinstance(item, fx.Node) else item for item in wanted]
        output = self.graph.output(tuple(returned))
        output.meta = _aot_torch.output_meta(self.joint.module, self.joint.num_forward_outputs, None)

    def _take_apart(self, node: fx.Node, segment: int) -> None:
        """Items of a tuple come right behind it: as long as the tuple is there, none of them is freed."""
        for item in node.users:
            if item.target is operator.getitem and (node in self.joint.late or not self._is_available(item)):
                copy = self._copy(item, segment)
                if node in self.joint.late:
                    self._late[item] = copy
                else:
                    self._env[item, segment] = copy
                self._take_apart(item, segment)

    def finished(self) -> fx.Graph:
        """Inputs in order: sizes, tensors (kept values, then states of generators), tangents."""
        for node in reversed(list(self.graph.nodes)):
            if node.target is operator.getitem and not node.users:
                self.graph.erase_node(node)
        for end in self._ends.values():
            self.graph.erase_node(end)
        return self.graph

    def _input(self, kind: str, name: str, meta: dict[str, Any]) -> fx.Node:
        with self.graph.inserting_before(self._ends[kind]):
            placeholder = self.graph.placeholder(name)
        placeholder.meta = dict(meta)
        return placeholder

    def _resolved(self, node: fx.Node, segment: int) -> fx.Node:
        """What the backward reads for a node of the joint graph."""
        known = self._late.get(node) or self._env.get((node, segment)) or self.saved.get(node) or self.sizes.get(node)
        if known is not None:
            return known
        if node.op == "get_attr":
            self._env[node, segment] = copy = self.graph.node_copy(node)
            return copy
        if node.op == "call_function" and (node in self.joint.late or not self._is_available(node)):
            self._env[node, segment] = copy = self._copy(node, segment)
            return copy
        if not _holds_tensor(node):
            self.sizes[node] = self._input("sizes", node.name, node.meta)
            return self.sizes[node]
        if not _is_view(node):
            self.saved[node] = self._input("saved", node.name, node.meta)
            return self.saved[node]
        self._env[node, segment] = copy = self._copy(node, segment)
        return copy

    def _is_available(self, node: fx.Node) -> bool:
        """Whether the forward computes a node, or what it is an item of, and what is behind it is kept."""
        whole = node.args[0] if node.target is operator.getitem else node
        return whole in self.joint.forward and all(
            self.is_kept[value] for value in self.joint.program.values_of.get(node, ())
        )

    def _copy(self, node: fx.Node, segment: int) -> fx.Node:
        args = map_nodes(node.args, lambda source: self._resolved(source, segment))
        kwargs = map_nodes(node.kwargs, lambda source: self._resolved(source, segment))
        target: Any = node.target
        if ops.draws(node) and node in self.joint.forward:
            device = str(next(iter(_tensors(node))).device)
            args, target = (self._state(node), *args), Replay(target, device)
        copy = self.graph.create_node("call_function", target, args, kwargs, name=node.name)
        copy.meta = dict(node.meta)
        return copy

    def _state(self, node: fx.Node) -> fx.Node:
        if node not in self.states:
            self.states[node] = self._input("states", f"{node.name}_rng_state", {"val": _fake_state(node)})
        return self.states[node]


def _forward_graph(joint: Joint, backward: _Backward) -> fx.Graph:
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    states: dict[fx.Node, fx.Node] = {}
    wanted = joint.forward | _needed_by([*backward.saved, *backward.sizes])
    for node in joint.module.graph.nodes:
        if (node.op == "placeholder" and not is_tangent(node)) or (node in wanted and node.op != "output"):
            if node in backward.states:
                device = str(next(iter(_tensors(node))).device)
                states[node] = graph.call_function(rng_state, (device,))
                states[node].meta["val"] = backward.states[node].meta["val"]
            env[node] = graph.node_copy(node, env.__getitem__)
    outputs = [env[item] if isinstance(item, fx.Node) else item for item in joint.forward_outputs]
    saved = [
        *(env[node] for node in backward.saved),
        *(states[node] for node in backward.states),
        *(env[node] for node in backward.sizes),
    ]
    output = graph.output((*outputs, *saved))
    output.meta = _aot_torch.output_meta(joint.module, joint.num_forward_outputs, len(saved))
    return graph


def _is_view(node: fx.Node) -> bool:
    return ops.is_op(node) and ops.shares_memory(node.target)  # pyright: ignore[reportArgumentType]


def _holds_tensor(node: fx.Node) -> bool:
    numbers = (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool)
    return not isinstance(node.meta.get("val"), numbers)


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    return list(tensors_in(node.meta.get("val")))


def _fake_state(node: fx.Node) -> torch.Tensor:
    tensor = _tensors(node)[0]
    with _torch.fake_mode_of(tensor):
        return rng_state(str(tensor.device))


def deduplicated(module: fx.GraphModule) -> fx.GraphModule:
    """A copy of a joint graph in which equal pure calls are one. The forward's value serves the backward, too."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    seen: dict[Any, fx.Node] = {}
    for node in module.graph.nodes:
        if node.op == "call_function" and ops.is_op(node) and not ops.has_effect(node) and not is_uninitialised(node):
            key = (node.target, freeze(node.args, env), freeze(node.kwargs, env))
            known = seen.get(key)
            if known is not None:
                env[node] = known
                continue
            env[node] = seen[key] = graph.node_copy(node, env.__getitem__)
        else:
            env[node] = graph.node_copy(node, env.__getitem__)
    return _torch.graph_module(module, graph)
