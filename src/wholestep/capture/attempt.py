"""A trace in progress, and the one that begins again with more that is known."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import Any

import torch

from wholestep._sizes_torch import SizesEnv
from wholestep.capture import binding, blank, discover
from wholestep.capture.discover import Reachable
from wholestep.capture.layouts import new_fake_mode
from wholestep.capture.leftovers import HandedOut
from wholestep.capture.looks import Looks
from wholestep.capture.optimizer_state import State
from wholestep.capture.questions import Answers, Questions
from wholestep.capture.record import Recorder, WholeCalls
from wholestep.capture.session import Session
from wholestep.capture.sizes import Sizes

Function = Callable[..., Any]
NumberPaths = tuple[tuple[Any, ...], ...]
"""Where in the arguments and what they reach the Python numbers are that become inputs."""


@dataclass
class Attempt:
    """One trace of a call: what those before it have found out, and what it finds itself."""

    function: Function
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    found: Reachable
    dynamic_dims: frozenset[tuple[int, int]]
    zero_gradients: frozenset[str]
    numbers: NumberPaths
    answers: bool
    handed_out: HandedOut
    whole_draws: frozenset[tuple[Any, ...]] = frozenset()
    unseen: frozenset[FunctionType] = frozenset()
    """Functions that would run unseen if they were not followed from the start."""
    fixed: frozenset[tuple[Any, ...]] = frozenset()
    """Paths of rates and of numbers in state that torch must have the value of."""
    asks_before: bool = False
    """Whether Python computes with learning rates, and with what optimizers make of their state, before each call."""
    pretends: bool | None = None
    """In a step with sizes that values decide, whether none and one are traced as some; None in others."""
    settles_texts: bool = False
    """Whether text that is made of a number takes its value for granted."""
    whole_calls: WholeCalls = field(default_factory=WholeCalls)
    """Functions that are called after the graph has run, as they are."""
    moved: frozenset[tuple[Any, ...]] = frozenset()
    as_it_is: frozenset[int] = frozenset()
    """Paths of numbers that the step moves on; ids of optimizers at whose state it looks before they have any."""
    session: Session = field(init=False)
    recorder: Recorder = field(init=False)
    sizes: Sizes | None = field(init=False)
    bindings: dict[str, binding.Binding] = field(default_factory=dict)
    states: dict[str, State] = field(default_factory=dict)
    parameter_names: dict[int, str] = field(default_factory=dict)
    flags: dict[str, list[Any]] = field(default_factory=dict)
    lent_groups: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    flags_left: tuple[tuple[binding.Binding, bool], ...] = ()
    rates: list[Any] = field(default_factory=list[Any])
    """Learning rates that Python computes with, or that are no numbers."""

    def __post_init__(self) -> None:
        is_imagined = any(map(blank.is_blank, discover.tensors(self.found, self.args, self.kwargs)))
        self.session = Session(
            new_fake_mode(is_imagined=is_imagined, env=None if self.pretends is None else SizesEnv(self.pretends)),
            self.handed_out,
            has_symbolic_sizes=bool(self.dynamic_dims) or self.pretends is not None,
            zero_gradients=self.zero_gradients,
            optimizers={id(optimizer) for optimizer in self.found.optimizers.values()},
            wrappers={id(wrapper) for wrappers in self.found.wrappers.values() for wrapper in wrappers},
            looked_in=discover.looked_in(self.function, self.args, self.kwargs, self.found),
            questions=Questions(
                is_answering=self.answers and not is_imagined, of_state=self.asks_before and not is_imagined
            ),
            fixed_answers=frozenset(path[1] for path in self.fixed if path[0] is Answers),
        )
        given = (self.numbers, self.whole_draws, self.fixed)
        self.recorder = self.session.recorder = Recorder(*given, may_leave=self.answers)
        self.recorder.whole_calls = replace(self.whole_calls, current=self.session.current)
        self.recorder.ledger.text_later = None if self.settles_texts else self.recorder.late.text
        self.session.looks = Looks(self.session, may_leave=self.answers and not is_imagined)
        self.sizes = Sizes(self.session, may_leave=self.answers) if self.pretends is not None else None

    def dynamic_dims_of(self, index: int) -> tuple[int, ...]:  # of an argument leaf
        return tuple(sorted(dim for leaf, dim in self.dynamic_dims if leaf == index))

    def again(
        self,
        *,
        found: Reachable | None = None,
        numbers: NumberPaths | None = None,
        whole_draws: Iterable[tuple[Any, ...]] = (),
        unseen: Iterable[FunctionType] = (),
        fixed: Iterable[tuple[Any, ...]] = (),
        asks_before: bool = False,
        pretends: bool | None = None,
        settles_texts: bool = False,
        whole_calls: WholeCalls | None = None,
        moved: Iterable[tuple[Any, ...]] = (),
        as_it_is: Iterable[int] = (),
    ) -> Attempt:
        """The same capture from its start, with more that is known."""
        return Attempt(
            *(self.function, self.args, self.kwargs),
            self.found if found is None else found,
            *(self.dynamic_dims, self.zero_gradients),
            self.numbers if numbers is None else numbers,
            self.answers,
            self.handed_out,
            self.whole_draws.union(whole_draws),
            self.unseen.union(unseen),
            self.fixed.union(fixed),
            self.asks_before or asks_before,
            self.pretends if pretends is None else pretends,
            self.settles_texts or settles_texts,
            self.whole_calls if whole_calls is None else whole_calls,
            *(self.moved.union(moved), self.as_it_is.union(as_it_is)),
        )
