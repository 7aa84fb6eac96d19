"""How far a graph has come in applying the call before: kept outside of the code that does it.

An update consists of ops that write in place; done twice or by half it is wrong. The code that applies one may be left
at any opcode: by Ctrl-C, by a signal handler that raises, by an op that fails, by a peer that is gone. So what it has
done is written down in a list, by the same C call that does it:

    todo = starmap(lerp_, ((exp_avg, grad, 0.1),))              # nothing has run yet
    if done[7] is None: done[7:8] = todo                        # the op runs and its result is there: one opcode

Between the question and the answer Python looks at no signal. Whoever comes next, the same thread or another, a signal
handler in the middle of it all, goes through the same statements and finds what is left to do. All values that later
ops of the update need are in these lists; those that are not needed any more make room for a mark.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, starmap
from typing import Any

from torch import fx

from wholestep import _torch
from wholestep.errors import RankError
from wholestep.graph import SlotKind, StepGraph, ops

# In place of a value that is not needed any more.
GONE = True


@dataclass(frozen=True)
class Places:
    """Which nodes of a graph belong to the call before, and the numbers of their places, by name.

    `given` are inputs: what was carried over, and the tensors that are updated. `done` are ops, in order.
    """

    given: dict[str, int]
    done: dict[str, int]
    waits: frozenset[int]

    @staticmethod
    def of(graph: StepGraph, held: Collection[str], *, is_flush: bool) -> Places:
        """`held` are the slots of tensors that are updated; all ops of a flush belong to the call before."""
        inputs = [
            node.name
            for slot_id, node in graph.placeholders().items()
            if slot_id in held or graph.slots[node.name].kind is SlotKind.CARRY
        ]
        moved: set[fx.Node] = set()
        for node in reversed(graph.nodes):
            is_needed = not moved.isdisjoint(node.users)
            if node.op == "call_function" and (is_flush or is_needed or "applies" in node.meta):
                moved.add(node)
        calls = [node for node in graph.calls() if node in moved]
        return Places(
            {name: index for index, name in enumerate(inputs)},
            {node.name: index for index, node in enumerate(calls)},
            frozenset(index for index, node in enumerate(calls) if node.target is ops.WAIT),
        )


class Journal:
    """What one graph was given of the call before, and what it has done with it.

    `tries` has a list for each wait: None when it began, the tensor when it ended, until that is among what is `done`.
    PyTorch forgets a collective that has been waited for, also if it failed; waiting again would find nothing to wait
    for and return rubbish.
    """

    def __init__(self, places: Places, given: list[Any]) -> None:
        self.given = given
        self.done: list[Any] = [None] * len(places.done)
        self.tries: dict[int, list[Any]] = {index: [] for index in places.waits}

    @property
    def is_done(self) -> bool:
        """Whether all ops have run."""
        return all(value is not None for value in self.done)

    @property
    def has_failed_wait(self) -> bool:
        """Whether communication that the update needs has failed, so that it can never be applied."""
        return any(tried and tried[-1] is None for tried in self.tries.values())

    def clear(self) -> None:
        """Let go of all values: nobody will need them."""
        self.given.clear()
        self.done.clear()
        self.tries.clear()

    def wait(self, index: int, function: Callable[..., Any], value: Any) -> None:
        """Wait for a collective, unless that has been done."""
        if self.done[index] is not None:
            return
        tried = self.tries[index]
        todo = chain((None,), map(function, (value,)))
        if not tried:
            tried.extend(todo)
        if tried[-1] is None:
            raise RankError("communication that an update needs has failed before")
        self.done[index] = tried[-1]
        tried[-1] = GONE  # a whole bucket: it must not outlive its last use

    def run(self, index: int, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Run an op that returns something, unless that has been done."""
        done = self.done
        todo = starmap(partial(function, **kwargs), (args,))
        if done[index] is None:
            done[index : index + 1] = todo

    def run_for_effect(
        self, index: int, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> None:
        """Run an op that returns None, unless that has been done."""
        done = self.done
        todo = zip(starmap(partial(function, **kwargs), (args,)))
        if done[index] is None:
            done[index : index + 1] = todo


def returns_nothing(node: fx.Node) -> bool:
    """Whether an op only has an effect."""
    return ops.is_op(node) and not _torch.schema(node.target).returns


def writes(node: fx.Node) -> bool:
    """Whether an op changes one of its arguments."""
    return ops.is_op(node) and bool(ops.written_arguments(node.target))


def at_once(node: fx.Node, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, or one that does the same without any Python in between where that matters."""
    matters = node.target is ops.WAIT or (writes(node) and isinstance(function, types.FunctionType))
    return _torch.direct_call(node.target) if matters else function
