"""Nothing internal outlives a capture: what has no value is found the moment a call has left it behind.

Every fake tensor, functional tensor and symbol is weakly remembered when a call of a compiled step makes it. When the
call ends, those still alive have to be accounted for: the graphs that the step keeps show values as fake tensors and
symbols in the records of their nodes, and nobody else may hold one. To look into graphs is cheap; the heap is searched
only to name who holds what is left.

A call is the right moment: when a test ends, its objects go, and what was left in them goes with them.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from wholestep._fake_torch import is_blank
from wholestep.capture.record import follow
from wholestep.errors import CaptureError
from wholestep.runtime.runner import StepRunner

# What is noted here while a step is traced is no part of it.
follow._is_followed[__file__] = False  # pyright: ignore[reportPrivateUsage]

_TENSORS = (FakeTensor, FunctionalTensor)
_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
# Types of torch and of our own that may hold such things after a capture: graphs, modes, what was compiled.
_HOLDERS = ("torch.fx.", "torch._subclasses.", "torch._guards", "torch._inductor.", "torch._functorch.", "wholestep.")
_NOT_SEARCHED = (types.ModuleType, type, types.FrameType, types.CodeType, str, bytes, int, float, type(None))
_MAX_NAMED = 5
_MAX_SEARCHED = 50_000


class Leftovers:
    """Watches calls of compiled steps, and what is made in them, while it is active."""

    def __init__(self) -> None:
        self._made: list[weakref.ref[Any]] = []
        self._graphs: list[weakref.ref[fx.Graph]] = []
        self._new_graphs: list[weakref.ref[fx.Graph]] = []
        self._depth = 0

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for kind in _TENSORS:
                stack.enter_context(_replaced(kind, "__new__", self._remembering_new))
            for kind in _SYMBOLS:
                stack.enter_context(_replaced(kind, "__init__", self._remembering))
            stack.enter_context(_replaced(fx.Graph, "__init__", self._registering))
            stack.enter_context(_replaced(StepRunner, "__call__", self.checked))
            yield
        self._made.clear()

    def _remembering_new(self, original: Callable[..., Tensor]) -> Any:
        def new(kind: Any, *args: Any, **kwargs: Any) -> Tensor:
            tensor = original(kind, *args, **kwargs)
            if self._depth:
                self._made.append(weakref.ref(tensor))
            return tensor

        return staticmethod(new)

    def _remembering(self, original: Callable[..., None]) -> Any:
        @functools.wraps(original)
        def init(symbol: Any, *args: Any, **kwargs: Any) -> None:
            original(symbol, *args, **kwargs)
            if self._depth:
                self._made.append(weakref.ref(symbol))

        return init

    def _registering(self, original: Callable[..., None]) -> Any:
        @functools.wraps(original)
        def init(graph: fx.Graph, *args: Any, **kwargs: Any) -> None:
            original(graph, *args, **kwargs)
            self._new_graphs.append(weakref.ref(graph))

        return init

    def checked(self, call: Callable[..., Any]) -> Any:
        """The same call, which fails if it leaves something internal behind.

        An exception holds the frames it came through, and all that the capture made: then the user's objects are
        searched, from the arguments of the call on.
        """

        @functools.wraps(call)
        def checked_call(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            try:
                result = call(*args, **kwargs)
            except BaseException:
                self._depth -= 1
                if self._made and not self._depth:
                    self._made.clear()
                    search((args, kwargs, call))
                raise
            self._depth -= 1
            if self._made and not self._depth:
                self._check()
            return result

        return checked_call

    def _check(self) -> None:
        suspects = self._suspects(self._new_graphs)
        self._graphs = [graph for graph in self._graphs + self._new_graphs if graph() is not None]
        self._new_graphs.clear()
        for generation in range(3):
            # Captures run without collection: what they leave in cycles is young, and the young are quickly collected.
            if suspects:
                suspects.clear()
                gc.collect(generation)
                suspects = self._suspects(self._graphs)
        self._made.clear()
        found: list[str] = []
        for suspect in suspects:
            found += _strange_holders(suspect, suspects)
            if len(found) >= _MAX_NAMED:
                break
        if found:
            raise AssertionError(f"left behind by a capture: {'; '.join(found)} ({len(suspects)} in all)")

    def _suspects(self, graphs: list[weakref.ref[fx.Graph]]) -> list[Any]:
        """What is alive and shown by none of the graphs, and tensors to which others refer too.

        Torch itself may hold one reference to a tensor that a graph shows: the base of a view.
        """
        alive = [value for reference in self._made if (value := reference()) is not None and not is_blank(value)]
        self._made[:] = [weakref.ref(value) for value in alive]
        counts = _counts_in([graph for reference in graphs if (graph := reference()) is not None]) if alive else {}
        suspects: list[Any] = []
        while alive:
            value = alive.pop()
            shown = counts.get(id(value), 0)
            # One reference is the name here, one the argument of `getrefcount`.
            others = sys.getrefcount(value) - 2 - shown if isinstance(value, Tensor) else 0
            if not shown or others > 1:
                suspects.append(value)
        return suspects


@contextlib.contextmanager
def refusals_watched() -> Iterator[None]:
    """Calls that are refused leave nothing in the user's objects; of others, the capture itself makes sure."""

    def searched(call: Callable[..., Any]) -> Any:
        @functools.wraps(call)
        def searched_call(*args: Any, **kwargs: Any) -> Any:
            try:
                return call(*args, **kwargs)
            except CaptureError:
                if get_proxy_mode() is None:  # a step that calls another one is still being traced
                    search((args, kwargs, call))
                raise

        return searched_call

    with _replaced(StepRunner, "__call__", searched):
        yield


