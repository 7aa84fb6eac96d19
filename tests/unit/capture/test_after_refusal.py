"""A refused call has not happened: everything that the user can see is as it was before it (S10)."""

import collections
import copy
import logging
import random
import time
import types
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.pictures import Picture, differences, generators, picture, replaced
from tests.twins import SmallNet, World, pair, small_world
from torch import Tensor, nn
from torch.optim import Optimizer

import wholestep
from wholestep import CaptureError

X, Y = pair()
Use = Callable[[Any, Tensor], Any]


def refused(loss: Tensor) -> Tensor:
    """What no capture can follow: a branch on the value of a tensor that the step itself computes."""
    return loss * 2 if loss > 0.5 else loss.square()


class Settings:
    count = 0  # a class attribute that steps count in


class Net(SmallNet):
    """Counts, collects and caches in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.outputs: list[Tensor] = []
        self.cache: dict[int, Tensor] = {}
        self.last: Tensor | None = None
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, features: Tensor) -> Tensor:
        self.calls += 1
        self.seen += 1
        out = super().forward(features)
        self.outputs.append(out.detach())
        self.cache.setdefault(features.shape[0], torch.ones(features.shape[0], 1))
        self.last = out
        return out * self.cache[features.shape[0]]


def use_attributes(state: Any, loss: Tensor) -> None:
    state.n += 1
    state.loss = loss
    state.fresh = loss.detach()
    del state.old


def use_lists(state: Any, loss: Tensor) -> None:
    state.history.append(loss.detach())
    state.history.insert(0, 1.0)
    state.window.append(loss)
    state.order.reverse()
    state.order.pop()


def use_dicts(state: Any, loss: Tensor) -> None:
    state.table["loss"] = loss
    state.table.pop("b")
    state.table["a"] = 5
    state.counts["x"] += 1
    state.lists["loss"].append(loss)
    state.sizes.add(3)


def use_objects(state: Any, loss: Tensor) -> None:
    state.a, state.b = state.b, state.a
    state.inner = SimpleNamespace(loss=loss)
    Settings.count += 1


def use_arrays(state: Any, loss: Tensor) -> None:
    state.array[0] += 1
    state.array.sort()
    state.tensor.add_(1)
    state.tensor[0] = loss.detach()


def use_draws(state: Any, loss: Tensor) -> None:
    random.random()
    random.shuffle(state.order)
    np.random.rand(3)
    torch.rand(2)
    state.python.random()
    state.numpy.random()


def use_hooks(state: Any, loss: Tensor) -> None:
    state.handle.remove()
    state.model.first.register_forward_hook(lambda module, args, out: None)


def use_modules(state: Any, loss: Tensor) -> None:
    state.library.COUNT += 1
    state.library.TABLE.append(loss)
    state.library.new = 1


def use_options(state: Any, loss: Tensor) -> None:
    state.optimizer.param_groups[0]["lr"] *= 0.5
    state.model.eval()
    state.model.first.weight.requires_grad_(False)
    state.model.extra = nn.Linear(2, 2)


USES: dict[str, Use] = {
    "attributes": use_attributes,
    "lists": use_lists,
    "dicts": use_dicts,
    "objects": use_objects,
    "arrays": use_arrays,
    "draws": use_draws,
    "hooks": use_hooks,
    "modules": use_modules,
    "options": use_options,
}


def build() -> World:
    world = small_world(Net)()
    library = types.ModuleType("world_library")
    vars(library).update(COUNT=0, TABLE=[])
    world.state = SimpleNamespace(
        n=0,
        loss=None,
        old="there",
        history=[0.5],
        window=collections.deque([1.0, 2.0], maxlen=2),
        order=[1, 2, 3, 4],
        table={"a": 1, "b": 2, "c": 3},
        counts=collections.Counter(x=1),
        lists=collections.defaultdict(list),
        sizes={1, 2},
        a=[1],
        b=[2],
        inner=SimpleNamespace(loss=None),
        array=np.array([3.0, 1.0]),
        tensor=torch.zeros(3),
        python=random.Random(1),
        numpy=np.random.default_rng(1),
        library=library,
        handle=world.model.second.register_forward_hook(lambda module, args, out: None),
        model=world.model,
        optimizer=world.optimizer,
    )
    return world


def make(world: World, use: Use) -> Callable[..., Tensor]:
    """A step that uses its state and then does what is refused."""

    def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(features), targets)
        loss.backward()
        use(world.state, loss)
        optimizer.step()
        return refused(loss)

    return step


def look(world: World, before: list[Any] | None = None) -> tuple[Picture, list[Any]]:
    roots = {**vars(world), "settings": Settings.count, **generators()}
    return picture(roots, before or [])


def assert_as_before(world: World, call: Callable[[], Any]) -> None:
    """Twice, as users try again."""
    for _ in range(2):
        before, objects = look(world)
        with pytest.raises(CaptureError) as caught:
            call()
        assert "test_after_refusal.py" in str(caught.value)
        del caught
        after, _ = look(world, objects)
        now = {place: value for place, value in after.items() if "before[" not in place}
        assert differences(before, now, ("before", "after")) + replaced(after) == []


@pytest.mark.sample(9)
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("kind", USES)
def test_everything_is_as_before(kind: str, trained: bool) -> None:
    world = build()
    if trained:
        F.mse_loss(world.model(X), Y).backward()
        world.optimizer.step()
    compiled = wholestep.compile(make(world, USES[kind]))
    assert_as_before(world, lambda: compiled(world.model, world.optimizer, X, Y))
    assert compiled.num_captures == 0


def test_the_step_then_runs_eagerly_as_if_nothing_had_happened() -> None:
    world, untouched = build(), build()
    untouched.model.load_state_dict(copy.deepcopy(world.model.state_dict()))
    compiled = wholestep.compile(make(world, use_attributes))
    with pytest.raises(CaptureError):
        compiled(world.model, world.optimizer, X, Y)
    for side in (world, untouched):
        torch.manual_seed(3)
        make(side, use_attributes)(side.model, side.optimizer, X, Y)
    seen = [picture({"model": side.model, "state": side.state})[0] for side in (untouched, world)]
    assert differences(seen[0], seen[1]) == []


def test_a_refusal_after_good_calls() -> None:
    """The first captures go well; a later one, with another batch, is refused."""
    world = build()
    plain = nn.Sequential(world.model.first, nn.Tanh(), world.model.second)

    def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(plain(features), targets)
        loss.backward()
        optimizer.step()
        if features.shape[0] == 5:
            use_attributes(world.state, loss)
            random.random()
            loss = refused(loss)
        return loss

    compiled = wholestep.compile(step, dynamic_batch=False)
    compiled(world.model, world.optimizer, X, Y)
    assert_as_before(world, lambda: compiled(world.model, world.optimizer, X[:5], Y[:5]))
    compiled(world.model, world.optimizer, X, Y)
    assert compiled.num_captures == 1


CLOCKS: dict[str, Callable[[], Any]] = {"time.time": time.time, "time.monotonic": time.monotonic}


@pytest.mark.parametrize("clock", CLOCKS)
def test_what_was_used_before_a_clock(clock: str) -> None:
    world = build()

    def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Any:
        optimizer.zero_grad()
        loss = F.mse_loss(model(features), targets)
        loss.backward()
        optimizer.step()
        use_lists(world.state, loss)
        use_draws(world.state, loss)
        return loss, CLOCKS[clock]()

    compiled = wholestep.compile(step)
    assert_as_before(world, lambda: compiled(world.model, world.optimizer, X, Y))


def test_nothing_was_said(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    """The user runs the step again, eagerly perhaps: it speaks then."""

    def say(state: Any, loss: Tensor) -> None:
        print("one step")
        logging.getLogger("world").warning("one step")

    world = build()
    compiled = wholestep.compile(make(world, say))
    with pytest.raises(CaptureError):
        compiled(world.model, world.optimizer, X, Y)
    assert capsys.readouterr().out == ""
    assert [record for record in caplog.records if record.name == "world"] == []


def test_an_error_of_the_users_own_while_capturing() -> None:
    """The step itself raises: as in eager, with what it has done before."""

    def train(world: World) -> Callable[..., Tensor]:
        def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(features), targets)
            loss.backward()
            world.state.history.append(random.random())
            optimizer.step()
            raise KeyError("the user's own")

        return step

    torch.manual_seed(0)
    worlds = [build()]
    torch.manual_seed(0)
    worlds.append(build())
    for world, function in zip(worlds, (train(worlds[0]), wholestep.compile(train(worlds[1]))), strict=True):
        random.seed(3)
        with pytest.raises(KeyError, match="the user's own"):
            function(world.model, world.optimizer, X, Y)
    assert worlds[0].state.history == worlds[1].state.history
    ours, theirs = (list(world.model.parameters()) for world in worlds)
    assert all(map(torch.equal, ours, theirs))
