"""Guards of models and optimizers: their structure, hooks, options and tensors.

Asking is cheap as long as nobody has changed anything: dicts are left to a `Watch`, and the types of many tensors are
compared in one call of C++. What has been written to is looked at, item by item.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from wholestep import _recording_torch, _torch
from wholestep.capture import Capture
from wholestep.capture.binding import Argument, DrawnTensor, GradOfArgument, LearningRate, NumberOf, StateOf
from wholestep.capture.entries import KeysAsked
from wholestep.capture.overlap import Span, first_overlap, span
from wholestep.capture.record import Contents, Difference, Recording, Watch
from wholestep.capture.record.numbers import is_real
from wholestep.capture.record.places import Rooted, Step, find, is_plain, same
from wholestep.graph import SlotKind
from wholestep.runtime.held import behind, own_dict, plain_class

OwnerCheck = Callable[[object], str | Difference | None]

_NOT_OPTIONS = ("params", "lr")


def _nothing() -> None:
    pass


def make_owner_guards(capture: Capture, watch: Watch, when_rebound: Callable[[], None]) -> list[OwnerCheck]:
    """The guards of all models and optimizers that take part in a fresh capture.

    If a call fits although somebody has written where buffers and optimizer state are found, they call `when_rebound`.
    """
    optimizers = capture.found.optimizers.items()
    return [
        *make_model_guards(capture, watch, when_rebound),
        *[_optimizer_guard(name, one, capture.recording, watch) for name, one in optimizers],
        _gradients_guard(capture),
    ]


def make_model_guards(capture: Capture, watch: Watch, when_rebound: Callable[[], None] = _nothing) -> list[OwnerCheck]:
    """Those of models alone: their structure, their hooks and their tensors."""
    return [
        _hooks_of_all_guard(),
        *[_structure_guard(name, module, watch) for name, module in capture.found.modules.items()],
        _parameters_guard(capture, watch),
        _rebindable_guard(capture, watch, when_rebound),
    ]


def tensor_type(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Everything about a tensor that a graph depends on."""
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


def found_type(value: Any) -> tuple[Any, ...] | None:
    """The same of whatever is found where a tensor was, and its class; None if it is not a tensor."""
    if not isinstance(value, torch.Tensor):
        return None
    if value.layout is not torch.strided:  # has no strides, and is not an input of any graph
        return plain_class(value), value.layout, value.shape, value.dtype, value.device, value.requires_grad
    return plain_class(value), *tensor_type(value)


def type_difference(expected: tuple[Any, ...], found: tuple[Any, ...]) -> str:
    names = ("shape", "stride", "dtype", "device", "requires_grad")
    return next(f"{name} {old} -> {new}" for name, old, new in zip(names, expected, found, strict=True) if old != new)


