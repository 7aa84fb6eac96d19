"""What a step reads from Python is read at every call: any place, any spelling, at any depth (S2)."""

import argparse
import dataclasses
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.twins import Twins, World, mse_step, pair, small_world
from tests.world_holders import HOLDERS, NUMERIC_READERS, READERS, Holder
from tests.world_pieces import Piece
from tests.worlds import FORMS, OPTIMIZERS, Outcome, program, run
from torch import Tensor, nn
from torch.optim import Optimizer

import wholestep
from wholestep import _recording_torch

X, Y = pair()
VALUES = ("0.5", "1.5", "1.5", "0.75", "2.0")
KINDS = {"object": "nested namespace", "dataclass": "dataclass", "dict": "dict", "array": "array in an attribute"}
"""A holder of each kind whose spellings are all tried by default."""


def scaled_by(holder: Holder, reader: str, values: tuple[str, ...] = VALUES, form: str = "function") -> Outcome:
    """Run a step that scales its loss by a value that changes between calls; raises where it is not eager's."""
    read = reader.replace("OWNER", holder.owner).replace("AT", holder.at)
    place = holder.piece.replaced("VALUE", values[0])
    piece = Piece(lib=place.lib, defs=place.defs, argument=place.argument, loss=f"loss = loss * {read}").numbered(1)
    changes = [holder.piece.replaced("VALUE", value).numbered(1).changes for value in values[1:]]
    calls = [("", 2), *((alternatives[at % len(alternatives)], 2) for at, alternatives in enumerate(changes))]
    return run(program([piece], calls, OPTIMIZERS[0], form), wholestep.compile)


def spellings(kind: str) -> list[str]:
    return list(dict.fromkeys([*READERS[kind], *NUMERIC_READERS.get(kind, ())]))


# Where no symbol can stand in for the number, each value is a capture: arrays, other functions, C objects.
ONE_BY_ONE = ("lambda", "partial", "array", "array in an attribute", "argument array", "NumPy scalar", "lru_cache")


@pytest.mark.sample(20)
@pytest.mark.parametrize("name", HOLDERS)
def test_a_number_in_any_place(name: str) -> None:
    outcome = scaled_by(HOLDERS[name], READERS[HOLDERS[name].kind][0])
    assert not outcome.refused
    # One more where an attribute of the class is hidden by one of the instance.
    assert outcome.captures <= (5 if name in ONE_BY_ONE else 4 if name == "class attribute of an instance" else 3)


NEW_SPELLINGS = {reader: kind for kind in reversed(KINDS) for reader in spellings(kind)}


@pytest.mark.sample(20)
@pytest.mark.parametrize(("reader", "kind"), NEW_SPELLINGS.items())
def test_a_number_in_any_spelling(reader: str, kind: str) -> None:
    """Among them those without a frame of their own: `attrgetter`, `map`, `dict.items`, `asdict`, NumPy sums."""
    outcome = scaled_by(HOLDERS[KINDS[kind]], reader, VALUES[:3])
    assert not outcome.refused
    assert outcome.captures <= 2


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", HOLDERS)
def test_every_place_in_every_spelling(name: str, form: str) -> None:
    for reader in spellings(HOLDERS[name].kind):
        assert not scaled_by(HOLDERS[name], reader, form=form).refused


class Criterion:
    """A loss with annealed weights, as an object of its own."""

    def __init__(self) -> None:
        self.beta = 1.0
        self.settings = SimpleNamespace(beta=1.0)
        self.weights = [1.0]
        self.table = {"beta": 1.0}

    def __call__(self, loss: Tensor) -> Tensor:
        return loss * self.beta

    def direct(self, loss: Tensor) -> Tensor:
        return loss * self.beta

    def nested(self, loss: Tensor) -> Tensor:
        return loss * self.settings.beta

    def in_list(self, loss: Tensor) -> Tensor:
        return loss * self.weights[0]

    def in_dict(self, loss: Tensor) -> Tensor:
        return loss * self.table["beta"]

    def set(self, value: float) -> None:
        self.beta = self.settings.beta = self.weights[0] = self.table["beta"] = value


