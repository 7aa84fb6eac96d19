"""After the user's function has run: what it returned, and what became of every tensor it could reach."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from wholestep import _torch
from wholestep._memory_torch import form_of
from wholestep.capture import binding, source
from wholestep.capture.discover import Reachable
from wholestep.capture.entries import KeysAsked, keys_asked
from wholestep.capture.record import Raises, Recorder
from wholestep.capture.record.effects import Effects, find_effects
from wholestep.capture.record.late import Late
from wholestep.capture.record.numbers import Number
from wholestep.capture.record.places import ABSENT
from wholestep.capture.record.templates import Template, Templates, ViewOfSlot, refuse_attributes
from wholestep.capture.session import Lifted, Reassigned, Session
from wholestep.errors import CaptureError
from wholestep.graph import Slot, SlotKind

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclass
class Collected:
    """Values for the output node, and which of them is what.

    `values[:num_outputs]` are the user's, returned or kept in their objects; each entry of `updates` and `results` maps
    a slot id to a position in `values`, each entry of `constants` a slot id to a plain Python value.
    """

    outputs: Template
    effects: Effects
    values: list[Any]
    num_outputs: int
    updates: dict[str, int] = field(default_factory=dict)
    results: dict[str, int] = field(default_factory=dict)
    constants: dict[str, Any] = field(default_factory=dict)
    new_slots: dict[str, Slot] = field(default_factory=dict)
    late: Late = field(default_factory=Late)
    """Numbers that are made of the graph's results."""
    state: list[tuple[binding.StateOf, Template]] = field(default_factory=list[tuple[binding.StateOf, Template]])
    """What the step leaves in the state of optimizers besides tensors and numbers of the graph."""
    state_keys: tuple[dict[int, KeysAsked], ...] = ()
    """What it has asked about the keys of state, for each optimizer by ids of parameters."""

    def add(self, value: Any) -> int:
        self.values.append(_torch.from_functional(value) if isinstance(value, _torch.FunctionalTensor) else value)
        return len(self.values) - 1


def collect(session: Session, found: Reachable, bindings: dict[str, binding.Binding], returned: Any) -> Collected:
    """Read back the returned tree, gradients, buffers, parameters and optimizer state of a finished trace."""
    result = _collect_outputs(session, found, bindings, returned)
    rebound = _collect_buffers(session, found, bindings, result)
    _collect_state(session, found, bindings, result, rebound)
    for lifted in session.lifted.values():
        if isinstance(lifted.twin, torch.Tensor) and lifted.slot.id not in rebound:
            if _type_of(_torch.from_functional(lifted.twin)) != _type_of(lifted.node.meta["val"]):
                raise CaptureError(
                    f"the step changes the shape of {lifted.slot.id} in place",
                    advice="Use what gives another tensor, as in x = x.unsqueeze(0)",
                )
            result.updates[lifted.slot.id] = result.add(lifted.twin)
    _collect_gradients(session, result)
    reals = {id(lifted.twin): lifted.real for lifted in session.parameters}
    result.state_keys = tuple(keys_asked(optimizer.state, reals) for optimizer in found.optimizers.values())
    _refuse_shared_memory(session, found)
    session.recorder.refuse_shared_arguments()
    return result


def _refuse_shared_memory(session: Session, found: Reachable) -> None:
    """`parameter.data = value` joins two memories; a graph has one for each of its slots."""
    if not session.reassigned:
        return
    held: list[tuple[str, Any]] = [(lifted.slot.id, lifted.twin) for lifted in session.lifted.values()]
    held += [(f"{slot_id}.grad", twin.grad) for slot_id, twin in held if isinstance(twin, torch.Tensor)]
    for name, optimizer in found.optimizers.items():
        held += [(f"{name}.state['{key}']", one) for state in optimizer.state.values() for key, one in state.items()]
    for root in found.modules.values():
        held += [(f"buffer '{name}'", buffer) for name, buffer in root.named_buffers()]
    joined = {id(entry.value) for optimizer in found.optimizers.values() for entry in _joined_state(session, optimizer)}
    for moved in session.reassigned.values():
        for name, other in held:
            if not isinstance(other, torch.Tensor) or other is moved.twin or id(other) in joined:
                continue
            if _overlap(other, moved.twin):
                raise _shared(moved, name)


class _Joined(NamedTuple):
    """An entry of state that a parameter has been given as its data: they are one memory from there on."""

    owner: Lifted
    key: Any
    value: torch.Tensor
    base: Lifted