def search(roots: Any) -> None:
    """Raise AssertionError if the roots lead to something internal."""
    stack: list[tuple[Any, Any]] = [(roots, None)]
    seen: dict[int, Any] = {}
    while stack and len(seen) < _MAX_SEARCHED:
        value, holder = stack.pop()
        if id(value) in seen or isinstance(value, _NOT_SEARCHED):
            continue
        seen[id(value)] = value
        if isinstance(value, (*_TENSORS, *_SYMBOLS)) and not is_blank(value):
            raise AssertionError(f"left behind by a refused call: a {type(value).__name__} in {_name(holder)}")
        stack.extend((held, value) for held in _referents(value))


def _referents(value: Any) -> list[Any]:
    if isinstance(value, types.FunctionType):
        used = [value.__globals__[name] for name in value.__code__.co_names if name in value.__globals__]
        return [value.__closure__, value.__defaults__, value.__kwdefaults__, value.__dict__, *used]
    if isinstance(value, StepRunner):
        return [each for each in vars(value).values() if callable(each)]
    return [] if f"{type(value).__module__}.".startswith(_HOLDERS) else gc.get_referents(value)


def _counts_in(graphs: list[fx.Graph]) -> dict[int, int]:
    """How many references nodes hold to each tensor and symbol, by its id."""
    counts: Counter[int] = Counter()
    seen: dict[int, Any] = {}
    for graph in graphs:
        # Names are remembered by node, of those too that have been erased.
        named = [node for node in graph._graph_namespace._obj_to_name if isinstance(node, fx.Node)]
        for node in [*graph.nodes, *named]:
            for held in (node.meta, node.args, node.kwargs):
                _count(held, counts, seen)
    return counts


def _count(value: Any, counts: Counter[int], seen: dict[int, Any]) -> None:
    """Count references in containers, each container once; `seen` keeps them, so that no id is used twice."""
    stack = [value]
    while stack:
        value = stack.pop()
        if isinstance(value, (Tensor, *_SYMBOLS)):
            counts[id(value)] += 1
        elif isinstance(value, dict | list | tuple) and id(value) not in seen:
            seen[id(value)] = value
            stack.extend(value.values() if isinstance(value, dict) else value)


def _strange_holders(value: Any, suspects: list[Any]) -> list[str]:
    """Whoever refers to a value and is neither torch's nor ours; frames are those of the search."""
    referrers = [each for each in gc.get_referrers(value) if each is not suspects]
    holders = [_owner(referrer) for referrer in referrers if not isinstance(referrer, types.FrameType)]
    kind = f"{type(value).__name__} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
    known = [f"{type(holder).__module__}.".startswith(_HOLDERS) for holder in holders]
    return [f"a {kind} in {_name(holder)}" for holder, is_known in zip(holders, known) if not is_known]


def _owner(referrer: Any) -> Any:
    """The object whose attributes a dict is; the dict itself where it is one of its own."""
    if type(referrer) is not dict:
        return referrer
    for owner in gc.get_referrers(referrer):
        if getattr(owner, "__dict__", None) is referrer or (isinstance(owner, fx.Node) and owner.meta is referrer):
            return owner
    return referrer


def _name(holder: Any) -> str:
    if isinstance(holder, types.ModuleType):
        return f"module {holder.__name__}"
    text = f"{type(holder).__module__}.{type(holder).__qualname__}"
    if isinstance(holder, dict):
        return f"{text} with keys {list(map(str, holder))[:4]}"
    return f"{text} of {len(holder)}" if isinstance(holder, list | tuple) else text


@contextlib.contextmanager
def _replaced(owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Any]) -> Iterator[None]:
    own = owner.__dict__.get(name)
    setattr(owner, name, wrap(getattr(owner, name)))
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)
