"""What a call leaves behind is found, wherever it is; what graphs show is not taken for it."""

import collections
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.leftovers import Leftovers
from tests.twins import mse_step, pair, small_world
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import wholestep

X, Y = pair()


def fake() -> Any:
    with FakeTensorMode():
        return torch.ones(3)


def functional() -> Any:
    with FunctionalTensorMode():
        return FunctionalTensor.to_functional(torch.ones(2))


def symbol() -> Any:
    return ShapeEnv().create_unbacked_symint()


def in_cache(kept: Any, value: Any) -> None:
    kept.cached = functools.lru_cache(lambda: value)
    kept.cached()


PLACES: dict[str, Callable[[Any, Any], Any]] = {
    "attribute": lambda kept, value: setattr(kept, "value", value),
    "list": lambda kept, value: setattr(kept, "values", [value]),
    "dict": lambda kept, value: setattr(kept, "table", {"loss": value}),
    "deque": lambda kept, value: setattr(kept, "window", collections.deque([value])),
    "closure": lambda kept, value: setattr(kept, "function", lambda: value),
    "cache": in_cache,
}


@pytest.mark.sample(3)
@pytest.mark.parametrize(("place", "make"), list(zip(PLACES, [fake, functional, symbol] * 2)))
def test_what_is_left_behind_is_found(place: str, make: Callable[[], Any]) -> None:
    leftovers, kept = Leftovers(), SimpleNamespace()
    with leftovers.watching():
        call = leftovers.checked(lambda: PLACES[place](kept, make()))
        with pytest.raises(AssertionError, match=r"left behind by a capture: a (Fake|Functional|Sym)"):
            call()
        leftovers.checked(lambda: None)()  # it is told once


@pytest.mark.parametrize("make", [fake, functional, symbol])
def test_what_is_gone_is_not(make: Callable[[], Any]) -> None:
    leftovers = Leftovers()

    def call() -> None:
        made = make()
        cycle: list[Any] = [made]
        cycle.append(cycle)

    with leftovers.watching():
        leftovers.checked(call)()


@pytest.mark.parametrize("place", PLACES)
def test_an_exception_hides_nothing(place: str) -> None:
    leftovers, kept = Leftovers(), SimpleNamespace()

    def call(keep: bool) -> None:
        made = fake()
        if keep:
            PLACES[place](kept, made)
        raise KeyError("refused")

    with leftovers.watching():
        with pytest.raises(KeyError):
            leftovers.checked(call)(False)
        with pytest.raises(AssertionError, match=r"left behind by a refused call: a FakeTensor"):
            leftovers.checked(call)(True)


@pytest.mark.parametrize("dynamic_batch", [True, False])
def test_what_graphs_show_is_not_left_behind(dynamic_batch: bool) -> None:
    leftovers, world = Leftovers(), small_world()()
    with leftovers.watching():
        compiled = wholestep.compile(mse_step, dynamic_batch=dynamic_batch)
        for size in (6, 4, 3):
            compiled(world.model, world.optimizer, X[:size], Y[:size])
    assert any(isinstance(node.meta["val"], FakeTensor) for node in compiled.graph.calls())


def test_nothing_stays_patched() -> None:
    before = (FunctionalTensor.__new__, torch.SymInt.__init__, torch.fx.Graph.__init__)
    with Leftovers().watching():
        assert FunctionalTensor.__new__ is not before[0]
    assert (FunctionalTensor.__new__, torch.SymInt.__init__, torch.fx.Graph.__init__) == before