def _joined_state(session: Session, optimizer: Optimizer) -> Iterator[_Joined]:
    """Of an optimizer's state: tensors that lie just as a parameter does whose `.data` they have become."""
    owners = {id(lifted.twin): lifted for lifted in session.parameters}
    moved = [owners[key] for key, one in session.reassigned.items() if key in owners and one.has_moved]
    for twin, entries in optimizer.state.items() if moved else ():
        for key, value in entries.items() if id(twin) in owners else ():
            if not isinstance(value, _torch.FunctionalTensor) or session.recorder.twins.of(value) is not None:
                continue
            for base in moved:
                is_there = _torch.storage_key(value) == _torch.storage_key(base.twin)
                if is_there and _reach(value) == _reach(base.twin) and _lies_as(value, base.real):
                    yield _Joined(owners[id(twin)], key, value, base)


def _lies_as(tensor: torch.Tensor, real: torch.Tensor) -> bool:
    return _type_of(tensor) == _type_of(real) and [*map(int, tensor.stride())] == [*real.stride()]


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have memory in common; parts of one storage need not (`vector_to_parameters`)."""
    if _torch.storage_key(one) != _torch.storage_key(other):
        return False
    (start, end), (other_start, other_end) = map(_reach, (one, other))
    return start < other_end and other_start < end


def _reach(tensor: torch.Tensor) -> tuple[int, int]:
    inner = getattr(tensor, "elem", tensor)  # what was given other data knows its new place only there
    start = _torch.optimization_hint(inner.storage_offset())
    sizes = [_torch.optimization_hint(size) for size in tensor.shape]
    strides = [_torch.optimization_hint(stride) for stride in tensor.stride()]
    steps = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    return start, start + steps + 1 if all(sizes) else start


def _shared(moved: Reassigned, other: str) -> CaptureError:
    return CaptureError(
        f"the step sets .data of a tensor, which shares its memory with {other} afterwards",
        location=moved.location,
        advice="Copy the values instead: tensor.copy_(value) under torch.no_grad()",
    )


def _collect_outputs(
    session: Session, found: Reachable, bindings: dict[str, binding.Binding], returned: Any
) -> Collected:
    values: list[Any] = []
    slots = {id(lifted.twin): lifted for lifted in session.lifted.values()}

    def slot_of(value: Any) -> binding.Binding | None:
        lifted = slots.get(id(value))
        return None if lifted is None else bindings.get(lifted.slot.id) or session.where_adopted(lifted.real)

    def computed(value: Any) -> int:
        position = next((index for index, other in enumerate(values) if other is value), len(values))
        values[position:] = values[position:] or [value]
        return position

    memories = {
        _torch.storage_key(lifted.twin): lifted
        for lifted in session.lifted.values()
        if isinstance(lifted.twin, torch.Tensor)
    }

    recorder = session.recorder

    def is_drawn(real: Any) -> bool:
        """Whether a tensor is made anew at each call; what is found at a place that is drawn is not."""
        return id(real) in recorder.drawn_tensors and id(real) not in recorder.drawn_items

    def base_of(view: torch.Tensor) -> binding.Binding | None:
        lifted = memories.get(_torch.storage_key(view))
        if lifted is None or is_drawn(lifted.real):
            return None
        moved = session.reassigned.get(id(lifted.twin))
        if moved is not None and moved.has_moved:
            raise _shared(moved, "what the step returns or keeps")
        return slot_of(lifted.twin)

    def drawn_tensor(value: Any) -> torch.Tensor | None:
        if is_drawn(value):
            return session.adopt(value)
        lifted = slots.get(id(value))
        return None if lifted is None or not is_drawn(lifted.real) else value

    drawn = {key: name for key, (_, name, *_) in [*recorder.drawn_arrays.items(), *recorder.drawn_items.items()]}
    templates = Templates(recorder.place_of, slot_of, base_of, computed, drawn_tensor, drawn, recorder.texts)
    outputs = templates.of(returned, "the step returns")
    said = [output.as_said(recorder) for output in recorder.outputs]
    effects = find_effects(recorder.kept.values(), said, recorder.place_of, templates)
    state = [
        (binding.StateOf(optimizer, owner, key), templates.of(value, f"the step keeps in the state of {name}"))
        for name, optimizer in found.optimizers.items()
        for owner, key, value in _python_in_state(session, optimizer)
    ]
    state += [
        (
            binding.StateOf(optimizer, joined.owner.real, joined.key),
            ViewOfSlot(bindings[joined.base.slot.id], form_of(joined.base.real)),
        )
        for optimizer in found.optimizers.values()
        for joined in _joined_state(session, optimizer)
    ]
    late = _late_numbers(recorder, templates, computed)
    recorder.needed = templates.numbers | recorder.late.imported.keys()
    result = Collected(outputs, effects, [], len(values), late=late, state=state)
    for value in values:
        result.add(value)
    return result


def _late_numbers(recorder: Recorder, templates: Templates, computed: Callable[[Any], int]) -> Late:
    """What has to be done to have the numbers in templates that the graph computes."""
    ledger = recorder.late
    if not templates.late_numbers:
        return Late()
    code = ledger.slice_of(sorted(templates.late_numbers))
    positions = tuple(computed(ledger.found[name].value) for name in code.leaves)
    return Late(code, positions)


def _python_in_state(session: Session, optimizer: Optimizer) -> Iterator[tuple[torch.Tensor, Any, Any]]:
    """What the step has put into an optimizer's state that is neither a tensor nor a number of the graph."""
    owners = {id(lifted.twin): lifted.real for lifted in session.parameters}
    for twin, entries in optimizer.state.items():
        for key, value in entries.items() if id(twin) in owners else ():
            before = session.state_before.get((id(optimizer), id(twin), key), ABSENT)
            if value is not before and _is_of_python(value):
                yield owners[id(twin)], key, value


