"""Numbers that the graph computes: Python has them after it has run, to return, to keep, to print.

    total.update(loss.item(), n)        late_item = <the graph's loss>;  b_1 = c_mul(late_item, a_n);  b_2 = ...
    return {"loss": loss.item()}        the tensor is an output of the graph, the number is made of it afterwards

What the step does must not depend on one: at the time when it is traced nobody knows it. Torch itself looks at values
all the same, to check them, and so do users: if they are finite, if there is something to raise. There the trace takes
the side that this very call takes, the graph gets a node that looks again at each call (`Requirement`), before anything
is written, and a call that is to take the other side leaves the graph there (`OtherOutcome`).
"""

from __future__ import annotations

import itertools
import re
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch

from wholestep import _recording_torch
from wholestep.capture.record.forms import form_of
from wholestep.capture.record.late_values import ValueLedger
from wholestep.capture.record.numbers import Later, Number, ledger_of, name_of, settled, value_of
from wholestep.capture.record.places import same
from wholestep.capture.record.texts import marked


class OtherOutcome(Exception):
    """A value that the step looks at leads another way than at capture; nothing has been written."""


Check = Callable[[Sequence[torch.Tensor]], Any]
"""Looks at tensors, and raises `OtherOutcome`."""


@dataclass(frozen=True)
class Leaf:
    """A traced value that Python is handed: how says as what."""

    value: Any
    how: str = "item"
    """One number (`item`), all that `tolist()` gives (`list`), or an array (`array`)."""


