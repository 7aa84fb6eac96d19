"""A number that changes is taken for what it is in eager: its type, its exceptions, as a key, in a table."""

import collections
import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.twins import Twins, World, mse_step, pair, small_world, square_step
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import wholestep
from wholestep.capture.record.numbers import Ledger, name_of
from wholestep.capture.record.places import Rooted, Step

X, Y = pair()
Scale = Callable[[Any], Any]

Pair = collections.namedtuple("Pair", ["first", "second"])


@dataclasses.dataclass(frozen=True)
class Key:
    number: int


def handled(compute: Callable[[], Any], *errors: type[Exception]) -> Any:
    try:
        return compute()
    except errors:
        return 7.0


def whole(number: Any) -> Tensor:
    """A tensor whose dtype is that of a number."""
    return torch.ones((), dtype=torch.int64) * number


def slow_but(kinds: Iterable[str], *default: str) -> list[Any]:
    return [kind if kind in default else pytest.param(kind, marks=pytest.mark.slow) for kind in kinds]


def scaled(scale: Scale) -> Callable[[World], Callable[..., Any]]:
    """A step whose loss is multiplied by what `scale` makes of the world's state, which it returns as well."""

    def make(world: World) -> Callable[..., Any]:
        state = world.state

        def step(model: nn.Module, optimizer: Optimizer) -> Any:
            optimizer.zero_grad()
            factor = scale(state)
            loss = (model(X) - Y).square().mean() * factor
            loss.backward()
            optimizer.step()
            return loss, factor

        return step

    return make


def run(scale: Scale, changes: Sequence[dict[str, Any]], **state: Any) -> int:
    """Steps between which the state changes; returns how many captures they took."""

    def build() -> World:
        world = small_world(make_optimizer=lambda parameters: SGD(parameters, lr=0.01))()
        world.state = SimpleNamespace(n=1, f=0.5, i=0, items=[], table={}, **state)
        return world

    twins = Twins(build, make=scaled(scale), compare_kept=False)
    for change in ({}, *changes):
        twins.change(lambda world, change=change: vars(world.state).update(change))
        twins.step()
    return twins.num_captures


COUNTS = tuple({"n": n} for n in (2, 3, 4))
TYPES: dict[str, Scale] = {
    "is": lambda s: 2.0 * s.n if type(s.n) is int else 3.0,
    "==": lambda s: 2.0 * s.n if type(s.n) == int else 3.0,  # noqa: E721
    "in": lambda s: 2.0 * s.n if type(s.n) in (int, float) else 3.0,
    "name": lambda s: s.n * len(type(s.n).__name__),
    "isinstance": lambda s: 2.0 * s.n if isinstance(s.n, int) else 3.0,
}


@pytest.mark.parametrize("kind", slow_but(TYPES, "is", "in"))
def test_its_type(kind: str) -> None:
    assert run(TYPES[kind], COUNTS) <= 2


RATES: dict[str, Callable[[Any], bool]] = {
    "isinstance": lambda rate: isinstance(rate, float),
    "type": lambda rate: type(rate) is float,
}


@pytest.mark.parametrize("kind", RATES)
def test_the_type_of_a_learning_rate(kind: str) -> None:
    """Which is a symbol from the first call on; an int is a rate as well."""
    asked = RATES[kind]

    def step(model: nn.Module, optimizer: Optimizer) -> Any:
        is_float = asked(optimizer.param_groups[0]["lr"])
        return mse_step(model, optimizer, X, Y) * (2.0 if is_float else 3.0), is_float

    twins = Twins(small_world(make_optimizer=lambda parameters: SGD(parameters, lr=0.1)), step, compare_kept=False)
    for rate in (0.1, 0.2, 1, 0.1):
        twins.change(lambda world, rate=rate: world.optimizer.param_groups[0].update(lr=rate))
        twins.step()
    assert twins.num_captures <= 2


def test_the_class_of_a_learning_rate_is_not_looked_up() -> None:
    def step(model: nn.Module, optimizer: Optimizer) -> Tensor:
        scale = 2.0 if optimizer.param_groups[0]["lr"].__class__ is float else 3.0
        return mse_step(model, optimizer, X, Y) * scale

    with pytest.raises(wholestep.CaptureError, match="__class__"):
        Twins(small_world(), step).step()


def test_the_class_of_a_learning_rate_is_not_matched() -> None:
    def step(model: nn.Module, optimizer: Optimizer) -> Tensor:
        match optimizer.param_groups[0]["lr"]:
            case float():
                scale = 2.0
            case _:
                scale = 3.0
        return mse_step(model, optimizer, X, Y) * scale

    with pytest.raises(wholestep.CaptureError, match="matches the class"):
        Twins(small_world(), step).step()


def test_the_type_of_a_size_and_of_tensors() -> None:
    def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Any:
        loss = mse_step(model, optimizer, features, targets)
        parameter = next(model.parameters())
        kinds = (type(features), type(loss), type(parameter), type(features.shape[0]))
        return loss, [kind.__name__ for kind in kinds], isinstance(features.shape[0], int)

    twins = Twins(small_world(), step)
    for size in (6, 5, 4):
        twins.step(X[:size], Y[:size])