def _is_of_python(value: Any) -> bool:
    return not (isinstance(value, (torch.Tensor, *_SYMBOLIC)) or type(value) is Number)


def _collect_buffers(
    session: Session, found: Reachable, bindings: dict[str, binding.Binding], result: Collected
) -> set[str]:
    """Buffers that the forward rebound (`self.count = self.count + 1`) are updates like those written in place."""
    lifted_by_twin = {id(lifted.twin): lifted for lifted in session.lifted.values()}
    current: dict[str, list[Any]] = {}
    for root in found.modules.values():
        for path, module in root.named_modules():
            for name, value in _torch.own_parameters(module).items():
                if value is not None and id(value) not in lifted_by_twin:
                    raise _replaced(f"parameter '{_join(path, name)}'")
            for name, value in _torch.own_buffers(module).items():
                slot_id = session.buffer_slots.get((id(module), name))
                if slot_id is not None:
                    current.setdefault(slot_id, []).append(value)
                elif value is not None:
                    raise Raises(
                        f"the step makes buffer '{_join(path, name)}', which is not there before it",
                        advice="Make it before the first step: call the model once",
                    )
    rebound: set[str] = set()
    for slot_id, values in current.items():
        lifted = next(lifted for lifted in session.lifted.values() if lifted.slot.id == slot_id)
        if all(value is lifted.twin for value in values):
            continue
        is_same = all(value is values[0] for value in values)
        if not is_same or not _torch.is_traced(values[0]) or _type_of(values[0]) != _type_of(lifted.twin):
            raise _replaced(f"buffer '{lifted.slot.name}'")
        rebound.add(slot_id)
        result.updates[slot_id] = result.add(values[0])
    return rebound


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _replaced(what: str) -> CaptureError:
    return CaptureError(
        f"the step replaces {what} by something of another shape, dtype or kind",
        advice="What a step leaves must fit the next one: write in place, and create the tensor before the first step",
    )


