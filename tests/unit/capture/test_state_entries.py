"""Optimizers that count in their groups, make entries of state late, and ask which entries there are."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.twins import Twins, World, adam, momentum, mse_step, pair, small_world
from torch.optim import Optimizer

BATCH = pair()


class Averaged(Optimizer):
    """SGD that every third step averages with an entry of state, which it makes the first time."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                state = self.state[p]
                if len(state) == 0:
                    state["momentum"] = torch.zeros_like(p)
                state["momentum"].mul_(0.9).add_(p.grad)
                p.add_(state["momentum"], alpha=-group["lr"])
                if group["k"] % 3 == 0:
                    if "slow" not in state:
                        state["slow"] = p.clone()
                    state["slow"].lerp_(p, 0.5)
                    p.copy_(state["slow"])


class Wrapped(Optimizer):
    """The same around another optimizer, in whose state it keeps its entry."""

    def __init__(self, base: Optimizer) -> None:  # as such wrappers do, without Optimizer.__init__
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}  # pyright: ignore
        self.base, self.param_groups, self.state, self.defaults = base, base.param_groups, base.state, base.defaults
        self.param_groups[0]["k"] = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.base.step()
        group = self.param_groups[0]
        group["k"] += 1
        if group["k"] % 3 == 0:
            for p in group["params"]:
                slow = self.base.state[p].setdefault("slow", torch.zeros_like(p))
                slow.lerp_(p, 0.5)
                p.copy_(slow)


@pytest.mark.parametrize(
    ("make", "num_captures"),
    [(Averaged, 3), (lambda p: Wrapped(adam(p)), 2), (lambda p: Wrapped(momentum(p)), 2)],
    ids=["own state", "Adam", "SGD"],
)
def test_what_is_made_once_runs_in_eager_and_counts_are_inputs(
    make: Callable[..., Optimizer], num_captures: int
) -> None:
    twins = Twins(small_world(make_optimizer=make), mse_step)
    twins.steps(10, *BATCH)
    assert twins.num_captures == num_captures, twins.reasons
    assert twins.compiled.num_eager_calls == 1


def test_within_a_budget_no_call_runs_in_eager() -> None:
    twins = Twins(small_world(make_optimizer=lambda p: Wrapped(momentum(p))), mse_step, memory_budget="1GiB")
    twins.steps(7, *BATCH)
    assert twins.compiled.num_eager_calls == 0


class Asking(Optimizer):
    """An optimizer whose update depends on which entries there are, in a way of its own."""

    asks: Any = None

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if "momentum" not in state:
                state["momentum"] = torch.zeros_like(p)
            state["momentum"].mul_(0.9).add_(p.grad)
            p.add_(state["momentum"], alpha=-self.param_groups[0]["lr"] * self.asks(state))


QUESTIONS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "in": lambda state: 2 if "late" in state else 1,
    "get": lambda state: 2 if state.get("late") is not None else 1,
    "length": lambda state: len(state),
    "length compared": lambda state: 2 if len(state) > 1 else 1,
    "length compared later": lambda state: 2 if (size := len(state)) > 1 and size else 1,
    "truth": lambda state: 1 + bool(state),
    "keys": lambda state: 1 + sum(key == "late" for key in state.keys()),  # noqa: SIM118
    "iterated": lambda state: 1 + sum(key == "late" for key in state),
    "items": lambda state: 1 + sum(key == "late" for key, _ in state.items()),
    "copied": lambda state: len({**state}),
    "made a dict": lambda state: len(dict(state)),
    "sorted": lambda state: len(sorted(state)),
    "try": lambda state: _tried(state),
    "compared": lambda state: 1 if state.keys() == {"momentum"} else 2,
    "in a list": lambda state: 2 if "late" in list(state) else 1,
    "map": lambda state: next(iter(map(len, [state]))),
    "joined": lambda state: len("".join(state)),
    "or": lambda state: len(state | {}),
}