TABLES: dict[str, tuple[Scale, Sequence[dict[str, Any]]]] = {
    "made of a changing number": (
        lambda s: [s.f * 0.9**power for power in range(4)][s.i],
        [{"f": 2.0, "i": 1}, {"f": 3.0, "i": 2}, {"f": 4.0, "i": 0}],
    ),
    "of changing numbers": (lambda s: [s.f, s.n][s.i], [{"f": 2.0, "i": 1}, {"n": 3, "i": 0}, {"f": 4.0}, {"i": 1}]),
    "of ints and floats": (lambda s: whole((1, 2.5, 3)[s.i]), [{"i": 2}, {"i": 1}, {"i": 0}]),
    "with tensors in it": (lambda s: [s.n, torch.ones(()), s.f][s.i], [{"i": 2, "n": 5}, {"i": 1, "f": 0.7}, {"i": 0}]),
    "of float32": (lambda s: np.linspace(0, 1, 9, dtype=np.float32)[s.n] * 3, COUNTS),
    "of NumPy's ints": (lambda s: np.arange(9)[s.n] / 2 + 1, COUNTS),
    "that the step fills": (lambda s: (s.items.append(s.n), s.items[s.n - 1])[1], COUNTS),
    "that it handles the end of": (
        lambda s: handled(lambda: (1.0, 2.0, 3.0)[s.i], IndexError),
        [{"i": i} for i in (1, 2, 3, 4, 0)],
    ),
    "that begins beyond its end": (
        lambda s: handled(lambda: (1.0, 2.0, 3.0)[s.n + 2], IndexError),
        [{"n": n} for n in (2, 3, 0, -1)],
    ),
}


@pytest.mark.parametrize("kind", TABLES)
def test_an_index_into_a_table(kind: str) -> None:
    run(*TABLES[kind])


RAISING: dict[str, tuple[Scale, Sequence[dict[str, Any]]]] = {
    "division": (lambda s: handled(lambda: 1 / s.n, ZeroDivisionError), [{"n": n} for n in (0, 3, 0, 5)]),
    "logarithm": (lambda s: handled(lambda: math.log(s.f), ValueError), [{"f": f} for f in (0.6, -1.0, 0.7, -2.0)]),
    "overflow": (lambda s: 1 / handled(lambda: math.exp(s.n * 100), OverflowError), [{"n": n} for n in (2, 8, 9, 1)]),
    "infinity": (lambda s: handled(lambda: int(s.f), OverflowError), [{"f": f} for f in (2.5, math.inf, 1.5)]),
    "shift": (lambda s: handled(lambda: 1 << s.n, ValueError), [{"n": n} for n in (2, -1, 3, -2)]),
    "C code that asks": (lambda s: float(handled(lambda: Decimal(s.f), TypeError)), [{"f": f} for f in (0.6, 0.7)]),
}


@pytest.mark.parametrize("kind", slow_but(RAISING, "division", "logarithm", "C code that asks"))
def test_what_it_raises_is_the_steps_to_handle(kind: str) -> None:
    """First from a number that raises nothing, then from one that does."""
    scale, changes = RAISING[kind]
    run(scale, changes)
    run(scale, [*changes[1:], changes[0]])


POWERS: dict[str, tuple[Scale, Sequence[dict[str, Any]]]] = {
    "of a negative number": (lambda s: whole(2**s.n), [{"n": n} for n in (2, 3, -1, 4)]),
    "that is complex": (lambda s: abs((s.f - 1) ** 0.5), [{"f": f} for f in (0.6, 1.5, 0.25, 3.0)]),
    "rounded": (lambda s: round(s.f * 10, None if s.n > 2 else s.n), [{"n": n} for n in (2, 3, 1, 4)]),
}


@pytest.mark.parametrize("kind", slow_but(POWERS, "of a negative number"))
def test_a_result_of_another_type(kind: str) -> None:
    assert run(*POWERS[kind]) <= 4


def test_arithmetic_of_numpy_scalars() -> None:
    assert run(lambda s: np.float64(2.0) * s.f + s.f * np.float32(0.1), [{"f": f} for f in (0.6, 0.7, 0.8)]) <= 2