METHODS = ("__call__", "direct", "nested", "in_list", "in_dict")


def with_criterion() -> World:
    world = small_world()()
    world.criterion = Criterion()
    return world


def weighted_step(scale: Callable[[Tensor], Tensor], world_model: nn.Module, optimizer: Optimizer) -> Tensor:
    optimizer.zero_grad()
    loss = scale((world_model(X) - Y).square().mean())
    loss.backward()
    optimizer.step()
    return loss


def anneal(twins: Twins, change: Callable[[World, float], None], *args: Any) -> None:
    """Five steps with other values; a number that changes costs one more capture."""
    for value in (1.0, 2.0, 0.5, 3.0, 0.25):
        twins.change(lambda world, value=value: change(world, value))
        twins.step(*args)
    assert twins.num_captures <= 3


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("where", ["closure", "argument"])
def test_a_criterion(method: str, where: str) -> None:
    def in_closure(world: World) -> Callable[..., Tensor]:
        criterion = world.criterion
        return lambda model, optimizer: weighted_step(getattr(criterion, method), model, optimizer)

    def as_argument(world: World) -> Callable[..., Tensor]:
        def step(model: nn.Module, optimizer: Optimizer, criterion: Criterion) -> Tensor:
            return weighted_step(getattr(criterion, method), model, optimizer)

        return step

    def call(world: World, step: Callable[..., Any]) -> Any:
        return step(world.model, world.optimizer, *([world.criterion] if where == "argument" else []))

    twins = Twins(with_criterion, make=in_closure if where == "closure" else as_argument, call=call)
    anneal(twins, lambda world, value: world.criterion.set(value))


class Trainer:
    """Everything in attributes, as trainers have it."""

    def __init__(self) -> None:
        world = with_criterion()
        self.model, self.optimizer, self.criterion = world.model, world.optimizer, world.criterion
        self.beta = 1.0
        self.settings = SimpleNamespace(beta=1.0, loss=SimpleNamespace(beta=1.0))

    def own(self) -> Tensor:
        return weighted_step(lambda loss: loss * self.beta, self.model, self.optimizer)

    def nested(self) -> Tensor:
        return weighted_step(lambda loss: loss * self.settings.beta, self.model, self.optimizer)

    def deep(self) -> Tensor:
        return weighted_step(lambda loss: loss * self.settings.loss.beta, self.model, self.optimizer)

    def through_criterion(self) -> Tensor:
        return weighted_step(self.criterion.direct, self.model, self.optimizer)

    def set(self, value: float) -> None:
        self.beta = self.settings.beta = self.settings.loss.beta = self.criterion.beta = value


@pytest.mark.parametrize("method", ["own", "nested", "deep", "through_criterion"])
def test_a_trainer(method: str) -> None:
    twins = Twins(
        lambda: World(trainer=Trainer()),
        make=lambda world: getattr(world.trainer, method),
        call=lambda world, step: step(),
    )
    anneal(twins, lambda world, value: world.trainer.set(value))


@dataclasses.dataclass
class Options:
    beta: float = 1.0


MADE_ANEW: dict[str, Callable[[float], Any]] = {
    "SimpleNamespace": lambda value: SimpleNamespace(beta=value),
    "argparse.Namespace": lambda value: argparse.Namespace(beta=value),
    "dataclass": Options,
    "in a dict": lambda value: {"options": Options(value)},
    "in a list": lambda value: [Options(value)],
}


def step_with_options(model: nn.Module, optimizer: Optimizer, options: Any) -> Tensor:
    options = options["options"] if isinstance(options, dict) else options
    options = options[0] if isinstance(options, list) else options
    return weighted_step(lambda loss: loss * options.beta, model, optimizer)


@pytest.mark.parametrize("kind", MADE_ANEW)
def test_an_argument_made_anew_for_each_call(kind: str) -> None:
    twins = Twins(small_world(), step_with_options)
    for _ in range(3):
        twins.step(MADE_ANEW[kind](1.0))
    assert twins.num_captures == 1  # equal values are the same step, whoever holds them
    for value in (2.0, 0.5, 3.0):
        twins.step(MADE_ANEW[kind](value))
    assert twins.num_captures <= 3