def _tried(state: dict[str, Any]) -> int:
    try:
        state["late"]
    except KeyError:
        return 1
    return 2


@pytest.mark.parametrize("ask", QUESTIONS.values(), ids=QUESTIONS.keys())
def test_an_entry_that_appears_is_seen_by_whoever_has_asked(ask: Callable[..., Any]) -> None:
    twins = Twins(small_world(make_optimizer=type("One", (Asking,), {"asks": staticmethod(ask)})), mse_step)

    def add(world: World) -> None:
        for state in world.optimizer.state.values():
            state["late"] = torch.ones(2)

    def remove(world: World) -> None:
        for state in world.optimizer.state.values():
            state.pop("late", None)

    twins.steps(3, *BATCH)
    twins.change(add)
    twins.steps(2, *BATCH)
    twins.change(remove)
    twins.steps(2, *BATCH)


def test_an_entry_that_nobody_asks_for_is_no_other_graph() -> None:
    twins = Twins(small_world(make_optimizer=adam), mse_step)
    twins.steps(2, *BATCH)
    twins.change(lambda world: [state.update(mine=torch.ones(1)) for state in world.optimizer.state.values()])
    twins.steps(3, *BATCH)
    assert twins.num_captures == 1


def test_an_entry_that_goes_is_another_graph() -> None:
    twins = Twins(small_world(make_optimizer=Averaged), mse_step)
    twins.steps(4, *BATCH)
    twins.change(lambda world: [state.pop("slow") for state in world.optimizer.state.values()])
    twins.steps(4, *BATCH)


def test_state_that_the_step_returns_is_a_plain_dict() -> None:
    def step(model: Any, optimizer: Any, features: Any, targets: Any) -> Any:
        loss = mse_step(model, optimizer, features, targets)
        return (
            loss,
            {key: value.clone() for key, value in optimizer.state[model.first.weight].items()},
            {**optimizer.state[model.first.bias]},
        )

    twins = Twins(small_world(make_optimizer=momentum), step)
    for _ in range(3):
        returned = twins.step(*BATCH)
        assert {*map(type, returned[1:])} == {dict}


class Noted(Averaged):
    """The same, with a word in its state that decides what it does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for p in self.param_groups[0]["params"]:
            kind = self.state[p].setdefault("kind", "plain" if p.dim() > 1 else "sign")
            p.sub_(p.grad.sign() if kind == "sign" else p.grad, alpha=self.param_groups[0]["lr"])


def test_words_in_state_are_expected_in_a_plain_dict() -> None:
    twins = Twins(small_world(make_optimizer=Noted), mse_step)
    twins.steps(4, *BATCH)
    assert twins.num_captures == 2, twins.reasons
    twins.change(lambda world: [state.update(kind="plain") for state in world.optimizer.state.values()])
    twins.steps(2, *BATCH)
    assert twins.num_captures == 3


def test_a_first_call_that_raises_inside_the_graph_leaves_no_state() -> None:
    """Eager makes state in `optimizer.step()`, which it does not reach then."""

    def step(model: Any, optimizer: Any, features: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(features)[row].sum()
        loss.backward()
        optimizer.step()
        return loss

    features, _ = BATCH
    twins = Twins(small_world(make_optimizer=adam), step)
    for run, world in zip((twins.eager, twins.compiled), twins.worlds, strict=True):
        for _ in range(2):
            with pytest.raises(IndexError):
                run(world.model, world.optimizer, features, torch.tensor([6]))
            assert not world.optimizer.state
    twins.steps(3, features, torch.tensor([5]))
    for run, world in zip((twins.eager, twins.compiled), twins.worlds, strict=True):
        with pytest.raises(IndexError):
            run(world.model, world.optimizer, features, torch.tensor([6]))
        assert len(world.optimizer.state) == 4
    twins.steps(2, features, torch.tensor([5]))
    assert twins.num_captures == 1
