"""A stage as JSON: its four programs, what becomes of values, what its weights are like.

    {"format": "wholestep stage", "version": 1, "fingerprint": ..., "index": 0,
     "programs": {"F": {"graph": ..., "slots": [...], "values": [...], "outputs": [...]}, "B": ..., "I": ..., "W": ...},
     "updates": {...}, "gradients": {...}, "returns": [[0, "mean"]], "fakes": {...}, "weights": {...}, "tensors": ...}

The fingerprint is the SHA-256 of all the rest, written in one canonical way. It tells damage, not malice: what is read
is checked as if anybody had written it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from wholestep import _torch
from wholestep._strict_json import (
    array,
    dump,
    fields,
    fingerprint,
    integer,
    integers,
    mapping,
    parse,
    refused_as,
    shown,
    string,
    strings,
)
from wholestep.capture.layouts import new_fake_mode
from wholestep.errors import StageFileError
from wholestep.graph import Slot, SlotKind, StepGraph
from wholestep.pipe.cut import Program, Stage
from wholestep.pipe.files.graphs import read_graph, write_graph
from wholestep.pipe.files.values import ValueReader, ValueWriter
from wholestep.pipe.schedule import MAX_STAGES, Kind

STAGE_NAME = "stage.json"

_FORMAT, _VERSION = "wholestep stage", 1
_KINDS = {str(kind): kind for kind in Kind}
_WEIGHTS = (SlotKind.PARAM, SlotKind.BUFFER, SlotKind.CONSTANT)
_SIZES = range(2**62)


@dataclass(frozen=True)
class Weight:
    """What a weight is to be like once it is loaded."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    device: torch.device


@dataclass(frozen=True)
class StageFile:
    """What `stage.json` says."""

    stage: Stage
    weights: Mapping[str, Weight]
    fingerprint: str


def weight_names(stage: Stage) -> dict[str, str]:
    """The names in `weights.safetensors` of the inputs of a stage that are kept there, by slot.

    Parameters and buffers are called as in the model. Constants have no name there and are called like their slot.
    """
    names: dict[str, str] = {}
    for slot in dict.fromkeys((*stage.slots, *stage.updates, *stage.gradients)):
        kind, _, name = slot.partition(".")
        if kind in _WEIGHTS:
            names[slot] = slot if kind == SlotKind.CONSTANT else name
    if len(set(names.values())) < len(names):
        raise StageFileError("two of the stage's parameters, buffers and constants have the same name")
    return names


def inputs_of(stage: Stage) -> dict[str, tuple[Slot, Any]]:
    """Slots and fake values of all inputs of all programs, by slot."""
    found: dict[str, tuple[Slot, Any]] = {}
    for kind in Kind:
        graph = stage.program(kind).graph
        for slot_id, node in graph.placeholders().items():
            found[slot_id] = (graph.slots[node.name], node.meta["val"])
    return found


def stage_to_json(
    stage: Stage, weights: Mapping[str, torch.Tensor], namespaces: Collection[str] = ()
) -> tuple[bytes, str]:
    """The contents of `stage.json`, and their fingerprint."""
    values = ValueWriter()
    programs = {
        str(kind): {
            "graph": write_graph(stage.program(kind).graph, values, namespaces),
            "slots": list(stage.program(kind).slots),
            "values": list(stage.program(kind).values),
            "outputs": list(stage.program(kind).outputs),
        }
        for kind in Kind
    }
    document: dict[str, Any] = {
        "format": _FORMAT,
        "version": _VERSION,
        "index": stage.index,
        "programs": programs,
        "updates": dict(stage.updates),
        "gradients": dict(stage.gradients),
        "returns": [[position, name] for position, name in stage.returns.items()],
        "fakes": {name: values.write(fake, f"'{name}'") for name, fake in stage.fakes.items()},
        "weights": {name: _write_weight(values, tensor, name) for name, tensor in weights.items()},
    }
    document["tensors"] = values.table()
    mark = fingerprint(document)
    return dump(document | {"fingerprint": mark}), mark


def _write_weight(values: ValueWriter, tensor: torch.Tensor, name: str) -> dict[str, Any]:
    strides = tensor.stride()
    if not _is_dense(tuple(tensor.shape), strides):
        strides = torch.empty(tensor.shape, device="meta").stride()
    return {
        "dtype": values.write(tensor.dtype, f"'{name}'"),
        "device": values.write(tensor.device, f"'{name}'"),
        "shape": list(tensor.shape),
        "strides": list(strides),
    }