def _collect_state(
    session: Session, found: Reachable, bindings: dict[str, binding.Binding], result: Collected, rebound: set[str]
) -> None:
    """Optimizer state: rebound tensors are updates, new entries and numbers are results."""
    slots = {
        (id(where.optimizer), id(session.twins[id(where.parameter)]), where.key): lifted
        for lifted in session.lifted.values()
        if isinstance(where := bindings.get(lifted.slot.id), binding.StateOf)
    }
    owners = {id(lifted.twin): lifted for lifted in session.parameters}
    joined = {id(entry.value) for optimizer in found.optimizers.values() for entry in _joined_state(session, optimizer)}
    _refuse_shared_entries(session, found)
    for name, optimizer in found.optimizers.items():
        present = {(id(optimizer), id(twin), key) for twin, entries in optimizer.state.items() for key in entries}
        if any(key[0] == id(optimizer) and key not in present for key in (*slots, *session.state_before)):
            raise CaptureError(f"the step removes state of {name}", advice="Reset optimizer state outside the step")
        for twin, entries in optimizer.state.items():
            if id(twin) not in owners:
                raise foreign_state(name)
            if not entries:
                session.empty_states.append((optimizer, owners[id(twin)].real))
            for key, value in entries.items():
                known = slots.get((id(optimizer), id(twin), key))
                is_as_before = known is not None and value is known.twin
                before = session.state_before.get((id(optimizer), id(twin), key), ABSENT)
                if is_as_before or value is before or _is_of_python(value) or id(value) in joined:
                    continue
                if known is not None and isinstance(value, torch.Tensor) and _type_of(value) == _type_of(known.twin):
                    rebound.add(known.slot.id)
                    result.updates[known.slot.id] = result.add(value)
                    continue
                owner = owners[id(twin)]
                slot_key = f"{name}.{key}" if len(found.optimizers) > 1 else key
                slot = known.slot if known is not None else Slot(SlotKind.STATE, owner.slot.name, slot_key)
                bindings.setdefault(slot.id, binding.StateOf(optimizer, owner.real, key))
                _add_result(result, slot, session.symbol(value) if type(value) is Number else value)


def _refuse_shared_entries(session: Session, found: Reachable) -> None:
    """One tensor in several entries of state, or as several gradients: what updates one of them updates the others.

    If it was so before the step, it is one slot.
    """
    entries = [
        (f"'{key}' in the state of {name}", value, session.state_before.get((id(optimizer), id(twin), key)) is value)
        for name, optimizer in found.optimizers.items()
        for twin, kept in optimizer.state.items()
        for key, value in kept.items()
    ]
    owners = [lifted for lifted in session.lifted.values() if _owns_gradient(lifted)]
    gradients = [(f"grad.{one.slot.name}", one.twin.grad) for one in owners]
    entries += [(name, value, session.recorder.twins.of(value) is not None) for name, value in gradients]
    first: dict[int, tuple[str, bool]] = {}
    for name, value, was_there in entries:
        if not isinstance(value, torch.Tensor):
            continue
        if id(value) in first and not (was_there and first[id(value)][1]):
            raise CaptureError(
                f"the step leaves one tensor as {first[id(value)][0]} and {name}", advice="Clone it for one of the two"
            )
        first[id(value)] = name, was_there


def foreign_state(name: str) -> CaptureError:
    return CaptureError(
        f"the state of {name} has an entry that belongs to none of its parameters",
        location=source.current_location(),
        advice="Keep it in an attribute of the optimizer, or in a parameter group",
    )


def _collect_gradients(session: Session, result: Collected) -> None:
    slots = {lifted.slot.id: lifted for lifted in session.lifted.values() if lifted.slot.kind is SlotKind.GRAD}
    for lifted in [*session.lifted.values()]:
        if not _owns_gradient(lifted):
            if lifted.slot.kind in (SlotKind.CONSTANT, SlotKind.BUFFER) and lifted.twin.grad is not None:
                raise CaptureError(
                    f"the step leaves a gradient in '{lifted.slot.name}', a tensor from outside",
                    advice="Pass it as an argument, or make one of your own: x = x.detach().requires_grad_()",
                )
            continue
        slot = Slot(SlotKind.GRAD, lifted.slot.name)
        before, after = slots.get(slot.id), lifted.twin.grad
        if before is not None and after is before.twin:
            continue
        if before is not None:
            result.updates.pop(slot.id, None)
        if before is not None or after is not None:
            _add_result(result, slot, after)


def _owns_gradient(lifted: Lifted) -> bool:
    """Parameters, and arguments: the step may ask for the gradient of one that has required none before."""
    kind = lifted.slot.kind
    return kind is SlotKind.PARAM or (kind is SlotKind.BATCH and binding.may_require_grad(lifted.real))


def _add_result(result: Collected, slot: Slot, value: Any) -> None:
    result.new_slots[slot.id] = slot
    if isinstance(value, _SYMBOLIC) or _torch.is_traced(value):
        if isinstance(value, torch.Tensor):
            refuse_attributes(value)
        result.results[slot.id] = result.add(value)
    else:
        result.constants[slot.id] = value


def _type_of(tensor: Any) -> tuple[Any, ...]:
    return tuple(_torch.expression(size) for size in tensor.shape), tensor.dtype, tensor.device
