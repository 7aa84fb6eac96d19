"""Values that a step asks about while it is traced, and that the call's own arguments decide.

    if attention_mask.all(): ...           eager looks at the batch, and so does the capture:

    traced     batch.mask -> all -> _local_scalar_dense        the nodes that the question depends on, and no others
    answered   by running those nodes on the real arguments    eager's branch is taken
    guarded    by running them again at each call              another answer is another graph

Only what is known before the step runs can be answered: arguments, buffers and constants, through ops without random
numbers. Values that depend on parameters or on what the step has computed from them are refused, as ever.

An optimizer that branches on what it computes from its state (`step = state["step"].item()`) may ask for that as well.
Such a number is another one at each call, so the answer is not guarded: Python computes with it (`record.numbers`), and
guards the branches.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from wholestep import _torch
from wholestep.capture import blank, source
from wholestep.errors import CaptureError
from wholestep.graph import Phase, Slot, SlotKind, StepGraph, map_nodes, ops

_KNOWN_BEFORE = (SlotKind.BATCH, SlotKind.BUFFER, SlotKind.CONSTANT)
_MAX_NODES = 500
_MAX_QUESTIONS = 200


@functools.cache
def is_asking(func: Any) -> bool:
    """Whether an operator looks at a value, as all ways to do so end in one: `.item()`, `bool()`, `torch.equal`."""
    returned = [str(value.type) for value in _torch.schema(func).returns]
    return torch.Tag.data_dependent_output in _torch.tags(func) and returned in (["number"], ["bool"])


class Answers(list[Any]):
    """The values of one call, in the order of the questions."""


@dataclass(frozen=True)
class Answer:
    """What a value was at capture, and the line that asked for it."""

    value: Any
    where: str
    is_open: bool = False
    """Whether it may be another one at each call."""


@dataclass(frozen=True)
class Asked:
    """The questions of a step as one graph, whose outputs are to be equal to the answers that are not open.

    Left out are those that depend on no input: their answer is certain. `found` holds the answers of the call that is
    running, to all questions; `places` says where in there those of the graph stand.
    """

    graph: StepGraph
    answers: tuple[Answer, ...]
    places: tuple[int, ...]
    found: Answers


@dataclass
class Questions:
    """Questions of a trace in progress.

    Unless it `is_answering`, none can be asked about the batch: ranks have different ones, and must run the same graph.
    """

    is_answering: bool = False
    of_state: bool = False
    """Whether the state of optimizers may be asked about too."""
    found: Answers = field(default_factory=Answers)
    """All answers, in the order of the questions."""
    _asked: dict[fx.Node, Answer] = field(default_factory=dict)
    _values: dict[fx.Node, Any] = field(default_factory=dict)

    def can_answer(self, node: fx.Node, reals: Mapping[str, Any], slots: Mapping[str, Slot]) -> bool:
        """Whether a value is known before the step runs; `reals` and `slots` are those of inputs, by their names."""
        kinds = (*(_KNOWN_BEFORE if self.is_answering else ()), *((SlotKind.STATE,) if self.of_state else ()))
        nodes = ancestors(node, _MAX_NODES) if kinds else []
        return 0 < len(nodes) <= _MAX_NODES and all(_is_known_before(other, kinds, reals, slots) for other in nodes)

    def answer(
        self, tracer: Any, func: Any, args: tuple[Any, ...], reals: Mapping[str, Any], *, is_open: bool = False
    ) -> Any:
        """Put a question: run its nodes on real values, and remember it; `args` are nodes and plain values."""
        if not is_open and sum(not answer.is_open for answer in self._asked.values()) == _MAX_QUESTIONS:
            raise CaptureError(
                f"the step looks at more than {_MAX_QUESTIONS} values of its batch",
                location=source.current_location(),
                advice="Look at values before the call, and pass what follows from them as arguments",
            )
        node = tracer.graph.call_function(func, args)
        with _torch.real_kernels():
            value = _evaluated(node, tracer, reals, self._values)
        node.meta["val"] = value
        self._asked[node] = Answer(value, source.current_line(), is_open)
        self.found.append(value)
        return value

    def expect(self, node: fx.Node, value: Any, where: str) -> None:
        """Ask at each call what a node computes, which has to be this."""
        node.meta["val"] = value
        self._asked[node] = Answer(value, where)
        self.found.append(value)

    def settled(self, slots: Mapping[str, Slot], fake_mode: Any) -> Asked | None:
        """The questions as a graph of their own, once all inputs of the traced graph are placeholders."""
        self._values.clear()
        needs = {node: ancestors(node) for node in self._asked}
        places = {node: index for index, node in enumerate(self._asked) if any(map(_is_input, needs[node]))}
        if not places:
            return None
        needed = {other for node in places for other in needs[node]}
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        in_order = [node for node in next(iter(places)).graph.nodes if node in needed]
        for node in sorted(in_order, key=lambda node: not _is_input(node)):  # stable: inputs first
            copies[node] = graph.node_copy(node, copies.__getitem__)
            copies[node].meta.setdefault("phase", Phase.FORWARD)
        outputs = tuple(copies[node] for node in places)
        graph.output({"outputs": outputs, "updates": {}, "results": {}})
        own = {copies[node].name: slots[node.name] for node in in_order if _is_input(node)}
        asked = StepGraph(_torch.graph_module(nn.Module(), graph), own, fake_mode)
        return Asked(asked, tuple(self._asked[node] for node in places), tuple(places.values()), self.found)


def ancestors(node: fx.Node, enough: float = math.inf) -> list[fx.Node]:
    """A node and all that it is computed from; not all of that if it is more than `enough`."""
    seen: dict[fx.Node, None] = {}
    pending = [node]
    while pending and len(seen) <= enough:
        current = pending.pop()
        if current not in seen:
            seen[current] = None
            pending += current.all_input_nodes
    return list(seen)


def _is_input(node: fx.Node) -> bool:
    return node.op == "placeholder"


def _is_known_before(
    node: fx.Node, kinds: Container[SlotKind], reals: Mapping[str, Any], slots: Mapping[str, Slot]
) -> bool:
    if _is_input(node):
        return slots[node.name].kind in kinds and not blank.is_blank(reals[node.name])
    return node.op == "get_attr" or (node.op == "call_function" and ops.is_pure(node.target))


def _evaluated(node: fx.Node, tracer: Any, reals: Mapping[str, Any], values: dict[fx.Node, Any]) -> Any:
    """The real value of a node; `values` has those that are known already."""
    wanted = {*ancestors(node)}
    for other in node.graph.nodes:
        if other not in wanted or other in values:
            continue
        if other.op == "placeholder":
            values[other] = reals[other.name]
        elif other.op == "get_attr":
            values[other] = getattr(tracer.root, str(other.target))
        else:
            args, kwargs = map_nodes((other.args, other.kwargs), values.__getitem__)
            target: Any = other.target
            values[other] = target(*args, **kwargs)
    return values[node]
