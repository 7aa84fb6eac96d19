"""Who takes part in a step, as a recorder is told before the trace: models, optimizers, the function itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from wholestep import _recording_torch
from wholestep.capture import tree
from wholestep.capture.record.numbers import Number
from wholestep.capture.record.places import ABSENT, Expectation, Place, Rooted, Step, expectation, is_plain
from wholestep.errors import CaptureError

if TYPE_CHECKING:
    from wholestep.capture.record.recorder import Recorder


def add_module(recorder: Recorder, module: nn.Module, label: str) -> None:
    """A model that takes part: its parameters and buffers are inputs, its other attributes are watched."""
    recorder.known_modules.add(id(module))
    recorder.root(module, label)
    for name in ("_parameters", "_buffers"):
        recorder.manage(vars(module)[name])
    namespace = recorder.namespace_of(module)
    recorder.identify(namespace)  # what is guarded of a module is looked for there
    recorder.about_to_change(namespace)
    if namespace is not None:
        recorder.read_item(namespace, "training")  # which torch's own functions read too
    for name, part in vars(module).items():
        if name == "_modules" or (name.endswith("_hooks") and isinstance(part, dict)):
            _watch(recorder, namespace, name, part)


def met_owner(recorder: Recorder, parameter: torch.Tensor, known: set[int]) -> nn.Module | Optimizer | None:
    """A model or an optimizer that the step has come by, which takes no part until now, and has this parameter."""
    for owner in recorder.met():
        if id(owner) in recorder.known_modules or id(owner) in known or recorder.place_of(owner) is None:
            continue
        if isinstance(owner, nn.Module):
            parameters = list(owner.parameters())
        elif isinstance(owner, Optimizer):
            parameters = [p for group in owner.param_groups for p in group["params"]]
        else:
            continue
        if any(other is parameter for other in parameters):
            return owner
    return None


def _watch(recorder: Recorder, owner: Any, key: str, part: Any) -> None:
    """Keep what a part of an owner holds, without expecting anything of it."""
    recorder.stands_at(part, Place(recorder.place_of(owner), Step.ITEM, key, part, Expectation.PRESENT))
    recorder.about_to_change(part)


def add_optimizer(recorder: Recorder, optimizer: Optimizer, label: str) -> None:
    """An optimizer that takes part: rates, parameters and state are inputs, options are noted where they are read."""
    recorder.root(optimizer, label)
    groups = optimizer.param_groups
    recorder.note(optimizer, Step.ATTRIBUTE, "param_groups", groups)
    for index, group in enumerate(groups):
        recorder.note(groups, Step.ITEM, index, group)
        options = {key: value for key, value in group.items() if not is_managed_item(key)}
        recorder.manage(group, options, is_watched=True)
        rate = group.get("lr")
        if not (isinstance(rate, (torch.Tensor, torch.SymFloat)) or type(rate) is Number):  # or it is an input
            place = recorder.place_of(group)
            assert place is not None
            _part(place, Step.ITEM, "lr", group.get("lr", ABSENT), expectation(group.get("lr", ABSENT)))
        recorder.about_to_change(group)
        for key, value in options.items():
            if isinstance(value, torch.Tensor):  # an input, whoever reads it
                recorder.note(group, Step.ITEM, key, value)
    _watch_state(recorder, optimizer)
    for owner in (groups, optimizer.state):
        recorder.manage(owner)
    if type(optimizer).__module__.startswith("torch.optim"):  # flags of its own, which mean nothing to others
        own = vars(optimizer)
        recorder.manage(own, {key: value for key, value in own.items() if not is_managed_item(key)})
    recorder.about_to_change(recorder.namespace_of(optimizer))
    for hook in _recording_torch.hooks_of(optimizer):
        recorder.add_hook(hook)


def _watch_state(recorder: Recorder, optimizer: Optimizer) -> None:
    """What an optimizer's state holds besides tensors and numbers, which are inputs, is expected at each call.

    Objects (lists, dicts, arrays) are the user's like any other.
    """
    state = None
    for twin, entries in optimizer.state.items():
        known = recorder.twins.of(twin)
        others = {k: v for k, v in entries.items() if not (type(v) is Number or isinstance(v, torch.Tensor))}
        if known is None or not others:
            continue
        state = state or _part(recorder.root(optimizer), Step.ATTRIBUTE, "state", optimizer.state, Expectation.OPEN)
        above = _part(state, Step.ITEM, known.real, {**entries}, Expectation.OPEN)  # a plain dict stands there
        for key, value in others.items():
            place = _part(above, Step.ITEM, key, value, expectation(value))
            if not is_plain(value):
                recorder.stands_at(value, place)
                recorder.follow_operators(value)
            if place.expectation is Expectation.ARRAY:
                place.value = value.copy()


def _part(above: Place, step: Step, key: Any, value: Any, expected: Expectation) -> Place:
    place = Place(above, step, key, value, expected)
    above.children[step, key if is_plain(key) else Rooted(key)] = place
    return place


def is_managed_item(key: Any) -> bool:
    """Whether an attribute of torch's optimizers or an item of a group is an input, or a flag of theirs."""
    return isinstance(key, str) and (key in ("state", "param_groups", "params", "lr") or key.startswith("_"))


