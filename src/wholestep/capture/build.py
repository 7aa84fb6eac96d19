"""From what was recorded to a StepGraph: inputs first, constants as inputs, provenance on every node."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from wholestep import _torch
from wholestep._recording_torch import REQUIRE
from wholestep.capture import source
from wholestep.capture.binding import Binding, FixedTensor, NumberOf
from wholestep.capture.collect import Collected
from wholestep.capture.overlap import array_span, first_overlap, span
from wholestep.capture.questions import Asked
from wholestep.capture.session import Lifted, Session
from wholestep.errors import CaptureError
from wholestep.graph import InLayout, Phase, Slot, SlotKind, StepGraph, ops

aten = torch.ops.aten

_ORDER = {kind: index for index, kind in enumerate(SlotKind)}
# Slots nobody reads or writes are dropped for these kinds; the others are the step's signature.
_OPTIONAL = (SlotKind.STATE, SlotKind.GRAD, SlotKind.CONSTANT, SlotKind.NUMBER)


def build_graph(
    module: fx.GraphModule, session: Session, collected: Collected, bindings: dict[str, Binding]
) -> tuple[StepGraph, Asked | None]:
    """Turn the traced module into a verified, functional `StepGraph`; constants found on the way get a binding.

    Values that the step has asked about are a graph of their own.
    """
    graph = module.graph
    lifted = _lift_constants(module, session)
    for entry in lifted.values():
        if entry.slot.kind is SlotKind.CONSTANT:
            bindings[entry.slot.id] = session.where_adopted(entry.real)
        elif entry.slot.kind is SlotKind.NUMBER:
            bindings[entry.slot.id] = NumberOf(session.numbers, entry.slot.name)
    _exchange_targets(graph)
    _set_output(graph, session, collected)
    asked = session.questions.settled({name: entry.slot for name, entry in lifted.items()}, session.fake_mode)
    _drop_unused(graph, lifted)
    inputs = _order_inputs(graph, lifted)
    _finish_provenance(graph, session)
    step_graph = StepGraph(module, {node.name: lifted[node.name].slot for node in inputs}, session.fake_mode)
    _refuse_aliased_updates(step_graph, lifted)
    _refuse_arrays_in_use(step_graph, lifted, session, collected)
    _copy_from_arrays(step_graph, session, bindings)
    step_graph.eliminate_dead_code()
    step_graph.verify()
    _refuse_early_writes(step_graph)
    _refuse_mixed_types(step_graph)
    return step_graph, asked


def _lift_constants(module: fx.GraphModule, session: Session) -> dict[str, Lifted]:
    """Tensors that tracing stored on the module (`torch.tensor(1.0)` in the step) become CONSTANT inputs."""
    lifted = dict(session.lifted)
    number = sum(entry.slot.kind is SlotKind.CONSTANT for entry in lifted.values())
    for node in list(module.graph.nodes):
        if node.op != "get_attr":
            continue
        tensor = getattr(module, str(node.target))
        with module.graph.inserting_before(node):
            placeholder = module.graph.placeholder(f"constant_{number}")
        placeholder.meta["val"] = node.meta.get("val", session.fake_mode.from_tensor(tensor))
        lifted[placeholder.name] = Lifted(Slot(SlotKind.CONSTANT, str(number)), placeholder, tensor, None)
        node.replace_all_uses_with(placeholder)
        module.graph.erase_node(node)
        number += 1
    return lifted


def _exchange_targets(graph: fx.Graph) -> None:
    """Ops that would not do outside autograd and after functionalisation what eager's op does."""
    for node in graph.nodes:
        node.target = target_of(node)


def target_of(node: fx.Node) -> Any:
    """What a traced node has to call."""
    if node.meta.get("in_layout"):
        return InLayout(ops.in_place_twin(node.target))
    if node.target is aten.bernoulli.p and not node.meta.get("out_of_place"):
        return _torch.BERNOULLI_LIKE
    return _torch.mkldnn_rnn_layer_in_training if node.target is aten.mkldnn_rnn_layer.default else node.target


