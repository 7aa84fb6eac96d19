"""Tensors as Python objects: attributes that users give them (`p.no_decay = True`), and which one a tensor is.

Models, optimizers and arguments hand traced twins to the step. A twin shows the attributes of the tensor that it stands
for; what is read from it is expected of that tensor, and what is written is written there. Where Python compares or
looks up objects, a twin would not be found among real tensors that a user has kept: such a step is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from wholestep import _torch
from wholestep.capture.record.numbers import settled_key
from wholestep.capture.record.places import Expectation, Place, Step
from wholestep.graph import SlotKind

if TYPE_CHECKING:
    from wholestep.capture.record.recorder import Recorder

_FIXED = (SlotKind.PARAM, SlotKind.CONSTANT)
"""What is the same tensor at every call."""
_OF_MEMORY = frozenset(["_base", "_version", "storage_offset", "is_shared", "is_inference", "is_neg", "is_conj"])
"""What tensors tell about where they lie and who else does, which may be otherwise at the next call."""


@dataclass
class Twin:
    """What a traced tensor stands for; `given` is where among the arguments: their container, step and key."""

    twin: torch.Tensor
    real: torch.Tensor
    kind: SlotKind
    name: str
    given: tuple[Any, Step, Any] | None = None


class Twins:
    """All traced tensors of a trace that stand for real ones."""

    def __init__(self) -> None:
        self._by_id: dict[int, Twin] = {}
        self._by_real: dict[int, Twin] = {}

    def add(self, real: torch.Tensor, twin: torch.Tensor, kind: SlotKind, name: str) -> None:
        self._by_id[id(twin)] = self._by_real[id(real)] = Twin(twin, real, kind, name)

    def of(self, tensor: Any) -> Twin | None:
        """What a tensor stands for; None for a real one, or one that the step has computed."""
        return self._by_id.get(id(tensor))

    def pair(self, tensor: torch.Tensor) -> Twin | None:
        """A tensor and its twin, whichever of them is given."""
        return self._by_id.get(id(tensor)) or self._by_real.get(id(tensor))

    def twin_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """What stands for a tensor; itself if nothing does."""
        known = self._by_real.get(id(tensor))
        return tensor if known is None else known.twin

    def show_attributes(self) -> None:
        """Let each twin have the attributes that the user has given to its tensor."""
        for twin in self._by_id.values():
            for name, value in _torch.given_attributes(twin.real).items():
                vars(twin.twin).setdefault(name, value)

    def plain_key(self, key: Any) -> Any:
        """A key of a dict as it is outside the trace."""
        known = self.of(key)
        return settled_key(key) if known is None else known.real


def read_attribute(recorder: Recorder, tensor: torch.Tensor, name: str) -> None:
    """`tensor.name`: torch's own attributes are the graph's business, others are read from the user's tensor."""
    if name in ("__dict__", "__class__") and _torch.is_traced(tensor):
        recorder.refuse(f"reads {name} of a tensor", "Use getattr(), isinstance() or type()")
    if name in _OF_MEMORY and (recorder.twins.of(tensor) is not None or id(tensor) in recorder.drawn_items):
        recorder.refuse(f"reads {name} of a tensor from outside", "Read it outside the step, and pass what it says")
    namespace = None if _is_torchs(tensor, name) else _namespace(recorder, tensor, name)
    if namespace is not None:
        recorder.read_item(namespace, name)


def write_attribute(recorder: Recorder, tensor: torch.Tensor, name: str) -> None:
    """`tensor.name` is going to be set or deleted."""
    if id(tensor) in recorder.drawn_items:
        recorder.refuse(f"sets '{name}' of a tensor that it has drawn", "Keep it in an object of its own")
    namespace = None if _is_torchs(tensor, name) else _namespace(recorder, tensor, name)
    if namespace is not None:
        recorder.wrote(namespace, name)


def _is_torchs(tensor: torch.Tensor, name: str) -> bool:
    return name not in vars(tensor) and hasattr(nn.Parameter, name)