def first_places(leaves: Iterable[Any], known: Mapping[int, int] = MappingProxyType({})) -> list[int]:
    """For each tensor leaf: the first leaf that is the same object, or what is `known` of that, by its id."""
    first: dict[int, int] = {}
    tensors = [(index, id(leaf)) for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    return [known[key] if key in known else first.setdefault(key, index) for index, key in tensors]


def shared_memory(capture: Capture, leaves: list[Any] | None = None, *, with_drawn: bool = False) -> str | None:
    """Two inputs that lie in the same memory, of which the step writes something; without `leaves`, no arguments.

    What stands where Python draws is known only after that has been drawn.
    """
    if not capture.written:
        return None
    spans: list[Span] = []
    for slot_id in [slot.id for slot in capture.graph.slots.values()]:
        where = capture.bindings[slot_id]
        if isinstance(where, (NumberOf, LearningRate)):
            continue
        if isinstance(where, DrawnTensor) and not (with_drawn and where.is_found):
            continue
        if leaves is None and isinstance(where, (Argument, GradOfArgument)):
            continue
        value = where.read(leaves or [])
        real = behind(value) if isinstance(value, torch.Tensor) else None
        if real is not None and (found := span(slot_id, real)) is not None:
            spans.append(found)
    pair = first_overlap(spans, capture.written)
    return None if pair is None else f"{pair[0]} and {pair[1]} share memory, of which the step writes a part"


class _Items:
    """Whether some dicts hold the very objects that they held when this was made, in the same order."""

    def __init__(self, dicts: Iterable[dict[str, Any]], watch: Watch) -> None:
        self._contents = Contents(dicts, watch)
        self._expected = [(tuple(one), tuple(one.values())) for one in self._contents.dicts()]

    def changed(self) -> int | None:
        """The first dict that does not; None if all do."""
        written = self._contents.written()
        for index in written:
            keys, values = self._expected[index]
            now = self._contents[index]
            if tuple(now) != keys or not all(map(operator.is_, now.values(), values)):
                return index
        if written:
            self._contents.look()
        return None


class _Hooks:
    """Whether owners have the very hooks they had. None can come where none was added to anything in the process."""

    def __init__(self, owners: Iterable[Any], hooks_of: Callable[[Any], list[Any]]) -> None:
        self._hooks_of = hooks_of
        self._before = [(owner, hooks_of(owner)) for owner in owners]
        self._could_go = [(owner, hooks) for owner, hooks in self._before if hooks]
        self._num_ever = _recording_torch.num_hooks_ever()

    def as_before(self) -> bool:
        num_ever = _recording_torch.num_hooks_ever()
        for owner, hooks in self._could_go if num_ever == self._num_ever else self._before:
            now = self._hooks_of(owner)
            if len(now) != len(hooks) or not all(map(operator.is_, now, hooks)):
                return False
        self._num_ever = num_ever
        return True


def _hooks_of_all_guard() -> OwnerCheck:
    """Hooks that torch calls for all modules or all optimizers of the process."""
    hooks = _Hooks([None], lambda _: _recording_torch.global_hooks())
    return lambda _: None if hooks.as_before() else "hooks for all modules or optimizers were added or removed"


def _structure_guard(name: str, root: nn.Module, watch: Watch) -> OwnerCheck:
    """Submodules and hooks of every module, in order, and the dicts that hold them and its tensors."""
    named = {id(module): (path or name, module) for path, module in root.named_modules()}
    paths, modules = [path for path, _ in named.values()], [module for _, module in named.values()]
    namespaces = Contents([vars(module) for module in modules], watch)
    registries = [_recording_torch.registries(module) for module in modules]
    expected = [(own_dict(parameters), rest) for parameters, *rest in registries]
    children = _Items([_torch.own_modules(module) for module in modules], watch)
    hooks = _Hooks(modules, _recording_torch.hooks_of)

    def check(_: object) -> str | None:
        written = namespaces.written()
        for index in written:
            parameters, *rest = _recording_torch.registries(modules[index])
            own, others = expected[index]
            if own_dict(parameters) is not own or len(rest) != len(others) or not all(map(operator.is_, rest, others)):
                return f"the parameters, buffers, submodules or hooks of module '{paths[index]}' were replaced"
        if written:
            namespaces.look()
        if children.changed() is not None:
            return f"the submodules of '{name}' changed"
        return None if hooks.as_before() else f"hooks were added to or removed from a module of '{name}'"

    return check


def _optimizer_guard(name: str, optimizer: Optimizer, recording: Recording, watch: Watch) -> OwnerCheck:
    """Parameter groups, and every option but learning rates, numbers that may change, and what the step itself sets.

    What it sets and reads is guarded where it is read.
    """
    symbolic, set_by_step = frozenset(recording.symbolic), recording.effects.places
    paths = [_path_of_group(optimizer, index, symbolic | set_by_step) for index in range(len(optimizer.param_groups))]
    groups = [(list(group["params"]), _options(group)) for group in optimizer.param_groups]
    hooks = _Hooks([optimizer], _recording_torch.hooks_of)
    rates = _shared_rates(optimizer)
    contents = Contents(optimizer.param_groups, watch)

    def check(_: object) -> str | Difference | None:
        if not hooks.as_before():
            return f"hooks were added to or removed from {name}"
        if len(optimizer.param_groups) != len(groups):
            return f"{name} has {len(optimizer.param_groups)} parameter groups instead of {len(groups)}"
        for index, (group, (params, _)) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
            if len(group["params"]) != len(params) or not all(map(operator.is_, group["params"], params)):
                return f"the parameters of {name}.param_groups[{index}] changed"
        is_same = all(map(operator.is_, optimizer.param_groups, contents.dicts()))
        if is_same and not contents.written():
            return None
        for index, (group, (_, options)) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
            path, owner = paths[index], f"{name}.param_groups[{index}]"
            difference = _option_difference(owner, options, _options(group), path, symbolic, set_by_step)
            if difference is not None:
                return difference
        if _shared_rates(optimizer) != rates:
            return f"parameter groups of {name} share their learning rate tensor in another way"
        contents.look(optimizer.param_groups)
        return None

    return check


def _path_of_group(optimizer: Optimizer, index: int, known: frozenset[tuple[Any, ...]]) -> tuple[Any, ...]:
    """How a recording spells a parameter group: optimizers that wrap one another share theirs."""
    group = optimizer.param_groups[index]
    own = (Rooted(optimizer), (Step.ATTRIBUTE, "param_groups"), (Step.ITEM, index))
    prefixes = {path[: len(own)] for path in known if len(path) > len(own)}
    return next((prefix for prefix in prefixes if find(prefix, None) is group), own)


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """What of a group is not an input of the graph. Of tensors, which are inputs where they are read, the types."""
    options = {
        key: found_type(value) if isinstance(value, torch.Tensor) else value
        for key, value in group.items()
        if key not in _NOT_OPTIONS
    }
    rate = group.get("lr")
    options["type of lr"] = "tensor" if isinstance(rate, torch.Tensor) else type(rate).__name__
    if not isinstance(rate, torch.Tensor) and type(rate) not in (int, float):
        options["lr"] = rate
    return options


def _option_difference(
    owner: str,
    expected: dict[str, Any],
    now: dict[str, Any],
    path: tuple[Any, ...],
    symbolic: frozenset[tuple[Any, ...]],
    set_by_step: frozenset[tuple[Any, ...]],
) -> Difference | None:
    """The first option that changed, but for numbers that may; and the paths of all numbers that changed."""
    reasons: list[str] = []
    numbers: list[tuple[Any, ...]] = []
    for key in {**expected, **now}:
        old, new = expected.get(key), now.get(key)
        if _is_same_option(old, new) or (*path, (Step.ITEM, key)) in set_by_step:
            continue
        for step, before, after in _paired(old, new):
            place = (*path, (Step.ITEM, key), *step)
            are_numbers = type(before) is type(after) and is_real(before)
            if _is_same_option(before, after) or (place in symbolic and are_numbers):
                continue
            reasons.append(f"'{key}' of {owner} changed from {old!r} to {new!r}")
            if are_numbers:
                numbers.append(place)
            else:
                return Difference(reasons[-1])
    return Difference(reasons[0], numbers) if reasons else None


def _is_same_option(old: Any, new: Any) -> bool:
    """What an object holds is guarded where the step reads it."""
    if type(old) is tuple and type(new) is tuple:
        return len(old) == len(new) and all(map(_is_same_option, old, new))
    return old is new or (is_plain(old) and same(old, new))


def _paired(old: Any, new: Any) -> list[tuple[tuple[Any, ...], Any, Any]]:
    """The parts of two options that correspond: items of tuples (betas), or the options themselves."""
    if type(old) is tuple and type(new) is tuple and len(old) == len(new):
        return [(((Step.ITEM, index),), a, b) for index, (a, b) in enumerate(zip(old, new, strict=True))]
    return [((), old, new)]


def _shared_rates(optimizer: Optimizer) -> list[int]:
    """For each group whose learning rate is a tensor: the first group with the same one."""
    return first_places([group.get("lr") for group in optimizer.param_groups])


def _parameters_guard(capture: Capture, watch: Watch) -> OwnerCheck:
    """The same parameter objects with the same types (`.to()`, `.half()` and freezing change them in place)."""
    paths: list[str] = []
    dicts: list[dict[str, Any]] = []
    for name, root in capture.found.modules.items():
        for path, module in root.named_modules():
            paths.append(path or name)
            dicts.append(own_dict(_torch.own_parameters(module)))
    parameters = {id(p): p for own in dicts for p in own.values() if p is not None}
    own = _Items(dicts, watch)
    types = _Types("a parameter", [*parameters.values()])
    hooks = _Hooks(parameters.values(), _recording_torch.tensor_hooks)

    def check(_: object) -> str | None:
        if not hooks.as_before():
            return "hooks were added to or removed from a parameter"
        changed = own.changed()
        return f"a parameter of module '{paths[changed]}' was replaced" if changed is not None else types.difference()

    return check


class _Types:
    """Whether tensors have the types that others had in their place when this was made."""

    def __init__(self, what: str, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors
        self._what = what
        self._expected = [tensor_type(tensor) for tensor in tensors]
        self._hold = _recording_torch.tensor_types(tensors)

    def difference(self) -> str | None:
        if self._hold(*self.tensors):
            return None
        now = [tensor_type(tensor) for tensor in self.tensors]
        if now == self._expected:
            self._hold = _recording_torch.tensor_types(self.tensors)
            return None
        old, new = next((old, new) for old, new in zip(self._expected, now, strict=True) if old != new)
        return f"{self._what} changed: {type_difference(old, new)}"


class _State:
    """The entries of optimizers' state, and whether somebody has written there since they were last looked at."""

    def __init__(self, optimizers: Iterable[Optimizer], left_alone: Iterable[Optimizer], watch: Watch) -> None:
        """What comes to the state of those that the step has `left_alone` is none of its business."""
        self._optimizers = [*optimizers]
        self._known = {id(optimizer): {*map(id, optimizer.state)} for optimizer in left_alone}
        self._contents = Contents([], watch)
        self.look()

    def look(self) -> None:
        self._states = [optimizer.state for optimizer in self._optimizers]
        # By identity: tensors are hashed in Python.
        self._entries = [
            {id(key): value for key, value in one.state.items() if id(key) in self._known.get(id(one), (id(key),))}
            for one in self._optimizers
        ]
        dicts = [value for entries in self._entries for value in entries.values() if isinstance(value, dict)]
        self._contents.look([*self._states, *dicts])

    def is_written(self) -> bool:
        is_same = all(optimizer.state is state for optimizer, state in zip(self._optimizers, self._states, strict=True))
        return not is_same or bool(self._contents.written())

    def keys(self) -> list[dict[int, tuple[str, ...]]]:
        """For each optimizer: what is kept of each parameter that anything is kept of."""
        return [
            {key: tuple(value) for key, value in entries.items() if value and isinstance(value, dict)}
            for entries in self._entries
        ]

    def values(self, known: list[dict[int, KeysAsked]]) -> list[Any]:
        """What stands under the keys that were there before the step, in order."""
        return [
            entries[key][name]
            for entries, asked in zip(self._entries, known, strict=True)
            for key, one in asked.items()
            for name in one.before
        ]

    def read(self, where: StateOf) -> Any:
        index = next(index for index, one in enumerate(self._optimizers) if one is where.optimizer)
        return self._entries[index][id(where.parameter)][where.key]


def _rebindable_guard(capture: Capture, watch: Watch, when_rebound: Callable[[], None]) -> OwnerCheck:
    """Buffers and optimizer state may be exchanged for others (`load_state_dict`), but only of the same type."""
    slots = [*capture.graph.slots_of_kind(SlotKind.BUFFER), *capture.graph.slots_of_kind(SlotKind.STATE)]
    bindings = [capture.bindings[slot.id] for slot in slots]
    modules = {module: None for root in capture.found.modules.values() for module in root.modules()}
    names = [*capture.found.optimizers]
    state = _State(capture.found.optimizers.values(), _left_alone(capture), watch)
    state_keys = _keys_asked(capture, state)
    buffers = Contents([_torch.own_buffers(module) for module in modules], watch)
    buffer_names = [_tensors_in(own) for own in buffers.dicts()]

    def read() -> list[Any]:
        return [state.read(where) if isinstance(where, StateOf) else where.read([]) for where in bindings]

    def which_are_one() -> list[int]:
        """Of all buffers and entries of state, as one tensor is one slot."""
        return first_places([value for own in buffers.dicts() for value in own.values()] + state.values(state_keys))

    values, ones = read(), which_are_one()
    kinds = [isinstance(value, torch.Tensor) or type(value) for value in values]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    num_buffers = sum(slot.kind is SlotKind.BUFFER for slot in slots)
    buffer_types = _Types("a buffer", tensors[:num_buffers])
    state_types = _Types("optimizer state", tensors[num_buffers:])

    def look() -> str | None:
        """Find what stands there now."""
        state.look()
        buffers.look()
        for name, old, new in zip(names, state_keys, state.keys(), strict=True):
            if old.keys() != new.keys() or not all(asked.allow(new[key]) for key, asked in old.items()):
                return f"the state of {name} has other entries than before"
        if [_tensors_in(own) for own in buffers.dicts()] != buffer_names:
            return "a buffer was added to or removed from a module"
        values = read()
        now = [isinstance(value, torch.Tensor) or type(value) for value in values]
        if now != kinds:
            slot = next(slot for slot, old, new in zip(slots, kinds, now, strict=True) if old != new)
            return f"{slot.id} was a tensor before and is none now, or the other way round"
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        if which_are_one() != ones:
            return "two buffers or entries of optimizer state are one tensor now, or one has become two"
        if (difference := shared_memory(capture)) is not None:
            return difference
        buffer_types.tensors, state_types.tensors = tensors[:num_buffers], tensors[num_buffers:]
        return state_types.difference()

    fits = True

    def check(_: object) -> str | None:
        nonlocal fits
        if not fits or buffers.written() or state.is_written():
            difference = look()
            fits = difference is None  # or it has to be looked at again, although nobody writes
            if difference is not None:
                return difference
            when_rebound()
        return buffer_types.difference()

    return check


def _keys_asked(capture: Capture, state: _State) -> list[dict[int, KeysAsked]]:
    """By optimizer and id of a parameter: the keys of its state now, and what the step asks about them."""
    return [
        {key: replace(asked.get(key, KeysAsked(())), before=names) for key, names in keys.items()}
        for asked, keys in zip(capture.state_keys, state.keys(), strict=True)
    ]


def _left_alone(capture: Capture) -> Iterator[Optimizer]:
    """The optimizers whose state is nothing to the step: it neither steps them nor looks at it."""
    stepped, read = {*map(id, capture.stepped)}, capture.recording.states_read
    for name, optimizer in capture.found.optimizers.items():
        owners = {id(optimizer), *map(id, capture.found.wrappers.get(name, []))}
        if owners.isdisjoint(stepped | read):
            yield optimizer


def _tensors_in(own: dict[str, Any]) -> list[str]:
    return [name for name, value in own.items() if value is not None]


def _gradients_guard(capture: Capture) -> OwnerCheck:
    """Which parameters have a gradient before the call, unless the step clears it before looking."""
    indifferent = {id(p) for p in capture.any_incoming_grad}
    names: list[str] = []
    parameters: list[torch.Tensor] = []
    for slot in capture.graph.slots_of_kind(SlotKind.PARAM):
        tensor = capture.bindings[slot.id].read([])
        if id(tensor) not in indifferent:
            names.append(slot.name)
            parameters.append(tensor)
    expected = [p.grad is None for p in parameters]

    def check(_: object) -> str | None:
        now = [p.grad is None for p in parameters]
        if now == expected:
            return None
        index = next(i for i, (old, new) in enumerate(zip(expected, now, strict=True)) if old != new)
        return f"{names[index]}.grad is {'None' if now[index] else 'set'} before the call, unlike at capture"

    return check