def test_division_with_a_remainder() -> None:
    assert run(lambda s: sum(divmod(s.n, 2)) - s.n // -2 + s.f % 0.3, [{"n": n, "f": n / 7} for n in (2, -3, 8)]) <= 2


KEYS: dict[str, Callable[[Any], Any]] = {
    "item": lambda s: s.table.update({s.n: 1}),
    "tuple": lambda s: s.table.__setitem__(("a", s.n), s.n),
    "object": lambda s: s.table.__setitem__(Key(s.n), Pair(s.n, [s.n])),
    "taken out and put back": lambda s: s.table.__setitem__(s.n, s.table.pop(s.n, 0) + 1),
    "new dict": lambda s: setattr(s, "made", {s.n: s.f, Pair(s.n, 1): frozenset([s.n])}),
    "set": lambda s: s.items.append({s.n, 9}),
    "count": lambda s: s.counts.update([s.n]),
}


def kinds_of(value: Any) -> list[str]:
    """The types of all keys, which compare equal whatever they are."""
    return [type(part).__name__ for key in value for part in (key, *(key if isinstance(key, tuple) else ()))]


@pytest.mark.parametrize("kind", slow_but(KEYS, "item", "tuple", "object", "new dict"))
def test_as_a_key_it_leaves_plain_numbers(kind: str) -> None:
    def make(world: World) -> Callable[..., Any]:
        state = world.state = SimpleNamespace(n=1, f=0.5, items=[], table={}, counts=collections.Counter())

        def step(model: nn.Module, optimizer: Optimizer) -> Tensor:
            KEYS[kind](state)
            return mse_step(model, optimizer, X, Y)

        return step

    twins = Twins(small_world(), make=make)
    for number in (1, 2, 3, 2):
        twins.change(lambda world, number=number: setattr(world.state, "n", number))
        twins.step()
        eager, compiled = (
            [kinds_of(held) for held in (s.table, s.counts, getattr(s, "made", {}), *s.items)]
            for s in (world.state for world in twins.worlds)
        )
        assert eager == compiled


LOOKUPS: dict[str, Scale] = {
    "item": lambda s: s.known[s.n],
    "get": lambda s: s.known.get(s.n + 2, 1.0),
    "in": lambda s: 2.0 if s.n + 2 in s.known else 3.0,
    "tuple": lambda s: s.pairs.get(("a", s.n), 1.0),
}


@pytest.mark.parametrize("kind", slow_but(LOOKUPS, "get"))
def test_as_a_key_it_finds_what_is_there(kind: str) -> None:
    def known(*numbers: int) -> dict[str, Any]:
        return {"known": {n: n / 2 for n in numbers}, "pairs": {("a", n): n / 2 for n in numbers}}

    changes = [{"n": 2}, known(1, 2, 4), {"n": 1}, known(1, 2, 3), {"n": 2}]
    run(LOOKUPS[kind], changes, **known(1, 2))


LENGTHS: dict[str, Scale] = {
    "its last item": lambda s: s.grown[-1],
    "its last item, counted": lambda s: s.grown[-1] / len(s.grown),
    "its last item by length": lambda s: s.grown[len(s.grown) - 1],
    "its sum and its length": lambda s: 1 / len(s.grown) + sum(s.grown),
    "an item that comes": lambda s: handled(lambda: s.grown[3], IndexError) / len(s.grown),
}


@pytest.mark.parametrize("kind", slow_but(LENGTHS, "its last item", "its sum and its length", "an item that comes"))
def test_a_list_that_grows(kind: str) -> None:
    run(LENGTHS[kind], [{"grown": [1.0, 2.0, 3.0, 4.0, 5.0][:size]} for size in (2, 3, 4, 5)], grown=[1.0])


def test_names_of_numbers_do_not_depend_on_what_else_there_is() -> None:
    """Ranks compare their graphs by these names, and one of them may have seen more numbers change than another."""
    owner = Rooted(object())
    betas = [(owner, (Step.ITEM, "betas"), (Step.ITEM, index)) for index in range(2)]
    batch = (owner, (Step.ATTRIBUTE, "num tokens"))

    def names(*paths: tuple[Any, ...]) -> list[str]:
        """Those of the betas, and of what is computed from them."""
        ledger = Ledger()
        leaves: dict[Any, Any] = {path: ledger.leaf(0.5, path) for path in paths}
        return [name for path in betas for name in (name_of(leaves[path]), name_of(1 - leaves[path]))]

    assert names(*betas) == names(batch, *reversed(betas))
    assert names(*betas)[::2] == ["a_betas_0", "a_betas_1"]


def test_numbers_have_names_of_their_own() -> None:
    ledger = Ledger()
    paths = [(Rooted(object()), (Step.ATTRIBUTE, name)) for name in ("n", "n", "n_2", "a b", "a-b")]
    found = [name_of(ledger.leaf(1, path)) for path in paths]
    assert len({*found}) == len(found)
    assert all(name.isidentifier() for name in found)


def test_the_larger_of_a_rate_and_an_integer_keeps_its_type() -> None:
    def step(model: nn.Module, optimizer: Optimizer, features: Tensor) -> object:
        square_step(model, optimizer, features)
        rate = optimizer.param_groups[0]["lr"]
        return max(rate, 1), min(rate, 1), max(0.5, rate)

    def set_rate(world: World, rate: float) -> None:
        world.optimizer.param_groups[0]["lr"] = rate

    twins = Twins(small_world(), step)
    for rate in (0.05, 2.0, 0.1, 3.0):
        twins.change(lambda world, rate=rate: set_rate(world, rate))
        twins.step(pair()[0])
    assert twins.num_captures == 2