def _namespace(recorder: Recorder, tensor: torch.Tensor, name: str) -> dict[str, Any] | None:
    """The attributes of a tensor that was there before the step, as a place; None for the step's own tensors."""
    is_traced = _torch.is_traced(tensor)
    known = recorder.twins.pair(tensor)
    if is_traced and (known is None or name in _torch.INTERNAL_ATTRIBUTES):
        return None
    if known is None:
        recorder.root(tensor)
        return recorder.namespace_of(tensor)
    if recorder.place_of(known.real) is None:
        _find_place(recorder, known, name)
    if id(vars(known.real if is_traced else known.twin)) in recorder.kept:
        recorder.refuse(
            f"uses attribute '{name}' of '{known.name}' that a hook has set, or the other way round",
            "Keep it in an object of its own",
        )
    place = recorder.place_of(recorder.namespace_of(known.real))
    assert place is not None
    recorder.stands_at(vars(tensor), place)
    return vars(tensor)


def _find_place(recorder: Recorder, twin: Twin, name: str) -> None:
    if twin.kind in _FIXED:
        recorder.root(twin.real, twin.name)
    elif twin.given is not None:
        container, step, key = twin.given
        above = recorder.place_of(container)
        assert above is not None
        place = Place(above, step, key, twin.real, Expectation.TENSOR, is_given=True)
        above.children[step, key] = place
        recorder.stands_at(twin.real, place)
    else:
        recorder.refuse(
            f"uses attribute '{name}' of '{twin.name}', a {twin.kind.value} that may be another tensor next time",
            "Keep it in the module, or in an object of its own",
        )


# Which tensor it is


def same_object(recorder: Recorder, left: Any, right: Any) -> None:
    """`left is right`. Which arguments are one tensor, or a parameter, is guarded; buffers and state are exchanged."""
    pair = recorder.twins.of(left), recorder.twins.of(right)
    moving = [twin for twin in pair if twin is not None and twin.kind not in (*_FIXED, SlotKind.BATCH)]
    if moving and all(pair) and left is not right:
        recorder.refuse(f"asks whether '{moving[0].name}' is another tensor", "Compare names, or their id()")
    for tensor, other in ((left, right), (right, left)):
        known = recorder.twins.of(tensor)
        if known is not None and known.real is other:
            recorder.refuse(
                f"asks whether '{known.name}' is a tensor that was found elsewhere", "Compare names, or their id()"
            )
    if left is not right and isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor) and not all(pair):
        _tell_apart(recorder, moving, _place_of(recorder, left), _place_of(recorder, right))


def _tell_apart(recorder: Recorder, moving: list[Twin], left: Place | None, right: Place | None) -> None:
    """Two tensors are not one, of which at least one was found in an object: they are to stay two."""
    if moving and (left or right) is not None:
        recorder.refuse(f"asks whether '{moving[0].name}' is another tensor", "Compare names, or their id()")
    if left is not None and right is not None:
        left.is_told_apart = right.is_told_apart = True


def _place_of(recorder: Recorder, tensor: torch.Tensor) -> Place | None:
    known = recorder.twins.of(tensor)
    if known is None:
        return recorder.place_of(tensor)
    if recorder.place_of(known.real) is None and (known.kind in _FIXED or known.given is not None):
        _find_place(recorder, known, "")
    return recorder.place_of(known.real)


def looked_up(recorder: Recorder, owner: Any, key: Any) -> None:
    """A key is looked for in a container from outside."""
    if id(key) in recorder.drawn_items:
        recorder.refuse("looks for something that it has drawn", "Draw places, and compare those")
    known = recorder.twins.of(key)
    if known is None:
        return
    is_hashed = isinstance(owner, (dict, set, frozenset))
    if (known.real in owner) if is_hashed else any(item is known.real for item in owner):
        recorder.refuse(f"looks for '{known.name}' in a {type(owner).__name__}", "Use names or id() as keys")


def id_of(recorder: Recorder, tensor: Any) -> Any:
    """What `id` and `hash` are to be asked of."""
    known = recorder.twins.of(tensor)
    return tensor if known is None or known.kind not in _FIXED else known.real
