"""Looks that the step takes at values it computes: which of them it may take, and what there is to see.

    loss.item()                     a number that Python has after the graph has run (`record.late`)
    if loss.item() > 3: ...         refused, with its line: what the step does must not depend on it
    if not isfinite(loss): ...      a check: nothing is expected to be wrong, and the graph looks at each call
    if mask.any(): ...              of the batch alone: known before the graph runs (`questions`)

What counts as a check is told in `checks`. To know which way this very call goes, the nodes that a value depends on are
run on the real tensors (`preview`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import fx

from wholestep import _recording_torch, _torch
from wholestep.capture import blank, checks, made_tensors, remedies, source
from wholestep.capture.preview import Preview
from wholestep.capture.record import forms, late_calls, whole_late
from wholestep.capture.record.again import raises_of_a_value
from wholestep.capture.record.arrays import LateArray
from wholestep.capture.record.late import Check, Leaf, OtherOutcome, Requirement, Within
from wholestep.capture.record.numbers import Number, kind_of, kinds_of, name_of, origins_of
from wholestep.capture.record.places import same
from wholestep.errors import CaptureError
from wholestep.graph import Phase

if TYPE_CHECKING:
    from wholestep.capture.session import Session

_NOTHING = torch.empty(0)
_ITEM = torch.ops.aten._local_scalar_dense.default


class Looks:
    """The looks of one trace; those that are more than a number for later need `may_leave`."""

    def __init__(self, session: Session, *, may_leave: bool) -> None:
        self._session = session
        self._may_leave = may_leave
        self._numbers: dict[fx.Node, Number] = {}
        self._arrays: dict[fx.Node, tuple[str, Callable[[], Any]]] = {}
        self._positions: dict[fx.Node, Any] = {}
        """Nodes that tell where a mask has its elements, and what they are in this call."""
        self._nodes: dict[str, fx.Node] = {}
        """The node behind each leaf of the late ledger."""
        self._symbols: dict[str, Any] = {}
        """Numbers that torch computes with, by name."""
        self._whole: set[Any] = set()
        """The symbols of those that are whole numbers."""
        self._certain: set[str] = set()
        """Leaves whose values guards make certain."""
        self.preview = Preview(session)
        self.requirements: list[Requirement] = []
        self._has_begun = False
        self.gradients_before: dict[int, torch.Tensor] = {}
        """By id: parameters whose gradient from before the call was still there at the first look."""
        self._nothing = _torch.fake_like(session.fake_mode, _NOTHING, "nothing")
        late = session.recorder.late
        late.judge, late.require, late.numbers = self._judge, self._require, session.numbers
        late.symbol_of = session.symbol
        late.is_handled = late.may_raise_handled = checks.is_handled
        late.leaf_of, late.node_of, late.can_find = self._array_leaf, session.node_of, self._can_find
        session.recorder.make_tensor = self.make
        late.looked = late_calls.refuser(session.recorder)
        session.recorder.number_in = self.number

    def number(self, tensor: Any) -> Any:
        """The number in a tensor of one element, for later; None if there is none, or if it is known now.

        A plain one if it tells where a mask has its elements: the graph is to look whether it is the same.
        """
        if not self._is_open(tensor) or tensor.numel() != 1:
            return None
        position = self.position(tensor)
        if position is not None:
            return position
        node = self._session.node_of(tensor)
        if node not in self._numbers:
            made = self._session.recorder.late.number(*self._leaf(tensor, node, lambda value: value.item()))
            self._name(made, node)
            self._numbers[node] = made
        return self._numbers[node]

    def symbol(self, number: Number) -> Any:
        """The traced value of a number that the graph computes, for torch to compute with.

        None if torch has to have the number itself: if its type may change, or if guards make it certain.
        """
        name = name_of(number)
        if name not in self._symbols:
            session = self._session
            session.recorder.late.require_kind(number)
            kind = _kind_for_torch(kinds_of(number))
            within = session.recorder.late.within(number)
            leaves = [self._nodes[leaf] for leaf in within.code.leaves]
            if kind is None or not self._are_steady(within) or all(map(session.is_answerable, leaves)):
                return None
            leaves, given = self.given_to(within)
            make = _torch.new_symbolic_int if kind is int else _torch.new_symbolic_float
            made = self._symbols[name] = make(session.fake_mode)
            _torch.track_as_call(session.tracer, made, within, (*leaves, *given))
            if kind is int:
                self._whole.add(_torch.expression(made))
        return self._symbols[name]

    def _are_steady(self, within: Within) -> bool:
        """Whether the numbers that lines name, which are known before, are Python's own."""
        imported = self._session.recorder.late.imported
        return all(kind_of(imported[name]) in (int, float) for name in within.code.early)

    def given_to(self, within: Within) -> tuple[list[fx.Node], list[fx.Node]]:
        """What a call inside the graph is given: nodes, and inputs that are numbers known before."""
        session = self._session
        if not self._are_steady(within):
            session.recorder.refuse("gives torch what NumPy's numbers from outside are in", "Convert them with float()")
        early = [session.recorder.late.imported[one] for one in within.code.early]
        return [self._nodes[leaf] for leaf in within.code.leaves], [session.symbol_node(one) for one in early]

    def note_made(self, name: str, tensor: torch.Tensor) -> None:
        """Torch has been given a tensor that Python makes of what the graph computes."""
        self._symbols[name] = tensor

    def make(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """What torch makes of arrays that are only known later."""
        return made_tensors.make(self._session, function, *args, **kwargs)

    @property
    def has_symbols(self) -> bool:
        """Whether torch computes with numbers that the graph computes."""
        return bool(self._symbols)

    def has_whole(self, value: Any) -> bool:
        """Whether a value is computed from a whole number that the graph computes."""
        return isinstance(value, torch.SymInt) and not self._whole.isdisjoint(_torch.expression(value).free_symbols)

    def position(self, tensor: Any) -> int | bool | None:
        """What is asked of where a mask has its elements; None if it is asked of something else."""
        if not self._may_leave or not self._is_open(tensor):
            return None
        node = self._session.node_of(tensor)
        if not checks.is_position(node):
            return None
        if self._session.is_answerable(node):
            with _recording_torch.untraced():
                session = self._session
                return session.questions.answer(session.tracer, _ITEM, (node,), session.reals())
        return self._steady(node)

    def expected(self, tensor: Any) -> bool | None:
        """A truth value that an operator of torch asks for, to check something: the same is expected at each call."""
        if not self._may_leave or not self._is_open(tensor) or any(map(blank.is_blank, self._session.reals().values())):
            return None
        return self._steady(self._session.node_of(tensor))

    def _steady(self, node: fx.Node) -> Any:
        if node not in self._positions:
            value = self._positions[node] = self.preview.read(node, lambda value: value.item())

            def check(tensors: Sequence[torch.Tensor]) -> None:
                if tensors[0].item() != value:
                    raise OtherOutcome

            self._add(check, [node])
        return self._positions[node]

    def list_of(self, tensor: Any) -> Any:
        """`tensor.tolist()` for later; None if that cannot be told now."""
        is_open = self._is_open(tensor) and not self._session.can_answer(tensor)
        if not is_open or not all(type(size) is int for size in tensor.shape) or tensor.dim() == 0:
            return None
        node = self._session.node_of(tensor)
        leaf, kind, find = self._leaf(tensor, node, lambda value: value.tolist(), is_list=True)
        late = self._session.recorder.late
        known = {*late.found}
        made = late.items(leaf, [int(size) for size in tensor.shape], kind, find)
        self._nodes |= dict.fromkeys(late.found.keys() - known, node)
        return made

    def array(self, tensor: torch.Tensor) -> LateArray:
        """`tensor.numpy()` for later."""
        hint = _torch.optimization_hint
        shape, strides = (tuple(map(hint, numbers)) for numbers in (tensor.shape, tensor.stride()))
        is_fixed = all(type(size) is int for size in tensor.shape)

        def samples() -> list[Any]:
            with _recording_torch.untraced():
                return forms.samples_of(shape, strides, tensor.dtype)

        return self._session.recorder.late.array(tensor, samples, is_fixed=is_fixed)

    def _array_leaf(self, tensor: torch.Tensor) -> tuple[str, Callable[[], Any]]:
        """The name of the array of what a tensor holds now, and how to find it."""
        if self._session.is_reassigned(tensor):
            self._session.recorder.refuse("computes with an array of a tensor that was given other .data", "Copy it")
        node = self._session.node_of(tensor)
        if node not in self._arrays:
            # What is in the memory of an input may be written to before anybody reads it.
            value = tensor.detach().clone() if self._is_of_input(tensor) else tensor
            name = self._session.recorder.late.array_name(Leaf(_torch.from_functional(value), "array"))
            self._nodes[name] = node
            found: list[Any] = []

            def find() -> Any:
                if not found:
                    found.append(self.preview.read(node, lambda value: value.detach().clone().numpy()))
                return found[0]

            self._arrays[node] = name, find
        return self._arrays[node]

    def _is_of_input(self, tensor: torch.Tensor) -> bool:
        twins = [lifted.twin for lifted in self._session.lifted.values() if isinstance(lifted.twin, torch.Tensor)]
        return _torch.storage_key(tensor) in map(_torch.storage_key, twins)

    def _can_find(self) -> bool:
        return self._may_leave and not any(map(blank.is_blank, self._session.reals().values()))

    def _is_open(self, tensor: Any) -> bool:
        if not isinstance(tensor, _torch.FunctionalTensor) or tensor.dtype.is_complex:
            return False
        return not _torch.is_constant(tensor) and self._session.has_node(tensor)

    def _leaf(
        self, tensor: torch.Tensor, node: fx.Node, read: Callable[[torch.Tensor], Any], *, is_list: bool = False
    ) -> tuple[Leaf, type, Callable[[], Any]]:
        kind = bool if tensor.dtype is torch.bool else float if tensor.dtype.is_floating_point else int
        how = "list" if is_list else "item"
        return Leaf(_torch.from_functional(tensor), how), kind, lambda: self.preview.read(node, read)

    def _name(self, number: Number, node: fx.Node) -> None:
        [name] = origins_of(number)
        self._nodes[name] = node

    # Whether Python may go on by a value

    def _judge(self, numbers: tuple[Number, ...]) -> bool:
        """Whether guards make some numbers certain; raises if they do not, and the step must not go on by them."""
        session = self._session
        names = [name for name in self._nodes if name in origins_of(*numbers)]
        nodes = {name: self._nodes[name] for name in names}
        if all(session.is_answerable(node) for node in nodes.values()):
            with _recording_torch.untraced():
                for number in numbers if self._has_arrays(names) else ():
                    self._ask_number(number)
                for name in [name for name in names if name not in self._certain and not self._has_arrays([name])]:
                    self._certain.add(name)
                    session.questions.answer(session.tracer, _ITEM, (nodes[name],), session.reals())
            return True
        if not self._may_leave:
            raise refused(", also to check it: on several ranks all run one graph")
        if not checks.is_check(numbers, nodes.values(), session.is_drawn_input):
            whole_late.escalate(session.recorder)
            raise refused()
        if any(map(blank.is_blank, session.reals().values())):
            raise refused(", and a model without memory has none")
        return False

    def _has_arrays(self, names: Iterable[str]) -> bool:
        return any(self._session.recorder.late.found[name].how == "array" for name in names)

    def _ask_number(self, number: Number) -> None:
        """Guard what Python computes of arrays of the batch; the arrays may be other ones."""
        session, name = self._session, name_of(number)
        if name in self._certain:
            return
        within = session.recorder.late.within(number)
        if within.code.early:
            raise refused()
        self._certain.add(name)
        nodes = tuple(self._nodes[leaf] for leaf in within.code.leaves)
        session.questions.answer(session.tracer, within, nodes, session.reals())

    def outcome(self, func: Any, args: tuple[Any, ...]) -> Any:
        """What an operator that looks at values (`torch.equal`) says of those of this call; None if it must not.

        The graph is to look whether it says the same.
        """
        places = [index for index, value in enumerate(args) if isinstance(value, torch.Tensor)]
        tensors = [args[place] for place in places]
        is_open = self._may_leave and self._session.phase is not Phase.OPTIMIZER
        if not is_open or all(map(_torch.is_constant, tensors)) or not all(map(self._session.has_node, tensors)):
            return None
        nodes = [self._session.node_of(tensor) for tensor in tensors]
        is_drawn_input = self._session.is_drawn_input
        if not checks.is_drawn(nodes, is_drawn_input) and not checks.is_check([], nodes, is_drawn_input):
            return None
        if any(map(blank.is_blank, self._session.reals().values())):
            raise refused(", and a model without memory has none")
        others = [None if index in places else value for index, value in enumerate(args)]

        def say(values: Sequence[torch.Tensor]) -> Any:
            given = dict(zip(places, values, strict=True))
            return func(*[given.get(index, value) for index, value in enumerate(others)])

        expected = self.preview.read_all(nodes, say)

        def check(values: Sequence[torch.Tensor]) -> None:
            if not same(say(values), expected):
                raise OtherOutcome

        self._add(check, nodes)
        if type(expected) is bool and checks.leads_to_an_error(expected):
            raise raises_of_a_value(source.current_location())
        return expected

    def check(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An operator that does nothing but raise for some values: where it does, the step is run as it is."""
        places = [index for index, value in enumerate(args) if isinstance(value, torch.Tensor)]
        if not self._may_leave:
            raise CaptureError(
                f"{_torch.packet_name(func)} looks at values while the step runs",
                location=source.current_location(),
                advice="Check after the call; in torch.linalg, use inv_ex, solve_ex, cholesky_ex or lu_factor_ex",
            )
        given = [None if isinstance(value, torch.Tensor) else value for value in args]

        def check(tensors: Sequence[torch.Tensor]) -> None:
            for place, tensor in zip(places, tensors, strict=True):
                given[place] = tensor
            try:
                func(*given, **kwargs)
            except Exception as error:
                raise OtherOutcome from error
            finally:
                for place in places:
                    given[place] = None

        self._add(check, [self._session.node_of(args[place]) for place in places])

    def _require(self, check: Check, leaves: Sequence[str], outcome: bool | None) -> None:
        self._add(check, [self._nodes[name] for name in leaves])
        if outcome is not None and checks.leads_to_an_error(outcome):
            raise raises_of_a_value(source.current_location())

    def _add(self, check: Check, nodes: list[fx.Node]) -> None:
        """Let the graph look again, here: all that it looks at has been computed."""
        self.begin()
        session, requirement = self._session, self._required(check)
        node = session.tracer.graph.call_function(_recording_torch.REQUIRE, (nodes, requirement.key))
        # In no checkpoint region: what is looked at is not looked at again in the backward.
        node.meta |= {"val": self._nothing, "source": source.current_line()}
        node.meta["phase"] = session.phase_now()

    def begin(self) -> None:
        """From here on the graph may be left: note which gradients of before the call are still there."""
        if not self._has_begun:
            self._has_begun = True
            entries = [entry for entry in self._session.parameters if id(entry.twin) not in self._session.cleared_first]
            self.gradients_before = {id(entry.real): entry.real for entry in entries}

    def look_at_sizes(self, check: Check, sizes: list[fx.Node], like: fx.Node) -> None:
        """Let the graph look at sizes that values decide, where it is being built just now."""
        requirement = self._required(check)
        args = ([], requirement.key, sizes)
        node = self._session.tracer.graph.call_function(_recording_torch.REQUIRE, args)
        node.meta |= {"val": self._nothing, "source": like.meta.get("source", "")}
        node.meta["phase"] = like.meta.get("phase", Phase.FORWARD)

    def _required(self, check: Check) -> Requirement:
        self.requirements.append(Requirement(check))
        return self.requirements[-1]


def _kind_for_torch(kinds: Sequence[type]) -> type | None:
    """How torch takes numbers of some types: as a float, or as an int; None if that depends on the value."""
    if all(kind is int or issubclass(kind, np.integer) for kind in kinds):
        return int
    return float if all(kind is float or issubclass(kind, np.floating) for kind in kinds) else None


def refused(where: str = "") -> CaptureError:
    """The step must not look at a value here."""
    return CaptureError(
        f"{source.what_reads()} needs a value that is only known when the step runs{where}",
        location=source.current_location(),
        advice=remedies.for_values(),
    )