@dataclass
class LateLedger(ValueLedger):
    """The arithmetic that Python does with what the graph computes.

    `judge` is asked before Python takes a value: it raises if the step must not go on by it, and returns whether a
    guard has made it certain. `require` lets the graph check what it computes at some leaves.
    """

    is_late: ClassVar[bool] = True
    judge: Callable[[tuple[Number, ...]], bool] = lambda numbers: False
    require: Callable[[Check, Sequence[str], bool | None], None] = lambda check, leaves, outcome: None
    is_handled: Callable[[], bool] = lambda: False
    numbers: dict[str, Any] = field(default_factory=dict[str, Any])
    """The numbers of the running call that are known before the graph runs."""
    imported: dict[str, Number] = field(default_factory=dict[str, Number])
    """Those that lines here name."""
    _texts: list[str] = field(default_factory=list[str])
    _raising: set[str] = field(default_factory=set[str])
    found: dict[str, Leaf] = field(default_factory=dict[str, Leaf])

    def end(self) -> None:
        """The trace is over: numbers that somebody keeps must not keep it."""
        self.judge, self.require, self.symbol_of = _is_over, _is_over, _is_over
        self.looked, self.leaf_of, self.node_of, self.can_find = _is_over, _is_over, _is_over, _is_over
        self.found.clear()

    def number(self, leaf: Leaf, kind: type, find: Callable[[], Any]) -> Number:
        """The number that the graph computes at a leaf."""
        name = self._new_name("late_item")
        self.found[name] = leaf
        return Number(self, name, Later((kind,), find), frozenset([name]))

    def array_name(self, leaf: Leaf) -> str:
        """A name for the array that the graph computes at a leaf."""
        name = self._new_name("late_array")
        self.found[name] = leaf
        return name

    def items(self, leaf: Leaf, shape: Sequence[int], kind: type, find: Callable[[], Any]) -> Any:
        """What `tolist()` gives, of numbers."""
        root = self._new_name("late_list")
        self.found[root] = leaf

        def part(text: str, rest: Sequence[int], get: Callable[[], Any]) -> Any:
            if not rest:
                return self.computed(text, Later((kind,), get), frozenset([root]))
            size, *inner = rest
            return [part(f"{text}[{index}]", inner, lambda i=index: get()[i]) for index in range(size)]

        return part(root, shape, find)

    @property
    def is_used(self) -> bool:
        return self.has_arrays or bool(self.found)

    has_early_texts: bool = False
    """Whether some of the text is of numbers that are known before the graph runs."""

    @property
    def has_texts(self) -> bool:
        """Whether the step has made text of a number."""
        return bool(self._texts)

    def text(self, function: Callable[..., str], number: Number, *spec: str) -> str:
        """What a function makes of a number: text in which a mark stands for what is missing."""
        arguments = ", ".join([self.named(number), *map(repr, spec)])
        return self.text_of_line(f"{self.constant(function)}({arguments})", [number])

    def text_of_line(self, line: str, values: Iterable[Number]) -> str:
        """What a line of Python makes of some numbers: text in which a mark stands for what is missing."""
        name = self._new_name("late_text")
        self.lines.append(f"{name} = {line}")
        self._texts.append(name)
        self.has_early_texts |= not all(ledger_of(value).is_late for value in values)
        return marked(name)

    def named(self, number: Number) -> str:
        if not ledger_of(number).is_late:
            self.imported[name_of(number)] = number
        return name_of(number)

    def note_raising(self, number: Number) -> None:
        """To compute a number is to raise for some values."""
        self._raising.add(name_of(number))

    def require_unhandled(self, *values: Any) -> None:
        """An error would come after the graph has run, when no handler of the step is there any more."""
        if self.is_handled():
            self.require_known(*values)

    def require_known(self, *values: Any) -> None:
        self.judge(tuple(value for value in values if type(value) is Number and ledger_of(value).is_late))

    def assume(self, text: str, *values: Any, outcome: bool | None = None) -> None:
        """The trace goes on by an outcome: the graph is to look whether it is the same, as early as it can."""
        late = tuple(value for value in values if type(value) is Number and ledger_of(value).is_late)
        is_certain = self.judge(late)
        code, numbers = self.slice_of([], [f"assume({text})"]), self.numbers
        if is_certain:  # of what the graph computes: of numbers that it is computed with, nobody has said so yet
            for name in code.early:
                settled(self.imported[name])
            return
        super().assume(text)
        self.require(lambda tensors: code.run(tensors, numbers), code.leaves, outcome)

    def assume_form(self, name: str, form: Any) -> None:
        """The trace goes on by the form of a value: the graph looks at each call whether it is the same."""
        code = self.slice_of([], [f"assume({self.constant(form_of)}({name}) == {self.constant(form)})"])
        numbers = self.numbers
        self.require(lambda tensors: code.run(tensors, numbers), code.leaves, None)

    def outcome_of(self, number: Number) -> bool:
        """Which way this call goes, without asking whether the step may look: the graph looks again at each call."""
        if not self.can_find():
            self.require_known(number)
        outcome, numbers = bool(value_of(number)), self.numbers
        code = self.slice_of([], [f"assume({'' if outcome else 'not '}{name_of(number)})"])
        self.require(lambda tensors: code.run(tensors, numbers), code.leaves, None)
        return outcome

    def slice_of(self, wanted: Iterable[str], assumptions: Iterable[str] = ()) -> Code:
        """The lines that some names and assumptions need."""
        wanted, lines = tuple(wanted), list[str]()
        needed = {*wanted, *itertools.chain(*map(_words, assumptions))}
        for line in reversed([line for line in self.lines if not line.startswith("assume(")]):
            name, _, text = line.partition(" = ")
            if name in needed:
                needed |= _words(text)
                lines.append(line)
        leaves = tuple(name for name in self.found if name in needed)
        ways = {name: self.found[name].how for name in leaves}
        early = tuple(sorted(self.imported.keys() & needed))
        return Code((*reversed(lines), *assumptions), leaves, ways, early, dict(self.constants), wanted)

    def within(self, number: Number) -> Within:
        """What computes a number inside the graph, for torch to compute with."""
        return self.within_name(name_of(number))

    def within_name(self, name: str) -> Within:
        """The same of anything that has a name."""
        code = self.slice_of([name])
        return Within(code, name, may_raise=not self._raising.isdisjoint(code.names))


def _is_over(*_: Any) -> Any:
    raise AssertionError("the trace is over")


def _words(text: str) -> set[str]:
    return {*re.findall(r"[A-Za-z_]\w*", text)}