def add_function(recorder: Recorder, function: Any) -> None:
    """The step itself: what it is bound to is always the same."""
    owner = getattr(function, "__self__", None)
    if owner is not None and not is_plain(owner):
        recorder.root(owner, "self")
    if not is_plain(function):
        recorder.root(function)


def give(recorder: Recorder, owner: Any, step: Step, key: Any, value: Any) -> None:
    """Note an argument and, if it is a container of which the trace has a copy, what it holds."""
    if isinstance(value, torch.Tensor) and (twin := recorder.twins.of(value)) is not None:
        twin.given = (owner, step, key)
    recorder.texts.given(value, owner, step, key)
    is_value = is_plain(value)
    if (
        isinstance(value, torch.Tensor)
        or type(value) is Number
        or (is_value and not (isinstance(value, tuple) and value))
    ):
        return
    place = recorder.note(owner, step, key, value)
    if is_value and place is not None and not place.is_given:
        # The trace has a copy of it, too: what is read of it is noted item by item, and what nobody reads may change.
        place.expectation = Expectation.OPEN
        recorder.stands_at(value, place)
    opened = ((), []) if tree.is_text(value) else tree.opened(value)
    if place is None or opened is None or place.is_given:
        return
    place.is_given = True
    inner = Step.ITEM if isinstance(value, (list, tuple, Mapping)) else Step.ATTRIBUTE
    for name, part in zip(*opened, strict=True):
        give(recorder, value, inner, name, part)


def copied(copies: Any, originals: Any) -> Iterator[tuple[Any, Any]]:
    """The containers among the arguments that can be written to: the trace's copies, and what they are copies of."""
    pending = [*zip(copies, originals, strict=True)]
    while pending:
        copy, original = pending.pop()
        opened, copied = tree.opened(original), tree.opened(copy)
        if copy is original or opened is None or copied is None:
            continue
        pending += zip(copied[1], opened[1], strict=True)
        if not isinstance(original, tuple):
            yield copy, original


def refuse_shared(recorder: Recorder, pairs: Iterable[tuple[Any, Any]]) -> None:
    """Containers among the arguments that the step has found elsewhere as well, and writes to: it was given copies."""
    found: dict[int, Place] = {}
    for copy, original in pairs:
        place = recorder.place_of(copy)
        assert place is not None
        other = recorder.place_of(original) or found.setdefault(id(original), place)
        if other is not place and (place.is_written or other.is_written):
            one, two = (str(way).removeprefix("Arguments.") for way in (place, other))
            raise CaptureError(
                f"'{one}' and '{two}' are one {type(original).__name__}, to which the step writes",
                advice="Let the step get at it by one of the two ways only",
            )