def _set_output(graph: fx.Graph, session: Session, collected: Collected) -> None:
    output = next(node for node in reversed(graph.nodes) if node.op == "output")
    values: Any = output.args[0]
    placeholders = {entry.slot.id: entry.node for entry in session.lifted.values()}
    updates = {slot_id: values[index] for slot_id, index in collected.updates.items()}
    results = {slot_id: values[index] for slot_id, index in collected.results.items()}
    output.args = (
        {
            "outputs": tuple(values[: collected.num_outputs]),
            "updates": {key: value for key, value in updates.items() if value is not placeholders[key]},
            "results": {**results, **collected.constants},
        },
    )


def _drop_unused(graph: fx.Graph, lifted: dict[str, Lifted]) -> None:
    """Inputs that nobody reads, unless the step leaves another value in their place."""
    [output] = [node for node in graph.nodes if node.op == "output"]
    for node in list(graph.nodes):
        if node.op != "placeholder" or node.users:
            continue
        slot = lifted[node.name].slot
        if slot.kind in _OPTIONAL and slot.id not in output.args[0]["updates"]:
            graph.erase_node(node)


def _order_inputs(graph: fx.Graph, lifted: dict[str, Lifted]) -> list[fx.Node]:
    """Inputs to the top, grouped by kind, in the order they were lifted within a kind."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    inputs.sort(key=lambda node: _ORDER[lifted[node.name].slot.kind])
    first = next(iter(graph.nodes))
    anchor = None
    for node in inputs:
        if anchor is None:
            if node is not first:
                first.prepend(node)
        else:
            anchor.append(node)
        anchor = node
    return inputs


def _finish_provenance(graph: fx.Graph, session: Session) -> None:
    """Origins, forward twins, effect order and gradient marks."""
    forward_by_sequence: dict[int, tuple[int, fx.Node]] = {}
    num_effects = 0
    for origin, node in enumerate(graph.nodes):
        if node.op != "call_function":
            continue
        node.meta.setdefault("phase", Phase.FORWARD)
        if node.meta["phase"] is Phase.FORWARD and _uses_gradients(node):
            node.meta["phase"] = Phase.OPTIMIZER
        node.meta["origins"] = (origin,)
        if ops.has_effect(node):
            node.meta["effect"] = num_effects
            num_effects += 1
        sequence = node.meta.get("seq_nr")
        if sequence is None:
            continue
        if node.meta["phase"] is Phase.FORWARD:
            forward_by_sequence.setdefault(sequence, (origin, node))
        elif node.meta["phase"] is Phase.BACKWARD and sequence in forward_by_sequence:
            twin_origin, twin = forward_by_sequence[sequence]
            node.meta["twin"] = twin_origin
            node.meta.update({key: twin.meta[key] for key in ("fqn", "source") if key in twin.meta})
    for name, node in session.gradients.items():
        node.meta["gradient_of"] = (*node.meta.get("gradient_of", ()), name)
    for name, node in session.earlier_gradients:
        node.meta["earlier_gradient_of"] = (*node.meta.get("earlier_gradient_of", ()), name)


_ONE_TYPE = frozenset(
    {
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten.baddbmm.default,
        aten.mv.default,
        aten.addmv.default,
        aten.dot.default,
        aten.convolution.default,
    }
)


def _copy_from_arrays(graph: StepGraph, session: Session, bindings: dict[str, Binding]) -> None:
    """Let constants in the memory of arrays have memory of their own.

    A guard compares what an array holds: an equal one may stand there, while that memory holds something else.
    """
    arrays = [array_span(str(place), array) for array, place in session.recorder.arrays if array.size]
    for slot in graph.slots_of_kind(SlotKind.CONSTANT) if arrays else ():
        where = bindings[slot.id]
        if not isinstance(where, FixedTensor):
            continue
        found = span(slot.id, where.tensor)
        if found is not None and first_overlap([found, *arrays], {slot.id}) is not None:
            bindings[slot.id] = FixedTensor(where.tensor.clone())


def _refuse_mixed_types(graph: StepGraph) -> None:
    """Products of tensors of different dtypes: the kernels refuse them, fake tensors let them pass."""
    for node in graph.calls():
        if node.target not in _ONE_TYPE:
            continue
        values = [source.meta["val"] for source in node.all_input_nodes]
        dtypes = {value.dtype for value in values if isinstance(value, torch.Tensor)}
        if len(dtypes) > 1:
            names = " and ".join(sorted(str(dtype) for dtype in dtypes))
            raise CaptureError(
                f"{node.target} would multiply tensors of {names}" + _in_module(node),
                location=source.location_of_line(node.meta.get("source")),
                advice="Convert the batch or the model to one dtype, or use autocast",
            )


def _in_module(node: fx.Node) -> str:
    return f" in module '{node.meta['fqn']}'" if node.meta.get("fqn") else ""


def _uses_gradients(node: fx.Node) -> bool:
    """Whether a node outside `backward()` and `optimizer.step()` works on what they made: clipping, weight averages."""
    return any(source.meta.get("phase") in (Phase.BACKWARD, Phase.OPTIMIZER) for source in node.all_input_nodes)


def _refuse_aliased_updates(graph: StepGraph, lifted: dict[str, Lifted]) -> None:
    """Refuse inputs in one memory, of which one is written; what the graph neither reads nor writes is none."""
    used = graph.placeholders().keys() | graph.updates.keys()
    tensors = [entry for entry in lifted.values() if isinstance(entry.real, torch.Tensor) and entry.slot.id in used]
    reals = [(entry.slot.id, entry.real) for entry in tensors]
    spans = [found for name, real in reals if (found := span(name, real)) is not None]
    if (pair := first_overlap(spans, graph.updates)) is not None:
        order = [name for name, _ in reals]
        one, other = sorted(pair, key=order.index)
        raise CaptureError(
            f"{one} and {other} share memory and the step writes to one of them",
            advice="Clone one of the two, or register the tensor once (tied parameters are fine)",
        )


def _refuse_early_writes(graph: StepGraph) -> None:
    """A call that leaves the graph must leave everything as it was: nothing may be written before the last look."""
    calls = list(graph.calls())
    last_look = max((index for index, node in enumerate(calls) if node.target is REQUIRE), default=0)
    for node in calls[:last_look]:
        if ops.has_effect(node) and not ops.is_random(node.target):
            raise CaptureError(
                f"the step looks at a value, to check it, after {node.target} has written unseen" + _in_module(node),
                location=source.location_of_line(calls[last_look].meta.get("source")),
                advice="Check the value outside the step",
            )


def _refuse_arrays_in_use(graph: StepGraph, lifted: dict[str, Lifted], session: Session, collected: Collected) -> None:
    """Arrays are read before the graph runs and written after it: a tensor in the same memory would be out of order."""
    changed = {change.path for change in collected.effects.changes}
    reals = [(entry.slot.id, entry.real) for entry in lifted.values() if isinstance(entry.real, torch.Tensor)]
    spans = [found for name, real in reals if (found := span(name, real)) is not None]
    for array, place in session.recorder.arrays:
        name = str(place)
        written = {*graph.updates, *([name] if place.path in changed else [])}
        pair = first_overlap([array_span(name, array), *spans], written) if array.size else None
        if pair is not None:
            writer = next((graph.updates[slot_id] for slot_id in pair if slot_id in graph.updates), None)
            raise CaptureError(
                f"the step writes to memory that it uses both as NumPy array '{name}' and as a tensor",
                location=None if writer is None else source.location_of_line(writer.meta.get("source")),
                advice="Use the tensor alone, or a copy of the array",
            )