def test_an_object_born_in_the_call_is_not_a_guard() -> None:
    def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
        local = SimpleNamespace(seen=[], scale=2.0)
        local.seen.append(features.shape[0])
        return mse_step(model, optimizer, features, targets * local.scale + len(local.seen))

    twins = Twins(small_world(), step)
    twins.steps(4, X, Y)
    assert twins.num_captures == 1


def read_world(read: Callable[[Any, Tensor], Tensor]) -> Callable[[World], Callable[..., Tensor]]:
    """A step that hands the world's `state` and its loss to a function."""

    def make(world: World) -> Callable[..., Tensor]:
        state = world.state
        return lambda model, optimizer: weighted_step(lambda loss: read(state, loss), model, optimizer)

    return make


def with_state(**attributes: Any) -> Callable[[], World]:
    def build() -> World:
        world = small_world()()
        world.state = SimpleNamespace(**{name: make() for name, make in attributes.items()})
        return world

    return build


def call_with_model(world: World, step: Callable[..., Any]) -> Any:
    return step(world.model, world.optimizer)


def put(**values: Any) -> Callable[[Any], None]:
    return lambda state: vars(state).update(values)


# What is kept at first, how the step reads it, and how it changes.
CONTAINERS: dict[str, tuple[Callable[[], Any], Callable[[Any, Tensor], Any], Callable[[Any], Any]]] = {
    "length of a list": (list, lambda s, loss: loss * (1 + len(s.kept)), lambda s: s.kept.append(1.0)),
    "truth of a list": (list, lambda s, loss: loss * 2 if s.kept else loss, lambda s: s.kept.append(1.0)),
    "sum of a list": (list, lambda s, loss: loss * (1 + sum(s.kept)), lambda s: s.kept.append(0.5)),
    "loop over a list": (lambda: [1.0], lambda s, loss: sum(loss * w for w in s.kept), lambda s: s.kept.append(0.5)),
    "member of a set": (set, lambda s, loss: loss * 2 if "x" in s.kept else loss, lambda s: s.kept.add("x")),
    "key of a dict": (dict, lambda s, loss: loss * s.kept.get("w", 3.0), lambda s: s.kept.update(w=2.0)),
    "values of a dict": (dict, lambda s, loss: loss * (1 + sum(s.kept.values())), lambda s: s.kept.update(w=2)),
    "order of a dict": (
        lambda: {"a": 2.0, "b": 3.0},
        lambda s, loss: loss * next(iter(s.kept.values())),
        put(kept={"b": 3.0, "a": 2.0}),
    ),
    "None": (lambda: None, lambda s, loss: loss if s.kept is None else loss * s.kept, put(kept=2.0)),
    "a flag": (lambda: False, lambda s, loss: loss * 2 if s.kept else loss, put(kept=True)),
    "a type": (lambda: 1, lambda s, loss: loss * (2 if isinstance(s.kept, int) else 3), put(kept=1.0)),
    "hasattr": (int, lambda s, loss: loss * 2 if hasattr(s, "extra") else loss, put(extra=1)),
    "a function": (lambda: torch.tanh, lambda s, loss: s.kept(loss), put(kept=torch.sigmoid)),
    "a tensor's shape": (lambda: torch.ones(2), lambda s, loss: loss * s.kept.shape[0], put(kept=torch.ones(3))),
    "a tensor": (lambda: torch.ones(()), lambda s, loss: loss * s.kept, put(kept=torch.full((), 2.0))),
    "a tensor in a list": (lambda: [torch.ones(())], lambda s, loss: loss * s.kept[0], put(kept=[torch.full((), 2.0)])),
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_what_is_not_a_number(kind: str) -> None:
    start, read, change = CONTAINERS[kind]
    twins = Twins(with_state(kept=start), make=read_world(read), call=call_with_model)
    twins.steps(2)
    assert twins.num_captures == 1
    twins.change(lambda world: change(world.state))
    twins.steps(2)
    assert twins.num_captures <= 2


def test_a_word_that_alternates_is_two_captures() -> None:
    def read(state: Any, loss: Tensor) -> Tensor:
        return loss * 2 if state.mode == "warmup" else loss.square()

    twins = Twins(with_state(mode=lambda: "warmup"), make=read_world(read), call=call_with_model)
    for number in range(8):
        twins.change(lambda world, number=number: setattr(world.state, "mode", ("warmup", "train")[number % 2]))
        twins.step()
    assert twins.num_captures <= 2


def test_a_branch_on_a_number_is_a_capture_for_each_side() -> None:
    def read(state: Any, loss: Tensor) -> Tensor:
        return loss * 2 if state.epoch < 10 else loss.square()

    twins = Twins(with_state(epoch=lambda: 0), make=read_world(read), call=call_with_model)
    for epoch in range(20):
        twins.change(lambda world, epoch=epoch: setattr(world.state, "epoch", epoch))
        twins.step()
    # The first value is captured as a constant; then one for each side of the branch.
    assert twins.num_captures <= 3


def test_an_array_changed_in_place() -> None:
    def read(state: Any, loss: Tensor) -> Tensor:
        return loss * torch.from_numpy(state.weights).sum() + float(state.weights.max())

    twins = Twins(with_state(weights=lambda: np.ones(3)), make=read_world(read), call=call_with_model)
    twins.step()
    for value in (2.0, 3.0):
        twins.change(lambda world, value=value: world.state.weights.fill(value))
        twins.step()


def test_an_array_of_a_closure_changed_in_place() -> None:
    def make(world: World) -> Callable[..., Tensor]:
        weights = world.state.weights

        def step(model: nn.Module, optimizer: Optimizer) -> Tensor:
            return mse_step(model, optimizer, X, Y) * float(weights[0])

        return step

    twins = Twins(with_state(weights=lambda: np.ones(3)), make=make, call=call_with_model)
    twins.steps(3)
    twins.change(lambda world: world.state.weights.fill(2.0))
    twins.steps(3)


class Doubling:
    factor = 2.0


class Tripling:
    factor = 3.0


def test_an_object_of_another_class() -> None:
    def read(state: Any, loss: Tensor) -> Tensor:
        return loss * state.kept.factor

    twins = Twins(with_state(kept=Doubling), make=read_world(read), call=call_with_model)
    twins.steps(2)
    for cls in (Tripling, Doubling):
        twins.change(lambda world, cls=cls: setattr(world.state.kept, "__class__", cls))
        twins.steps(2)
    assert twins.num_captures == 2


class Meter:
    def __init__(self) -> None:
        self.count = 0

    def update(self) -> None:
        self.count += 1


def count_both(state: Any, loss: Tensor) -> Tensor:
    state.first.update()
    state.second.update()
    return loss


def fill_one(state: Any, loss: Tensor) -> Tensor:
    state.first.append(1.0)
    return loss * (1 + len(state.second))


def write_array(state: Any, loss: Tensor) -> Tensor:
    state.first[0] = 5.0
    return loss * float(state.second[0])


def write_tensor(state: Any, loss: Tensor) -> Tensor:
    state.first.add_(1.0)
    return loss * state.second.sum()


MERGED: dict[str, tuple[Callable[[], Any], Callable[[Any, Tensor], Tensor]]] = {
    "objects": (Meter, count_both),
    "lists": (list, fill_one),
    "arrays": (lambda: np.ones(2), write_array),
    "tensors": (lambda: torch.ones(2), write_tensor),
}


@pytest.mark.parametrize("kind", MERGED)
def test_two_objects_that_become_one_and_two_again(kind: str) -> None:
    make, read = MERGED[kind]

    def merge(world: World) -> None:
        world.state.first = world.state.second = make()

    twins = Twins(with_state(first=make, second=make), make=read_world(read), call=call_with_model)
    twins.steps(2)
    twins.change(merge)
    twins.steps(2)
    twins.change(lambda world: setattr(world.state, "second", make()))
    twins.steps(2)


TENSORS: dict[str, Callable[[Tensor], Any]] = {
    "other data": lambda kept: setattr(kept, "data", torch.ones(5)),
    "another dtype": lambda kept: setattr(kept, "data", torch.ones(2, dtype=torch.float64)),
    "resized": lambda kept: kept.resize_(4).fill_(2.0),
}


@pytest.mark.parametrize("kind", TENSORS)
def test_a_tensor_changed_in_place(kind: str) -> None:
    def read(state: Any, loss: Tensor) -> Tensor:
        return loss * state.kept.mean() + state.kept.numel()

    twins = Twins(with_state(kept=lambda: torch.ones(2)), make=read_world(read), call=call_with_model)
    twins.steps(2)
    twins.change(lambda world: TENSORS[kind](world.state.kept))
    twins.steps(2)
    assert twins.num_captures == 2


def test_a_tensor_that_is_to_be_trained_from_now_on() -> None:
    def read(state: Any, loss: Tensor) -> Tensor:
        return loss * state.kept.sum()

    twins = Twins(with_state(kept=lambda: torch.ones(2)), make=read_world(read), call=call_with_model)
    twins.steps(2)
    twins.change(lambda world: world.state.kept.requires_grad_(True))
    with pytest.raises(wholestep.CaptureError, match="trainable tensor"):
        twins.step()


class Applied:
    """Called by an operator of its class."""

    def __call__(self, loss: Tensor) -> Tensor:
        return loss * 2

    def one(self, loss: Tensor) -> Tensor:
        return loss * 3

    def other(self, loss: Tensor) -> Tensor:
        return loss * 5


def test_a_method_that_python_calls_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    twins = Twins(with_state(kept=Applied), make=read_world(lambda state, loss: state.kept(loss)), call=call_with_model)
    twins.steps(2)
    monkeypatch.setattr(Applied, "__call__", Applied.other)
    twins.steps(2)


def test_another_method_of_the_same_object() -> None:
    def build() -> World:
        world = with_state(owner=Applied)()
        world.state.kept = world.state.owner.one
        return world

    twins = Twins(build, make=read_world(lambda state, loss: state.kept(loss)), call=call_with_model)
    twins.steps(2)
    twins.change(lambda world: setattr(world.state, "kept", world.state.owner.other))
    twins.steps(2)


# Quiet calls


def counted_builds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many checks of reads for quiet calls are made from here on, one entry each."""
    made: list[int] = []
    original = _recording_torch.unwritten

    def unwritten(dicts: list[Any], objects: Iterable[Any]) -> Any:
        made.append(len(dicts))
        return original(dicts, objects)

    monkeypatch.setattr(_recording_torch, "unwritten", unwritten)
    return made


@pytest.mark.parametrize("quiet_calls", [1, 3])
def test_changes_after_many_quiet_calls(quiet_calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_recording_torch, "QUIET_CALLS", quiet_calls)
    made = counted_builds(monkeypatch)
    config = SimpleNamespace(scale=1.0, table={"a": [1.0, 2.0]}, mode="sum")

    def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
        factor = config.scale * config.table["a"][1] * (2.0 if config.mode == "sum" else 3.0)
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(features), targets) * factor
        loss.backward()
        optimizer.step()
        return loss

    def change_scale(_: World) -> None:
        config.scale = 0.5

    def change_item(_: World) -> None:
        config.table["a"][1] = 4.0

    def change_mode(_: World) -> None:
        config.mode = "mean"

    def freeze(world: World) -> None:
        world.model.first.weight.requires_grad_(False)

    twins = Twins(small_world(), step)
    for change in (change_scale, change_item, change_mode, freeze):
        twins.steps(6, X, Y)
        twins.change(change)
        twins.steps(6, X, Y)
    assert made


def test_a_step_that_writes_at_each_call_makes_no_checks_for_quiet_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_recording_torch, "QUIET_CALLS", 3)
    made = counted_builds(monkeypatch)

    def counted(state: Any, loss: Tensor) -> Tensor:
        state.calls += 1
        return loss * state.scale

    twins = Twins(with_state(calls=int, scale=lambda: 2.0), make=read_world(counted))
    twins.steps(4)
    del made[:]
    twins.steps(20)
    assert len(made) <= 2


class Doubled:
    """Says by how much a loss counts; another class of the same layout says otherwise."""

    def __init__(self) -> None:
        self.extra = 0.0

    def factor(self) -> float:
        return 2.0 + self.extra


class Halved(Doubled):
    def factor(self) -> float:
        return 0.5 + self.extra


def change_class(one: Any) -> None:
    one.__class__ = Halved


def change_namespace(one: Any) -> None:
    one.__dict__ = {"extra": 3.0}


def change_namespace_and_write(one: Any) -> None:
    one.__dict__ = dict(vars(one))
    one.extra = 4.0


@pytest.mark.parametrize("change", [change_class, change_namespace, change_namespace_and_write])
def test_objects_after_quiet_calls(change: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch) -> None:
    made = counted_builds(monkeypatch)
    twins = Twins(with_state(kept=Doubled), make=read_world(lambda state, loss: loss * state.kept.factor()))
    twins.steps(6)
    assert made
    twins.change(lambda world: change(world.state.kept))
    twins.steps(2)
    assert twins.num_captures == 2


WRITES: dict[str, Callable[[dict[str, Any]], object]] = {
    "set": lambda one: one.__setitem__("a", 2),
    "add": lambda one: one.__setitem__("b", 2),
    "remove": lambda one: one.pop("a"),
    "clear": lambda one: one.clear(),
    "update": lambda one: one.update(a=2),
}


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="versions are asked for one by one there")
@pytest.mark.parametrize("make", [dict, OrderedDict, partial(defaultdict, dict)])
@pytest.mark.parametrize("num_asked", [0, 1, 3])
@pytest.mark.parametrize("name", WRITES)
def test_one_written_dict_of_many_is_noticed(name: str, num_asked: int, make: Callable[..., dict[str, Any]]) -> None:
    dicts = [make(a=1) for _ in range(5)]
    unwritten = _recording_torch.unwritten(dicts)
    assert unwritten is not None
    assert all(unwritten() for _ in range(num_asked))
    WRITES[name](dicts[3])
    assert not unwritten()
    assert not unwritten()


@pytest.mark.parametrize("has_scheduler", [False, True])
def test_a_step_leaves_the_namespace_of_its_optimizer_unwritten(has_scheduler: bool) -> None:
    world = small_world()()
    scheduler = torch.optim.lr_scheduler.StepLR(world.optimizer, 1) if has_scheduler else None
    step = wholestep.compile(mse_step)
    for _ in range(20):  # Python may leave out a write of what is there already, but not once it has sped it up
        step(world.model, world.optimizer, X, Y)
    before = _recording_torch.dict_version(vars(world.optimizer))
    step(world.model, world.optimizer, X, Y)
    assert _recording_torch.dict_version(vars(world.optimizer)) == before
    assert getattr(world.optimizer, "_opt_called", False) is has_scheduler
    if scheduler is not None:
        scheduler.step()  # would warn, which is an error here


# Classes of torch that a step names


def _asks(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
    assert isinstance(optimizer, Optimizer)
    assert isinstance(model, nn.Module)
    return mse_step(model, optimizer, features, targets)


def _calls_by_class(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
    Optimizer.zero_grad(optimizer)
    loss = torch.nn.functional.mse_loss(nn.Module.__call__(model, features), targets)
    loss.backward()
    optimizer.step()
    return loss


def _annotates(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
    def clear(given: Optimizer) -> None:
        given.zero_grad()

    clear(optimizer)
    return mse_step(model, optimizer, features, targets)


@pytest.mark.parametrize("step", [_asks, _calls_by_class, _annotates])
def test_classes_of_torch_by_name(step: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    twins = Twins(small_world(), step)
    twins.steps(4, X, Y)
    assert twins.num_captures == 1
    cleared: list[int] = []
    original = Optimizer.zero_grad

    def zero_grad(self: Optimizer, set_to_none: bool = True) -> None:
        cleared.append(1)
        original(self, set_to_none)

    monkeypatch.setattr(Optimizer, "zero_grad", zero_grad)
    twins.steps(2, X, Y)
    assert twins.num_captures == 2
