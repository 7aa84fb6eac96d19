"""Guards: what a captured step took for granted. Each check returns None, or the sentence that says what changed.

Checks run on every call, so they compare prepared tuples and leave the search for words to the failing case.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from wholestep import _recording_torch, _torch, _waiting_torch
from wholestep.capture import Capture, discover, tree
from wholestep.capture.arguments import argument_paths
from wholestep.capture.binding import Argument, AtPlace, Binding, BufferOf, DrawnTensor, FixedTensor, NumberOf, StateOf
from wholestep.capture.record import Contents, Difference, Watch
from wholestep.capture.record.places import Step, find, is_plain, same, tensor_places
from wholestep.capture.switches import GRAD_MODES, SWITCHES
from wholestep.graph import SlotKind
from wholestep.runtime.owner_guards import (
    first_places,
    make_model_guards,
    make_owner_guards,
    shared_memory,
    tensor_type,
    type_difference,
)

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


def make_guards(capture: Capture, call: Call, watch: Watch, when_rebound: Callable[[], None]) -> list[Check]:
    """All guards of a fresh capture, taken from the state of the world right now; see `make_owner_guards`."""
    memory = _MemoryGuard(capture)

    def settle() -> None:
        memory.when_rebound()
        when_rebound()

    return [
        _arguments_guard(capture, call),
        _environment_guard(),
        _library_guard(watch),
        *make_owner_guards(capture, watch, settle),
        _argument_gradients_guard(capture, call),
        _same_tensors_guard(capture, call),
        memory,
    ]


def make_forward_guards(capture: Capture, watch: Watch) -> list[Callable[[object], str | Difference | None]]:
    """Guards of a capture that sets grad mode and begins gradients itself, and whose arguments somebody else compares.

    That is what models are, and what of torch they depend on.
    """
    return [_environment_guard(GRAD_MODES), _library_guard(watch), *make_model_guards(capture, watch)]


def _arguments_guard(capture: Capture, call: Call) -> Check:
    """Structure, plain values, and tensor types; dimension 0 of dynamic leaves may vary together."""
    spec, symbolic = call.spec, frozenset(capture.recording.symbolic)
    dims = {index: frozenset(d for i, d in capture.dynamic_dims if i == index) for index, _ in capture.dynamic_dims}
    ways = argument_paths(call.args, call.kwargs)
    expected: list[Any] = []
    for index, leaf in enumerate(call.leaves):
        if not isinstance(leaf, torch.Tensor):
            expected.append(leaf)
        else:
            expected.append(_open_type(leaf, dims.get(index, frozenset())))
    tensors = [isinstance(leaf, torch.Tensor) for leaf in call.leaves]
    # What the step reads of dicts and lists has been noted: names of files, that nobody reads, may change.
    is_read_as_item = [len(way) > 3 and all(step is Step.ITEM for step, _ in way[2:]) for way in ways]
    fixed = [where.tensor for where in capture.bindings.values() if isinstance(where, FixedTensor)]
    known = {id(tensor): -1 - index for index, tensor in enumerate(fixed)}  # the capture keeps them
    places = first_places(call.leaves, known)
    symbolic_sizes = _SymbolicSizes(capture, call) if dims else None

    def check(now: Call) -> str | Difference | None:
        if now.spec != spec:
            return "the structure of the arguments changed (other keys, lengths or container types)"
        reason, numbers = "", list[Any]()
        for index, leaf in enumerate(now.leaves):
            if leaf is expected[index]:
                continue
            if isinstance(leaf, torch.Tensor) is not tensors[index]:
                return f"{now.path(index)} was a tensor before and is none now, or the other way round"
            if not tensors[index]:
                if ways[index] in symbolic or tree.is_text(expected[index]):  # what is read of texts is noted
                    if type(leaf) is not type(expected[index]):
                        return f"{now.path(index)} changed from {expected[index]!r} to {leaf!r}"
                elif is_plain(expected[index]) and not is_read_as_item[index] and not same(leaf, expected[index]):
                    reason = reason or f"{now.path(index)} changed from {expected[index]!r} to {leaf!r}"
                    if type(leaf) is not type(expected[index]) or type(leaf) not in (int, float):
                        return Difference(reason, numbers)
                    numbers.append(ways[index])
                elif isinstance(expected[index], (nn.Module, Optimizer)) and leaf is not expected[index]:
                    return f"{now.path(index)} is another {type(leaf).__name__} than before"
                continue
            found = _open_type(leaf, dims.get(index, frozenset()))
            if found != expected[index]:
                return f"{now.path(index)} changed: {type_difference(expected[index], found)}"
        if reason:
            return Difference(reason, numbers)
        if first_places(now.leaves, known) != places:  # one tensor in two places is one slot, and `is` tells
            return "the same tensor is passed in other places than before"
        return symbolic_sizes.check(now) if symbolic_sizes is not None else None

    return check


def _same_tensors_guard(capture: Capture, call: Call) -> Check:
    """One tensor that was found in several places is one slot, and the graph reads it where the slot is bound.

    So an argument may have been a buffer, or what the user keeps in an object the gradient of the call before. Among
    themselves arguments, objects, and buffers and state are compared elsewhere.
    """
    bound = {id(where.read(call.leaves)): (slot_id, where) for slot_id, where in _tensors_bound(capture)}
    found: list[tuple[str, Callable[[Call], Any], tuple[str, Binding]]] = []
    for index, leaf in enumerate(call.leaves):
        slot = bound.get(id(leaf))
        if slot is not None and not isinstance(slot[1], Argument):
            found.append((call.path(index), functools.partial(_leaf, index), slot))
    for place in tensor_places(capture.recording.roots):
        if id(place.value) in bound:
            found.append((str(place), functools.partial(find, place.path), bound[id(place.value)]))
    for name, where in _all_rebindable(capture):
        slot = bound.get(id(where.read(call.leaves)))
        if slot is not None and not isinstance(slot[1], (BufferOf, StateOf)):
            found.append((name, functools.partial(_bound, where), slot))

    def check(now: Call) -> str | None:
        for name, look, (slot_id, where) in found:
            if look(now) is not where.read(now.leaves):
                return f"'{name}' and {slot_id} are not one tensor any more"
        return None

    return check


def _leaf(index: int, now: Call) -> Any:
    return now.leaves[index]


def _bound(where: Binding, now: Call) -> Any:
    return where.read(now.leaves)


def _all_rebindable(capture: Capture) -> Iterator[tuple[str, Binding]]:
    """Buffers and entries of state, be they slots of their own or not."""
    for name, root in capture.found.modules.items():
        for path, module in root.named_modules():
            yield from ((f"{path or name}.{key}", BufferOf(module, key)) for key in _torch.own_buffers(module))
    for name, optimizer in capture.found.optimizers.items():
        for parameter, entries in optimizer.state.items():
            yield from ((f"'{key}' in the state of {name}", StateOf(optimizer, parameter, key)) for key in entries)


def _tensors_bound(capture: Capture) -> Iterator[tuple[str, Binding]]:
    """The inputs of a graph that are tensors which somebody else than the step has, but for those in user's objects."""
    for slot_id in capture.graph.placeholders():
        where = capture.bindings[slot_id]
        if not isinstance(where, (NumberOf, DrawnTensor, AtPlace)):
            yield slot_id, where