@refused_as(StageFileError)
def stage_from_json(data: bytes, device: torch.device | None = None, namespaces: Collection[str] = ()) -> StageFile:
    """Read what `stage_to_json` wrote."""
    document = parse(data, STAGE_NAME)
    if document.get("format") != _FORMAT:
        raise StageFileError(f"{STAGE_NAME} is no stage of a pipeline")
    if type(document.get("version")) is not int or document["version"] != _VERSION:
        raise StageFileError(f"{STAGE_NAME} is of version {shown(document.get('version'))}; this is version {_VERSION}")
    mark = string(document.pop("fingerprint", None), "the fingerprint")
    if mark != fingerprint(document):
        raise StageFileError(f"{STAGE_NAME} has been changed or is damaged: it does not have its own fingerprint")
    keys = ("format", "version", "index", "programs", "updates", "gradients", "returns", "fakes", "weights", "tensors")
    found = fields(document, STAGE_NAME, keys)
    mode = new_fake_mode()
    values = ValueReader(found["tensors"], mode, device)
    entries = fields(found["programs"], "the programs", _KINDS)
    programs = {kind: _read_program(entries[name], values, mode, namespaces) for name, kind in _KINDS.items()}
    stage = Stage(
        index=integer(found["index"], "the number of the stage", range(MAX_STAGES)),
        forward=programs[Kind.FORWARD],
        backward_input=programs[Kind.INPUT],
        backward_weight=programs[Kind.WEIGHT],
        backward=programs[Kind.BACKWARD],
        updates=_names(found["updates"], "updates"),
        gradients=_names(found["gradients"], "gradients"),
        returns=_read_returns(found["returns"]),
        fakes=_read_fakes(found["fakes"], values),
    )
    weights = {name: _read_weight(name, value, values) for name, value in mapping(found["weights"], "weights").items()}
    _check_stage(stage, weights)
    return StageFile(stage, weights, mark)


def _read_program(value: Any, values: ValueReader, mode: _torch.FakeTensorMode, namespaces: Collection[str]) -> Program:
    found = fields(value, "a program", ("graph", "slots", "values", "outputs"))
    graph = read_graph(found["graph"], values, mode, namespaces)
    slots, read, made = (strings(found[key], f"the {key} of a program") for key in ("slots", "values", "outputs"))
    _check_program(graph, slots, read, made)
    return Program(graph, slots, read, made)


def _check_program(graph: StepGraph, slots: tuple[str, ...], read: tuple[str, ...], made: tuple[str, ...]) -> None:
    expected = [*slots, *(Slot(SlotKind.CARRY, name).id for name in read)]
    if list(graph.placeholders()) != expected:
        raise StageFileError("the inputs of a program are not the slots and values that it names")
    if len(graph.outputs) != len(made) or len(set(made)) < len(made):
        raise StageFileError("the outputs of a program are not the values that it names")
    if graph.updates or graph.results:
        raise StageFileError("a program returns values and nothing else")


def _check_stage(stage: Stage, weights: Mapping[str, Weight]) -> None:
    """What programs are for each other: values have a description, slots are of the right kind, weights are there."""
    made = stage.made.union(stage.backward.outputs)
    for what, kind, table in (("update", "buffer.", stage.updates), ("gradient", "param.", stage.gradients)):
        wrong = [slot for slot, name in table.items() if not slot.startswith(kind) or name not in made]
        if wrong:
            raise StageFileError(f"no program makes the {what} of '{shown(wrong[0])}'")
    # What the halves of a backward hand to each other never leaves the stage and needs no description.
    exchanged = {*stage.wanted, *stage.forward.outputs, *stage.backward.values, *stage.backward.outputs}
    if not exchanged <= stage.fakes.keys():
        raise StageFileError("a value that stages exchange has no description")
    names = weight_names(stage)
    if set(names.values()) != set(weights):
        raise StageFileError("the weights are not those that the programs read")
    inputs = inputs_of(stage)
    for slot, name in names.items():
        fake = inputs[slot][1] if slot in inputs else None
        weight = weights[name]
        if fake is not None and (
            not isinstance(fake, torch.Tensor) or (tuple(fake.shape), fake.dtype) != (weight.shape, weight.dtype)
        ):
            raise StageFileError(f"weight '{shown(name)}' is not what the programs take it for")


def _names(value: Any, what: str) -> dict[str, str]:
    return {string(slot, what): string(name, what) for slot, name in mapping(value, what).items()}


def _read_returns(value: Any) -> dict[int, str]:
    found: dict[int, str] = {}
    for entry in array(value, "returns"):
        pair = array(entry, "a returned value")
        if len(pair) != 2:
            raise StageFileError("a returned value is a position and a name")
        found[integer(pair[0], "the position of a returned value", _SIZES)] = string(pair[1], "a returned value")
    return found


def _read_fakes(value: Any, values: ValueReader) -> dict[str, torch.Tensor]:
    found = {string(name, "a value"): values.read(fake) for name, fake in mapping(value, "fakes").items()}
    if not all(isinstance(fake, torch.Tensor) for fake in found.values()):
        raise StageFileError("a value that programs exchange is a tensor")
    return found


def _read_weight(name: str, value: Any, values: ValueReader) -> Weight:
    what = f"weight '{shown(string(name, 'the name of a weight'))}'"
    found = fields(value, what, ("dtype", "device", "shape", "strides"))
    dtype, device = values.read(found["dtype"]), values.read(found["device"])
    shape, strides = (integers(found[key], f"the {key} of {what}", _SIZES) for key in ("shape", "strides"))
    if not isinstance(dtype, torch.dtype) or not isinstance(device, torch.device) or len(shape) != len(strides):
        raise StageFileError(f"{what} is described by dtype, device, and as many strides as sizes")
    if 0 not in shape and not _is_dense(shape, strides):
        raise StageFileError(f"{what} has strides that leave gaps or overlap")
    return Weight(dtype, shape, strides, device)


def _is_dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether strides put every element in a place of its own, without gaps."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True
