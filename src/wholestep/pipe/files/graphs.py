"""Step graphs as JSON: inputs, calls in order, what is returned.

    {"inputs":  [{"name": "param_w", "slot": {"kind": "param", "name": "w", ...}, "value": {"tensor": 0}, "notes": {}}],
     "calls":   [{"name": "mm", "op": "aten.mm.default", "args": [{"node": "param_w"}, ...], "kwargs": {},
                  "value": {"tensor": 1}, "notes": {"phase": "forward", "source": "model.py:31"}}],
     "outputs": [{"node": "mm"}], "updates": {}, "results": {}}

Names end up in generated Python, so only plain ones are read. Notes are what later passes and reports ask for: phase,
module path, source line, order of effects, numbers of random ops, forward twins, gradients.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

import torch
from torch import fx, nn

from wholestep import _torch
from wholestep._strict_json import array, fields, integer, integers, mapping, one_of, refused_as, shown, string, strings
from wholestep.errors import StageFileError
from wholestep.graph import Phase, Replay, Slot, SlotKind, StepGraph, rng_state
from wholestep.pipe.files.operators import check_arguments, find_operator, operator_name
from wholestep.pipe.files.values import ValueReader, ValueWriter

_TEXTS = ("fqn", "source", "checkpoint_policy")
_NUMBERS = ("twin", "effect", "draw", "checkpoint_region")
_TEXT_LISTS = ("gradient_of", "earlier_gradient_of")
_NOTES = (*_TEXTS, *_NUMBERS, *_TEXT_LISTS, "origins")

# Generated code calls its operators `name_7_`, its argument `inputs`, itself `step`.
_NODE_NAME = re.compile(r"(?!__)(?!.*_[0-9]+_\Z)[A-Za-z_][A-Za-z0-9_]{0,1999}", re.ASCII)
_TAKEN = frozenset({"inputs", "step", "inf", "nan"})

_PHASES = {str(phase): phase for phase in Phase}
_KINDS = {str(kind): kind for kind in SlotKind}


def write_graph(graph: StepGraph, values: ValueWriter, namespaces: Collection[str]) -> dict[str, Any]:
    """A functional graph as JSON; its tensors go to the table of `values`."""
    if not graph.is_functional:
        raise StageFileError("a graph that writes to its inputs has no place in a stage file: save it before reinplace")
    inputs: list[Any] = []
    calls: list[Any] = []
    for node in graph.nodes:
        where = _where(node)
        notes = _write_notes(node)
        if node.op == "placeholder":
            value = values.write(node.meta["val"], where)
            slot = _write_slot(graph.slots[node.name])
            inputs.append({"name": node.name, "slot": slot, "value": value, "notes": notes})
        elif node.op == "call_function":
            calls.append({"name": node.name, **_write_call(node, values, namespaces), "notes": notes})
        elif node.op != "output":
            raise StageFileError(f"{where} is a {node.op}, which has no place in a stage file")
    return {
        "inputs": inputs,
        "calls": calls,
        "outputs": [values.write(value, "what the graph returns") for value in graph.outputs],
        "updates": {slot: node.name for slot, node in graph.updates.items()},
        "results": {slot: values.write(value, f"the result {slot}") for slot, value in graph.results.items()},
    }


def _where(node: fx.Node) -> str:
    source = node.meta.get("source")
    return f"'{node.name}'" if source is None else f"'{node.name}' ({source})"


def _write_slot(slot: Slot) -> dict[str, Any]:
    return {"kind": str(slot.kind), "name": slot.name, "key": slot.key, "aliases": list(slot.aliases)}


def _write_notes(node: fx.Node) -> dict[str, Any]:
    notes = {key: node.meta[key] for key in _NOTES if node.meta.get(key) is not None}
    notes = {key: list(value) if isinstance(value, tuple) else value for key, value in notes.items()}
    return notes | ({"phase": str(node.meta["phase"])} if "phase" in node.meta else {})


def _write_call(node: fx.Node, values: ValueWriter, namespaces: Collection[str]) -> dict[str, Any]:
    where = _where(node)
    target: Any = node.target
    args: Any = node.args
    op: Any
    if isinstance(target, Replay):
        op = {"replay": operator_name(target.target, namespaces, where), "device": target.device}
    else:
        op = operator_name(target, namespaces, where)
    if target is rng_state:
        args = (torch.device(args[0]),)
    return {
        "op": op,
        "args": [values.write(arg, where) for arg in args],
        "kwargs": {name: values.write(arg, where) for name, arg in node.kwargs.items()},
        "value": values.write(node.meta["val"], where),
    }


@refused_as(StageFileError)
def read_graph(found: Any, values: ValueReader, mode: _torch.FakeTensorMode, namespaces: Collection[str]) -> StepGraph:
    """The graph that `write_graph` wrote, verified; raises `StageFileError` or `GraphError` for anything else."""
    entries = fields(found, "a graph", ("inputs", "calls", "outputs", "updates", "results"))
    reader = _GraphReader(values, namespaces)
    for entry in array(entries["inputs"], "the inputs of a graph"):
        reader.add_input(entry)
    for entry in array(entries["calls"], "the calls of a graph"):
        reader.add_call(entry)
    reader.add_output(entries)
    graph = StepGraph(_torch.graph_module(nn.Module(), reader.graph), reader.slots, mode)
    graph.verify()
    return graph


class _GraphReader:
    """A graph that grows at its end; `nodes` has those that there are so far."""

    def __init__(self, values: ValueReader, namespaces: Collection[str]) -> None:
        self.graph = fx.Graph()
        self.slots: dict[str, Slot] = {}
        self.nodes: dict[str, fx.Node] = {}
        self._slot_ids: set[str] = set()
        self._values = values
        self._namespaces = namespaces

    def add_input(self, entry: Any) -> None:
        found = fields(entry, "an input", ("name", "slot", "value", "notes"))
        name = self._new_name(found["name"])
        node = self.graph.create_node("placeholder", name, (), {}, name=name)
        slot = _read_slot(found["slot"])
        if slot.id in self._slot_ids:
            raise StageFileError(f"a graph has two inputs for '{shown(slot.id)}'")
        self._slot_ids.add(slot.id)
        self.slots[name] = slot
        self._finish(node, name, found)

    def add_call(self, entry: Any) -> None:
        found = fields(entry, "a call", ("name", "op", "args", "kwargs", "value", "notes"))
        name = self._new_name(found["name"])
        args = tuple([self._values.read(arg, self.nodes) for arg in array(found["args"], f"what '{name}' takes")])
        named = mapping(found["kwargs"], f"what '{name}' takes").items()
        kwargs = {string(key, "the name of an argument"): self._values.read(arg, self.nodes) for key, arg in named}
        if isinstance(found["op"], dict):
            target: Any = self._replay(found["op"])
            if not args or not isinstance(args[0], fx.Node) or not isinstance(args[0].meta["val"], torch.Tensor):
                raise StageFileError(f"'{name}' draws numbers again from no state")
            check_arguments(target.target, args[1:], kwargs, f"'{name}'")
        else:
            target = find_operator(string(found["op"], f"the operator of '{name}'"), self._namespaces)
            check_arguments(target, args, kwargs, f"'{name}'")
        if target is rng_state:
            args = (_device_text(args[0]),)
        node = self.graph.create_node("call_function", target, args, kwargs, name=name)
        self._finish(node, name, found)
        if "phase" not in node.meta:
            raise StageFileError(f"'{name}' has no phase")

    def add_output(self, entries: dict[str, Any]) -> None:
        outputs = [self._values.read(value, self.nodes) for value in array(entries["outputs"], "outputs")]
        updates = {
            string(slot, "a slot"): self._tensor_node(name)
            for slot, name in mapping(entries["updates"], "updates").items()
        }
        results = {
            string(slot, "a slot"): self._values.read(value, self.nodes)
            for slot, value in mapping(entries["results"], "results").items()
        }
        holds_tensors = {slot.id for name, slot in self.slots.items() if self._is_tensor(self.nodes[name])}
        if not updates.keys() <= holds_tensors:
            raise StageFileError("a graph updates something that is no tensor among its inputs")
        self.graph.output({"outputs": tuple(outputs), "updates": updates, "results": results})

    def _tensor_node(self, name: Any) -> fx.Node:
        node = one_of(string(name, "the name of a node"), self.nodes, "node")
        if not self._is_tensor(node):
            raise StageFileError(f"a graph updates a slot with '{node.name}', which is no tensor")
        return node

    @staticmethod
    def _is_tensor(node: fx.Node) -> bool:
        return isinstance(node.meta["val"], torch.Tensor)

    def _new_name(self, value: Any) -> str:
        name = string(value, "the name of a node")
        if _NODE_NAME.fullmatch(name) is None or name in _TAKEN or name in self.nodes:
            raise StageFileError(f"'{shown(name)}' cannot be the name of a node, or is that of another one")
        return name

    def _finish(self, node: fx.Node, name: str, found: dict[str, Any]) -> None:
        if node.name != name:  # FX keeps names of Python for itself
            raise StageFileError(f"'{shown(name)}' cannot be the name of a node")
        node.meta = _read_notes(found["notes"])
        node.meta["val"] = self._values.read(found["value"])
        self.nodes[name] = node

    def _replay(self, value: Any) -> Replay:
        found = fields(value, "an operator", ("replay", "device"))
        target = find_operator(string(found["replay"], "an operator"), self._namespaces)
        if not _torch.is_op_overload(target):
            raise StageFileError("only an operator can draw the same numbers again")
        return Replay(target, str(self._values.device(found["device"])))


def _device_text(value: Any) -> str:
    if not isinstance(value, torch.device):
        raise StageFileError("the state of a generator is that of a device")
    return str(value)


def _read_slot(value: Any) -> Slot:
    found = fields(value, "a slot", ("kind", "name", "key", "aliases"))
    kind = one_of(string(found["kind"], "the kind of a slot"), _KINDS, "kind of slot")
    name, key = string(found["name"], "the name of a slot"), string(found["key"], "the key of a slot")
    return Slot(kind, name, key, strings(found["aliases"], "an alias"))


def _read_notes(value: Any) -> dict[str, Any]:
    found = fields(value, "notes", (), (*_NOTES, "phase"))
    notes: dict[str, Any] = {key: string(found[key], key) for key in _TEXTS if key in found}
    notes |= {key: integer(found[key], key) for key in _NUMBERS if key in found}
    notes |= {key: strings(found[key], key) for key in _TEXT_LISTS if key in found}
    if "origins" in found:
        notes["origins"] = integers(found["origins"], "origins")
    if "phase" in found:
        notes["phase"] = one_of(string(found["phase"], "a phase"), _PHASES, "phase")
    return notes