class _MemoryGuard:
    """No tensor that comes from elsewhere at each call lies in memory of which the step writes something.

    At capture that is refused. A tensor that alone has its memory, and is found only once, needs no further look.
    """

    def __init__(self, capture: Capture, drawn: Sequence[Binding] = ()) -> None:
        self._capture = capture
        moving = [where for where in capture.bindings.values() if isinstance(where, (Argument, AtPlace))]
        self._moving = [*moving, *drawn]
        self._has_drawn = bool(drawn)
        self._staying = [
            where for _, where in _tensors_bound(capture) if isinstance(where, (FixedTensor, BufferOf, StateOf))
        ]
        self._ids: set[int] | None = None

    def when_rebound(self) -> None:
        """Other buffers or optimizer state are there now."""
        self._ids = None

    def __call__(self, now: Call) -> str | None:
        values = [where.read(now.leaves) for where in self._moving]
        is_alone = len({*map(id, values)}) == len(values) and not any(map(_may_share_memory, values))
        if is_alone and self._is_new(values):
            return None
        return shared_memory(self._capture, now.leaves, with_drawn=self._has_drawn)

    def _is_new(self, values: list[Any]) -> bool:
        """Whether none of some tensors is a parameter, a buffer or state."""
        if self._ids is None:
            self._ids = {id(where.read([])) for where in self._staying}
        return self._ids.isdisjoint(map(id, values))


def drawn_memory_guard(capture: Capture) -> Callable[[Call], str | None]:
    """The same of tensors that stand where Python draws, once that has been drawn."""
    drawn = [where for where in capture.bindings.values() if isinstance(where, DrawnTensor) and where.is_found]
    return _MemoryGuard(capture, drawn) if drawn and capture.written else lambda _: None