class Code:
    """Lines of a late ledger, ready to run: they are told the tensors of `leaves` and the numbers known before."""

    def __init__(
        self,
        lines: Sequence[str],
        leaves: tuple[str, ...],
        ways: Mapping[str, str],
        early: tuple[str, ...],
        constants: dict[str, Any],
        wanted: tuple[str, ...],
    ) -> None:
        self.leaves = leaves
        self._ways = [ways[name] for name in leaves]
        self.early = early
        returned = ", ".join(f"{name!r}: {name}" for name in wanted)
        parameters = ", ".join((*leaves, *early))
        body = [f"    {line}" for line in (*lines, f"return {{{returned}}}")]
        source = "\n".join([f"def run({parameters}):", *body])
        self.text = source
        self.names = frozenset(line.partition(" = ")[0] for line in lines)
        names: dict[str, Any] = constants | {"same": same, "assume": _assume}
        exec(compile(source, "<wholestep late numbers>", "exec"), names)
        self._run: Callable[..., dict[str, Any]] = names["run"]

    def run(self, tensors: Sequence[torch.Tensor], numbers: Mapping[str, Any]) -> dict[str, Any]:
        """The wanted numbers; raises `OtherOutcome` if an assumption does not hold."""
        return self._run(*_transferred(tensors, self._ways), *[numbers[name] for name in self.early])


class Within:
    """A call of the graph: the number that Python makes of tensors and of numbers known before, in this order."""

    is_pure_call: ClassVar[bool] = True
    __name__ = "late_number"

    def __init__(self, code: Code, name: str, *, may_raise: bool) -> None:
        self.code = code
        self.name = name
        self.may_raise = may_raise

    def __str__(self) -> str:
        return f"late_number({self.code.text!r})"

    def __call__(self, *values: Any) -> Any:
        value = self.value(*values)
        return value.item() if isinstance(value, np.generic) else value

    def value(self, *values: Any) -> Any:
        """What Python makes, of the type that it has there."""
        count = len(self.code.leaves)
        return self.code.run(values[:count], dict(zip(self.code.early, values[count:], strict=True)))[self.name]


def _assume(holds: Any) -> None:
    if not holds:
        raise OtherOutcome


def _transferred(tensors: Sequence[torch.Tensor], ways: Sequence[str]) -> list[Any]:
    """The values of tensors as Python has them: of single numbers on a device, one transfer for each dtype."""
    values: list[Any] = [None] * len(tensors)
    together: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, (tensor, way) in enumerate(zip(tensors, ways, strict=True)):
        if way != "item":
            values[index] = tensor.tolist() if way == "list" else tensor.detach().numpy()
        elif tensor.device.type == "cpu":
            values[index] = tensor.item()
        else:
            together.setdefault((tensor.device, tensor.dtype), []).append(index)
    for indices in together.values():
        found = torch.stack([tensors[index].reshape(()) for index in indices]).tolist()
        for index, value in zip(indices, found, strict=True):
            values[index] = value
    return values


class Requirement:
    """What a step has taken for granted of the values it computes; the graph looks at each call (`wholestep.require`).

    A node of the graph knows it by its key, as it can hold nothing but numbers and tensors.
    """

    _all: ClassVar[weakref.WeakValueDictionary[int, Requirement]] = weakref.WeakValueDictionary()
    _keys: ClassVar[itertools.count[int]] = itertools.count(1)

    def __init__(self, check: Check) -> None:
        self.key = next(self._keys)
        self._check = check
        self._all[self.key] = self

    @classmethod
    def check(cls, tensors: Sequence[torch.Tensor], key: int) -> None:
        """Raise `OtherOutcome` if the requirement with this key does not hold."""
        cls._all[key]._check(tensors)


_recording_torch.when_required(Requirement.check)


@dataclass(frozen=True)
class Late:
    """What Python makes of the graph's results after it has run: `positions` of the tensors among its outputs."""

    code: Code | None = None
    positions: tuple[int, ...] = ()

    def run(self, outputs: Sequence[Any], numbers: dict[str, Any]) -> dict[str, Any]:
        """All numbers of the call, those that were known before among them."""
        if self.code is None:
            return numbers
        return {**numbers, **self.code.run([outputs[position] for position in self.positions], numbers)}
