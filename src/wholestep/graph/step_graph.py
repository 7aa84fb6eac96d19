"""`StepGraph`: a whole training step as one FX graph, seen through slots, phases and provenance."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from wholestep import _torch
from wholestep.errors import GraphError
from wholestep.graph import ops
from wholestep.graph.phase import Phase
from wholestep.graph.slots import Slot, SlotKind


def map_nodes(value: Any, function: Callable[[fx.Node], Any]) -> Any:
    """Nested arguments with each node in them exchanged for `function(node)`."""
    return map_arg(value, function)


def nodes_in(value: Any) -> list[fx.Node]:
    """All nodes in nested arguments, with repetitions, in order."""
    found: list[fx.Node] = []
    map_arg(value, found.append)
    return found


@dataclass(frozen=True)
class PassRecord:
    """One pass that ran on a graph: its text form, how long it took, and the ops before and after."""

    text: str
    seconds: float
    num_ops_before: int
    num_ops_after: int

    @property
    def name(self) -> str:
        return self.text.split("{", 1)[0]

    def __str__(self) -> str:
        return f"{self.text} ({self.seconds * 1e3:.1f} ms)"


class StepGraph:
    """A training step `(slots) -> outputs, updates, results` over a `torch.fx` graph.

    The output node holds a dict with three entries:

    - `outputs`: what the user's function returned, flattened, as far as it is computed;
    - `updates`: slot id -> new value of a tensor that keeps its storage (parameters, buffers, optimizer state);
    - `results`: slot id -> value the slot is rebound to (gradients, optimizer state created or kept as a number).

    As captured the graph is functional: no node writes to a tensor. `reinplace` turns `updates` into in-place ops and
    sets `is_functional` to False; passes that reason about values run before it. `accumulating` names the parameters
    whose gradient before the call matters to it. `remarks` has what passes want said about the graph, by pass.

    Node meta, set by capture and kept by the edits below: `val` (fake value), `phase`, `fqn` (module path), `source`
    (user's file:line), `origins` (ids of the captured ops it stands for), `twin` (origin of the forward op a backward
    op belongs to), `gradient_of` (parameter names, on the node that holds a parameter's accumulated gradient),
    `earlier_gradient_of` (the same, as a backward before the last one left it). Set by passes: `bucket` (number, on a
    bucket's collective and wait), `reduces` and `reduced_gradient_of` (whose gradients), `next_iteration` (number of
    the block that is to run in the next iteration), `applies` (that number, on the copy that runs there), `loss_head`
    (a `LossHead`, on its logits), `in_chunk` (True on ops that must stay with their chunk of a loss head).
    """

    def __init__(self, module: fx.GraphModule, slots: Mapping[str, Slot], fake_mode: Any) -> None:
        self.module = module
        self.slots = dict(slots)
        self.fake_mode = fake_mode
        self.is_functional = True
        self.history: list[PassRecord] = []
        self.accumulating: frozenset[str] = frozenset()
        self.remarks: dict[str, tuple[str, ...]] = {}

    # Queries

    @property
    def graph(self) -> fx.Graph:
        """The `torch.fx` graph itself."""
        return self.module.graph

    @property
    def nodes(self) -> list[fx.Node]:
        """All nodes in execution order, as a list that survives edits."""
        return list(self.graph.nodes)

    def calls(self, phase: Phase | None = None) -> Iterator[fx.Node]:
        """Nodes that compute something, optionally of one phase only."""
        for node in self.nodes:
            if node.op == "call_function" and (phase is None or node.meta["phase"] is phase):
                yield node

    @property
    def num_ops(self) -> int:
        return sum(1 for _ in self.calls())

    @property
    def output_node(self) -> fx.Node:
        return next(node for node in reversed(self.graph.nodes) if node.op == "output")

    @property
    def outputs(self) -> tuple[Any, ...]:
        """Nodes of the user's return value, in flattened order."""
        return self._returned["outputs"]

    @property
    def updates(self) -> dict[str, fx.Node]:
        """New value of each slot that is written in place, by slot id."""
        return self._returned["updates"]

    @property
    def results(self) -> dict[str, fx.Node]:
        """New value of each slot that is rebound, by slot id."""
        return self._returned["results"]

    @property
    def _returned(self) -> dict[str, Any]:
        returned = self.output_node.args[0]
        assert isinstance(returned, dict)
        return returned

    def placeholder(self, slot_id: str) -> fx.Node:
        """The input node of a slot; raises `GraphError` for an unknown slot."""
        found = self.placeholders().get(slot_id)
        if found is None:
            raise GraphError(f"no slot '{slot_id}' in this graph; its slots are listed by print(graph)")
        return found

    def placeholders(self) -> dict[str, fx.Node]:
        """All input nodes by slot id, in input order."""
        return {self.slots[node.name].id: node for node in self.graph.nodes if node.op == "placeholder"}

    def slot_of(self, node: fx.Node) -> Slot | None:
        """The slot of an input node, None for any other node."""
        return self.slots.get(node.name) if node.op == "placeholder" else None

    def slots_of_kind(self, *kinds: SlotKind) -> list[Slot]:
        return [slot for slot in self.slots.values() if slot.kind in kinds]

    @property
    def gradients(self) -> dict[str, fx.Node]:
        """Parameter FQN -> node of its gradient as the last backward left it (before clipping, before the update)."""
        return {name: node for node in self.graph.nodes for name in node.meta.get("gradient_of", ())}

    def forward_twin(self, node: fx.Node) -> fx.Node | None:
        """The forward node that a backward node differentiates, None where it has none."""
        twin = node.meta.get("twin")
        if twin is None:
            return None
        return next((other for other in self.graph.nodes if twin in other.meta.get("origins", ())), None)

    def forward_twins(self) -> dict[fx.Node, fx.Node]:
        """`forward_twin` of every backward node that has one, in one sweep."""
        by_origin = {origin: node for node in self.graph.nodes for origin in node.meta.get("origins", ())}
        twins = {node: by_origin.get(node.meta.get("twin")) for node in self.calls()}
        return {node: twin for node, twin in twins.items() if twin is not None}

    # Edits

    def insert(
        self,
        target: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        *,
        like: fx.Node,
        before: fx.Node | None = None,
        after: fx.Node | None = None,
        phase: Phase | None = None,
    ) -> fx.Node:
        """Add a call with `like`'s provenance just before or after a node; its fake value is computed here.

        ```
        graph.insert(aten.mul.Tensor, (x, 2.0), like=x, after=x)      #  mul = aten.mul.Tensor(x, 2.0)
        ```
        Exactly one of `before` and `after` is given; behind an input means behind all inputs.
        """
        assert (before is None) != (after is None), "give either before or after"
        if after is not None and after.op == "placeholder":
            before, after = next(node for node in self.nodes if node.op != "placeholder"), None
        place = self.graph.inserting_before(before) if before is not None else self.graph.inserting_after(after)
        with place:
            node = self.graph.call_function(target, args, kwargs or {})
        fake_args, fake_kwargs = map_nodes((args, kwargs or {}), lambda source: source.meta["val"])
        fake_args, fake_kwargs = ops.with_plain_numbers(target, fake_args, fake_kwargs)
        with self.fake_mode, torch.no_grad():
            node.meta["val"] = target(*fake_args, **fake_kwargs)
        for key in ("fqn", "source", "twin", "applies", "loss_head"):
            if key in like.meta:
                node.meta[key] = like.meta[key]
        node.meta["phase"] = phase or like.meta.get("phase", Phase.FORWARD)
        return node

    def replace(self, replacements: Mapping[fx.Node, fx.Node]) -> None:
        """Let users of each key read its value instead, hand over what the keys stood for, and erase the keys.

        Values may be keys themselves (the chain is followed). One sweep, however many nodes are replaced.

        ```
        graph.replace({detach: x, t_2: x})       #  mm(detach, t_2)  ->  mm(x, x)
        ```
        """
        if not replacements:
            return
        final = {old: self._follow(replacements, old) for old in replacements}
        for node in self.graph.nodes:
            if node not in final and any(source in final for source in node.all_input_nodes):
                node.args = map_nodes(node.args, lambda source: final.get(source, source))
                node.kwargs = map_nodes(node.kwargs, lambda source: final.get(source, source))
        for old, new in final.items():
            for key in ("origins", "gradient_of", "earlier_gradient_of"):
                merged = (*new.meta.get(key, ()), *old.meta.get(key, ()))
                if merged:
                    new.meta[key] = tuple(dict.fromkeys(merged))
        for node in reversed(self.nodes):
            if node in final:
                self.graph.erase_node(node)

    @staticmethod
    def _follow(replacements: Mapping[fx.Node, fx.Node], node: fx.Node) -> fx.Node:
        while node in replacements:
            node = replacements[node]
        return node

    def reorder(self, calls: Sequence[fx.Node]) -> None:
        """Put all calls in another order; `verify` refuses one in which a value is read before it is made."""
        assert len(calls) == self.num_ops, "an order names each call once"
        anchor = next((node for node in reversed(self.nodes) if node.op == "placeholder"), None)
        for node in calls:
            if anchor is None:
                next(iter(self.graph.nodes)).prepend(node)
            elif anchor.next is not node:
                anchor.append(node)
            anchor = node

    def set_returned(
        self,
        *,
        outputs: tuple[Any, ...] | None = None,
        updates: Mapping[str, fx.Node] | None = None,
        results: Mapping[str, fx.Node] | None = None,
    ) -> None:
        """Exchange parts of what the graph returns."""
        returned = self._returned
        self.output_node.args = (
            {
                "outputs": returned["outputs"] if outputs is None else outputs,
                "updates": returned["updates"] if updates is None else dict(updates),
                "results": returned["results"] if results is None else dict(results),
            },
        )

    def eliminate_dead_code(self) -> int:
        """Erase calls nobody reads, except random ops, collectives and writes; returns how many went."""
        erased = 0
        for node in reversed(self.nodes):
            if node.op == "call_function" and not node.users and not ops.has_effect(node):
                self.graph.erase_node(node)
                erased += 1
        return erased

    # Whole-graph services

    def copy(self) -> StepGraph:
        """An independent graph over the same fake values; passes may rewrite it without touching this one."""
        module = _torch.graph_module(self.module, copy.deepcopy(self.graph, {id(self.fake_mode): self.fake_mode}))
        duplicate = StepGraph(module, self.slots, self.fake_mode)
        duplicate.is_functional = self.is_functional
        duplicate.history = list(self.history)
        duplicate.accumulating = self.accumulating
        duplicate.remarks = dict(self.remarks)
        return duplicate

    def recompile(self) -> Callable[..., dict[str, Any]]:
        """Generate Python from the graph and return the callable (positional inputs in slot order)."""
        self.module.recompile()
        return self.module.forward

    def verify(self, *, deep: bool = False) -> None:
        """Check every invariant; `deep` also recomputes all fake values. Raises `GraphError` naming the node."""
        from wholestep.graph.verify import verify_graph

        verify_graph(self, deep=deep)

    def __str__(self) -> str:
        from wholestep.graph.printer import print_graph

        return print_graph(self)

    def __repr__(self) -> str:
        return f"StepGraph({self.num_ops} ops, {len(self.slots)} slots)"