def _may_share_memory(value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return False
    _, num_users, is_known_elsewhere = _waiting_torch.storage_users(value)
    return num_users > 1 or is_known_elsewhere


def is_contiguous(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether strides are those that follow from the sizes, those of dimensions of size 1 included."""
    expected, extent = list[int](), 1
    for size in reversed(shape):
        expected.insert(0, extent)
        extent *= max(size, 1)
    return tuple(stride) == tuple(expected)


def _open_type(tensor: torch.Tensor, dims: frozenset[int]) -> tuple[Any, ...]:
    """The type of a tensor, but for the sizes of some dimensions; strides that depend on them follow from them."""
    if not dims:
        return tensor_type(tensor)
    shape, stride, *rest = tensor_type(tensor)
    kept = tuple(None if dim in dims else size for dim, size in enumerate(shape))
    follows = dims != frozenset([0]) and is_contiguous(shape, stride)
    return kept, "contiguous" if follows else stride, *rest


class _SymbolicSizes:
    """What symbolic sizes may be: equal where they were equal, and within what tracing assumed, evaluated once each."""

    def __init__(self, capture: Capture, call: Call) -> None:
        self._was = {(index, dim): call.leaves[index].shape[dim] for index, dim in sorted(capture.dynamic_dims)}
        self._verdicts: dict[tuple[int, ...], str | None] = {}
        self._assumptions = _torch.size_assumptions(capture.graph.fake_mode)

    def check(self, now: Call) -> str | None:
        found = tuple(now.leaves[index].shape[dim] for index, dim in self._was)
        if found not in self._verdicts:
            self._verdicts[found] = self._judge(found)
        return self._verdicts[found]

    def _judge(self, found: tuple[int, ...]) -> str | None:
        sizes: dict[int, int] = {}
        for was, size in zip(self._was.values(), found, strict=True):
            if size < _MIN_SYMBOLIC_SIZE:
                return f"size {size} is captured apart (symbolic sizes start at {_MIN_SYMBOLIC_SIZE})"
            if sizes.setdefault(was, size) != size:
                return f"sizes of the arguments that were equal differ now: {sizes[was]} and {size}"
        for text, holds in self._assumptions:
            if not holds(sizes):
                return (
                    f"sizes {sorted({*sizes.values()})} break what the captured step assumes: {text} (if that happens "
                    "often, pad to a multiple of something: pad_to_multiple_of=64)"
                )
        return None


def _environment_guard(left_out: Container[str] = ()) -> Callable[[object], str | None]:
    """Global switches of torch that tracing bakes into the graph."""
    switches = {name: switch for name, switch in SWITCHES.items() if name not in left_out}
    questions = [*switches.values()]
    expected = [*map(operator.call, questions)]

    def check(_: object) -> str | None:
        now = [*map(operator.call, questions)]
        if now == expected:
            return None
        name, old, new = next(
            (name, old, new) for name, old, new in zip(switches, expected, now, strict=True) if old != new
        )
        return f"{name} changed from {old} to {new}"

    return check


def _library_guard(watch: Watch) -> Callable[[object], str | None]:
    """The functions of torch that its own code finds by name, which nobody follows: some programs replace them."""
    namespaces = Contents(_recording_torch.library_namespaces(), watch)
    expected = [_callables(namespace) for namespace in namespaces.dicts()]

    def check(_: object) -> str | None:
        written = namespaces.written()
        for index in written:
            now, before = _callables(namespaces[index]), expected[index]
            # A method that was not there before hides one of a base class.
            changed = next((name for name in {**before, **now} if before.get(name) is not now.get(name)), None)
            if changed is not None:
                return f"the function '{changed}' of torch was replaced"
        if written:
            namespaces.look()
        return None

    return check


def _callables(namespace: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in namespace.items() if callable(value)}


def _argument_gradients_guard(capture: Capture, call: Call) -> Check:
    """Which arguments have a gradient before the call: a backward adds to it, or makes one.

    Parameters among the arguments are left to `_gradients_guard`.
    """
    bound = [capture.bindings[slot.id] for slot in capture.graph.slots_of_kind(SlotKind.BATCH)]
    own = [where.index for where in bound if isinstance(where, Argument)]
    expected = [call.leaves[index].grad is None for index in own]

    def check(now: Call) -> str | None:
        found = [now.leaves[index].grad is None for index in own]
        if found == expected:
            return None
        index, is_none = next((index, new) for index, old, new in zip(own, expected, found, strict=True) if old != new)
        return f"{now.path(index)}.grad is {'None' if is_none else 'set'} before the call, unlike at capture"

    return check
