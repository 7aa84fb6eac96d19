"""Guards: what a captured step took for granted. Each check returns None, or the sentence that says what changed.

Checks run on every call, so they compare prepared tuples and leave the search for words to the failing case.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from wholestep import _recording_torch, _torch
from wholestep.capture import Capture, discover, tree
from wholestep.capture.binding import Argument, BufferOf, FixedTensor, StateOf
from wholestep.capture.capture import argument_paths
from wholestep.capture.record import Difference
from wholestep.capture.record.places import Rooted, Step, is_plain, same
from wholestep.graph import SlotKind

_MIN_SYMBOLIC_SIZE = 2

Check = Callable[["Call"], str | Difference | None]


@dataclass(frozen=True)
class Call:
    """The arguments of one call, taken apart once for all guards."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: list[Any]
    spec: tree.Spec

    @staticmethod
    def of(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        leaves, spec = tree.flatten((args, kwargs))
        return Call(function, args, kwargs, leaves, spec)

    def path(self, index: int) -> str:
        """A readable name of argument leaf `index`."""
        names = [*discover.argument_names(self.function, len(self.args)), *self.kwargs]
        values = [*self.args, *self.kwargs.values()]
        return [path for name, value in zip(names, values, strict=True) for path in tree.paths(value, name)][index]


def make_guards(capture: Capture, call: Call) -> list[Check]:
    """All guards of a fresh capture, taken from the state of the world right now."""
    return [
        _arguments_guard(capture, call),
        _environment_guard(),
        *[_structure_guard(name, module) for name, module in capture.found.modules.items()],
        *[
            _optimizer_guard(name, optimizer, capture.recording.symbolic)
            for name, optimizer in capture.found.optimizers.items()
        ],
        _parameters_guard(capture),
        _rebindable_guard(capture),
        _gradients_guard(capture),
        _argument_gradients_guard(capture, call),
    ]


def tensor_type(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Everything about a tensor that a graph depends on."""
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


def _arguments_guard(capture: Capture, call: Call) -> Check:
    """Structure, plain values, and tensor types; dimension 0 of dynamic leaves may vary together."""
    dynamic, spec, symbolic = capture.dynamic_leaves, call.spec, capture.recording.symbolic
    ways = argument_paths(call.args, call.kwargs)
    expected: list[Any] = []
    for index, leaf in enumerate(call.leaves):
        if not isinstance(leaf, torch.Tensor):
            expected.append(leaf)
        elif index in dynamic:
            expected.append((tuple(leaf.shape[1:]), *tensor_type(leaf)[1:]))
        else:
            expected.append(tensor_type(leaf))
    tensors = [isinstance(leaf, torch.Tensor) for leaf in call.leaves]
    shares_like_before = _sharing(capture, call)
    batch_sizes = _BatchSizes(capture) if dynamic else None

    def check(now: Call) -> str | Difference | None:
        if now.spec != spec:
            return "the structure of the arguments changed (other keys, lengths or container types)"
        sizes: set[int] = set()
        for index, leaf in enumerate(now.leaves):
            if isinstance(leaf, torch.Tensor) is not tensors[index]:
                return f"{now.path(index)} was a tensor before and is none now, or the other way round"
            if not tensors[index]:
                if ways[index] in symbolic:
                    if type(leaf) is not type(expected[index]):
                        return f"{now.path(index)} changed from {expected[index]!r} to {leaf!r}"
                elif is_plain(expected[index]) and not same(leaf, expected[index]):
                    reason = f"{now.path(index)} changed from {expected[index]!r} to {leaf!r}"
                    are_numbers = type(leaf) is type(expected[index]) and type(leaf) in (int, float)
                    return Difference(reason, [ways[index]] if are_numbers else [])
                elif isinstance(expected[index], (nn.Module, Optimizer)) and leaf is not expected[index]:
                    return f"{now.path(index)} is another {type(leaf).__name__} than before"
                continue
            found = tensor_type(leaf)
            if index in dynamic:
                sizes.add(leaf.shape[0])
                found = (found[0][1:], *found[1:])
            if found != expected[index]:
                return f"{now.path(index)} changed: {_type_difference(expected[index], found)}"
        if not shares_like_before(now.leaves):
            return "the same tensor is passed in other places than before"
        return batch_sizes.check(sizes) if batch_sizes is not None else None

    return check


def _sharing(capture: Capture, call: Call) -> Callable[[list[Any]], bool]:
    """A predicate: does each tensor stand in the places where it stood at capture?

    One tensor in two places is one slot, so it must stay one. Two tensors may become one if the step writes to neither.
    """
    known = {id(where.tensor) for where in capture.bindings.values() if isinstance(where, FixedTensor)}
    expected = _identities(call.leaves, known)
    writes_to_arguments = any(slot_id.startswith(SlotKind.BATCH) for slot_id in capture.written)

    def check(leaves: list[Any]) -> bool:
        now = _identities(leaves, known)
        if now == expected:
            return True
        if writes_to_arguments or (-1 in now and -1 not in expected):
            return False
        own = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        return all(first in (index, actual) for index, first, actual in zip(own, expected, now, strict=True))

    return check


def _identities(leaves: list[Any], known: set[int]) -> list[int]:
    """For each tensor leaf: the first leaf that is the same object, or -1 if it is a parameter or constant."""
    first: dict[int, int] = {}
    tensors = [(index, id(leaf)) for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    return [-1 if key in known else first.setdefault(key, index) for index, key in tensors]


class _BatchSizes:
    """Which sizes a symbolic batch dimension admits: what tracing assumed, evaluated once per size."""

    def __init__(self, capture: Capture) -> None:
        self._verdicts: dict[int, str | None] = {}
        self._assumptions = _torch.size_assumptions(capture.graph.fake_mode)

    def check(self, sizes: set[int]) -> str | None:
        if len(sizes) != 1:
            return f"batch sizes differ between arguments: {sorted(sizes)}"
        [size] = sizes
        if size not in self._verdicts:
            self._verdicts[size] = self._judge(size)
        return self._verdicts[size]

    def _judge(self, size: int) -> str | None:
        if size < _MIN_SYMBOLIC_SIZE:
            return f"batch size {size} is captured apart (symbolic sizes start at {_MIN_SYMBOLIC_SIZE})"
        for text, holds in self._assumptions:
            if not holds(size):
                return f"batch size {size} breaks what the captured step assumes: {text}"
        return None


class _Contents:
    """Whether nobody has written to some dicts since they were last looked at."""

    def __init__(self, dicts: list[dict[Any, Any]]) -> None:
        self.dicts = dicts
        self.look()

    def look(self) -> None:
        self._versions = [*map(_recording_torch.dict_version, self.dicts)]

    def are_as_seen(self) -> bool:
        return [*map(_recording_torch.dict_version, self.dicts)] == self._versions


class _Hooks:
    """Whether as many hooks are there as before. None can come where none was added to anything in the process."""

    def __init__(self, counts: list[Callable[[], Any]]) -> None:
        self._counts = counts
        self._before = [count() for count in counts]
        self._could_go = any(any(found) if isinstance(found, tuple) else found for found in self._before)
        self._num_ever = _recording_torch.num_hooks_ever()

    def as_before(self) -> bool:
        num_ever = _recording_torch.num_hooks_ever()
        if num_ever == self._num_ever and not self._could_go:
            return True
        if [count() for count in self._counts] != self._before:
            return False
        self._num_ever = num_ever
        return True


def _environment_guard() -> Check:
    """Global switches of torch that tracing bakes into the graph."""
    expected = [switch() for switch in _SWITCHES.values()]

    def check(_: Call) -> str | None:
        now = [switch() for switch in _SWITCHES.values()]
        if now == expected:
            return None
        name, old, new = next(
            (name, old, new) for name, old, new in zip(_SWITCHES, expected, now, strict=True) if old != new
        )
        return f"{name} changed from {old} to {new}"

    return check


# The switches of torch that a captured graph depends on: they choose dtypes, devices, and between operators.
_SWITCHES: dict[str, Callable[[], Any]] = {
    "torch.get_default_dtype()": torch.get_default_dtype,
    "torch.get_default_device()": lambda: torch.get_default_device() if _recording_torch.num_function_modes() else None,
    "torch.is_grad_enabled()": torch.is_grad_enabled,
    "torch.is_inference_mode_enabled()": torch.is_inference_mode_enabled,
    "autocast on cpu": lambda: torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
    "autocast on cuda": lambda: torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
    "torch.are_deterministic_algorithms_enabled()": torch.are_deterministic_algorithms_enabled,
    "torch.get_float32_matmul_precision()": torch.get_float32_matmul_precision,
    "torch.backends.cuda.flash_sdp_enabled()": torch.backends.cuda.flash_sdp_enabled,
    "torch.backends.cuda.mem_efficient_sdp_enabled()": torch.backends.cuda.mem_efficient_sdp_enabled,
    "torch.backends.cuda.math_sdp_enabled()": torch.backends.cuda.math_sdp_enabled,
    "torch.backends.cuda.cudnn_sdp_enabled()": torch.backends.cuda.cudnn_sdp_enabled,
    "torch.backends.mha.get_fastpath_enabled()": torch.backends.mha.get_fastpath_enabled,
    "torch.backends.cudnn.enabled": _recording_torch.is_cudnn_enabled,
    "torch.backends.mkldnn.enabled": _recording_torch.is_mkldnn_enabled,
}


def _structure_guard(name: str, root: nn.Module) -> Check:
    """Submodules and hooks of every module."""
    modules = [module for _, module in root.named_modules(remove_duplicate=False)]
    children = _Contents([_torch.own_modules(module) for module in modules])
    expected = [dict(own) for own in children.dicts]
    has_hooks = _Hooks([partial(_recording_torch.num_hooks, module) for module in modules])

    def check(_: Call) -> str | None:
        if not children.are_as_seen():
            if children.dicts != expected:
                return f"the submodules of '{name}' changed"
            children.look()
        return None if has_hooks.as_before() else f"hooks were added to or removed from a module of '{name}'"

    return check


def fits(expected: torch.Tensor, found: Any) -> bool:
    """Whether a tensor may take the place of another one."""
    return found is expected or (type(found) is type(expected) and tensor_type(found) == tensor_type(expected))


def _optimizer_guard(name: str, optimizer: Optimizer, symbolic: frozenset[tuple[Any, ...]]) -> Check:
    """Parameter groups, every option but learning rates and numbers that may change, and which state exists."""
    groups = [(list(group["params"]), _options(group)) for group in optimizer.param_groups]
    members = [p for params, _ in groups for p in params]
    has_hooks = _Hooks([partial(_recording_torch.num_hooks, optimizer)])
    rates = _shared_rates(optimizer)
    state_keys = _state_keys(optimizer, members)
    state = _State([optimizer])

    def check(_: Call) -> str | Difference | None:
        nonlocal state
        if not has_hooks.as_before():
            return f"hooks were added to or removed from {name}"
        if len(optimizer.param_groups) != len(groups):
            return f"{name} has {len(optimizer.param_groups)} parameter groups instead of {len(groups)}"
        for index, (group, (params, options)) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
            if len(group["params"]) != len(params) or not all(map(operator.is_, group["params"], params)):
                return f"the parameters of {name}.param_groups[{index}] changed"
            if (now := _options(group)) != options:
                path = (Rooted(optimizer), (Step.ATTRIBUTE, "param_groups"), (Step.ITEM, index))
                difference = _option_difference(f"{name}.param_groups[{index}]", options, now, path, symbolic)
                if difference is not None:
                    return difference
        if _shared_rates(optimizer) != rates:
            return f"parameter groups of {name} share their learning rate tensor in another way"
        if not state.is_as_seen():
            if _state_keys(optimizer, members) != state_keys:
                return f"the state of {name} has other entries than before"
            state = _State([optimizer])
        return None

    return check


def _state_keys(optimizer: Optimizer, members: list[torch.Tensor]) -> list[tuple[str, ...]]:
    return [tuple(optimizer.state[p]) if p in optimizer.state else () for p in members]


class _State:
    """Whether nobody has written to the state of optimizers since this was made."""

    def __init__(self, optimizers: list[Optimizer]) -> None:
        self._optimizers = optimizers
        self._states = [optimizer.state for optimizer in optimizers]
        entries = [entries for state in self._states for entries in state.values() if isinstance(entries, dict)]
        self._contents = _Contents([*self._states, *entries])

    def is_as_seen(self) -> bool:
        is_same = all(optimizer.state is state for optimizer, state in zip(self._optimizers, self._states, strict=True))
        return is_same and self._contents.are_as_seen()


def _option_difference(
    owner: str,
    expected: dict[str, Any],
    now: dict[str, Any],
    path: tuple[Any, ...],
    symbolic: frozenset[tuple[Any, ...]],
) -> Difference | None:
    """The first option that changed, but for numbers that may; and the paths of all numbers that changed."""
    reasons: list[str] = []
    numbers: list[tuple[Any, ...]] = []
    for key in {**expected, **now}:
        old, new = expected.get(key), now.get(key)
        pairs = _paired(old, new)
        for step, before, after in pairs:
            place = (*path, (Step.ITEM, key), *step)
            are_numbers = type(before) is type(after) and type(before) in (int, float)
            if same(before, after) or (place in symbolic and are_numbers):
                continue
            reasons.append(f"'{key}' of {owner} changed from {old!r} to {new!r}")
            if are_numbers:
                numbers.append(place)
            else:
                return Difference(reasons[-1])
    return Difference(reasons[0], numbers) if reasons else None


def _paired(old: Any, new: Any) -> list[tuple[tuple[Any, ...], Any, Any]]:
    """The parts of two options that correspond: items of tuples (betas), or the options themselves."""
    if type(old) is tuple and type(new) is tuple and len(old) == len(new):
        return [(((Step.ITEM, index),), a, b) for index, (a, b) in enumerate(zip(old, new, strict=True))]
    return [((), old, new)]


def _shared_rates(optimizer: Optimizer) -> list[int]:
    """For each group whose learning rate is a tensor: the first group with the same one."""
    rates = [group.get("lr") for group in optimizer.param_groups]
    return _identities(rates, set())


def _options(group: dict[str, Any]) -> dict[str, Any]:
    options = {key: value for key, value in group.items() if key not in ("params", "lr", "initial_lr")}
    options["type of lr"] = "tensor" if isinstance(group.get("lr"), torch.Tensor) else "float"
    return options


def _parameters_guard(capture: Capture) -> Check:
    """The same parameter objects with the same types (`.to()`, `.half()` and freezing change them in place)."""
    records: list[tuple[str, dict[str, Any], tuple[str, ...], tuple[Any, ...]]] = []
    for name, root in capture.found.modules.items():
        for path, module in root.named_modules():
            own = _torch.own_parameters(module)
            if own:
                records.append((path or name, own, tuple(own), tuple(own.values())))
    parameters = {id(p): p for _, _, _, values in records for p in values if p is not None}
    tensors = list(parameters.values())
    expected = [tensor_type(tensor) for tensor in tensors]
    has_hooks = _Hooks([partial(_torch.num_tensor_hooks, tensor) for tensor in tensors])
    contents = _Contents([own for _, own, _, _ in records])
    have_types_seen = _recording_torch.tensor_types(tensors)

    def check(_: Call) -> str | None:
        nonlocal have_types_seen
        if not has_hooks.as_before():
            return "hooks were added to or removed from a parameter"
        if not contents.are_as_seen():
            for path, own, keys, values in records:
                if tuple(own) != keys or not all(map(operator.is_, own.values(), values)):
                    return f"a parameter of module '{path}' was replaced"
            contents.look()
        if have_types_seen(*tensors):
            return None
        now = [tensor_type(tensor) for tensor in tensors]
        if now == expected:
            have_types_seen = _recording_torch.tensor_types(tensors)
            return None
        old, new = next((old, new) for old, new in zip(expected, now, strict=True) if old != new)
        return f"a parameter changed: {_type_difference(old, new)}"

    return check


def _gradients_guard(capture: Capture) -> Check:
    """Which parameters have a gradient before the call, unless the step clears it before looking."""
    indifferent = {id(p) for p in capture.any_incoming_grad}
    names: list[str] = []
    parameters: list[torch.Tensor] = []
    for slot in capture.graph.slots_of_kind(SlotKind.PARAM):
        tensor = capture.bindings[slot.id].read([])
        if tensor.requires_grad and id(tensor) not in indifferent:
            names.append(slot.name)
            parameters.append(tensor)
    expected = [p.grad is None for p in parameters]

    def check(_: Call) -> str | None:
        now = [p.grad is None for p in parameters]
        if now == expected:
            return None
        index = next(i for i, (old, new) in enumerate(zip(expected, now, strict=True)) if old != new)
        return f"{names[index]}.grad is {'None' if now[index] else 'set'} before the call, unlike at capture"

    return check


def _argument_gradients_guard(capture: Capture, call: Call) -> Check:
    """Which arguments have a gradient before the call: a backward adds to it, or makes one.

    Parameters among the arguments are left to `_gradients_guard`.
    """
    bound = [capture.bindings[slot.id] for slot in capture.graph.slots_of_kind(SlotKind.BATCH)]
    own = [where.index for where in bound if isinstance(where, Argument)]
    trainable = [index for index in own if call.leaves[index].requires_grad]
    expected = [call.leaves[index].grad is None for index in trainable]

    def check(now: Call) -> str | None:
        found = [now.leaves[index].grad is None for index in trainable]
        if found == expected:
            return None
        index, is_none = next(
            (index, new) for index, old, new in zip(trainable, expected, found, strict=True) if old != new
        )
        return f"{now.path(index)}.grad is {'None' if is_none else 'set'} before the call, unlike at capture"

    return check


def _rebindable_guard(capture: Capture) -> Check:
    """Buffers and optimizer state may be exchanged for others (`load_state_dict`), but only of the same type."""
    bindings = [
        (slot.id, capture.bindings[slot.id]) for slot in capture.graph.slots_of_kind(SlotKind.BUFFER, SlotKind.STATE)
    ]
    expected = [_loose_type(where.read([])) for _, where in bindings]
    modules = {where.module: None for _, where in bindings if isinstance(where, BufferOf)}
    optimizers = {where.optimizer: None for _, where in bindings if isinstance(where, StateOf)}
    buffers = _Contents([_torch.own_buffers(module) for module in modules])
    state = _State([*optimizers])

    def check(_: Call) -> str | None:
        nonlocal state
        if buffers.are_as_seen() and state.is_as_seen():
            return None
        for (slot_id, where), old in zip(bindings, expected, strict=True):
            value = where.read([])
            if _loose_type(value) != old:
                return f"{slot_id} changed from {old} to {_loose_type(value)}"
        buffers.look()
        state = _State([*optimizers])
        return None

    return check


def _loose_type(value: Any) -> tuple[Any, ...]:
    """The type of a tensor slot; a number kept in the optimizer state is an input whatever its value."""
    return tensor_type(value)[:4] if isinstance(value, torch.Tensor) else (type(value),)


def _type_difference(expected: tuple[Any, ...], found: tuple[Any, ...]) -> str:
    names = ("shape", "stride", "dtype", "device", "requires_grad")
    return next(f"{name} {old} -> {new}" for name, old, new in zip(names, expected, found, strict=True) if old != new)
