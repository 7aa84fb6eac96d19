"""What a step writes in Python is written at every call, with that call's values (S3, S4, S5)."""

import collections
import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.twins import Twins, World, mse_step, pair, small_world
from torch import Tensor, nn
from torch.optim import Optimizer

X, Y = pair()
OTHER_X, OTHER_Y = pair(seed=1)
Write = Callable[[Any, Tensor, int], Any]


def writing(write: Write) -> Callable[[World], Callable[..., Tensor]]:
    """A step that hands the world's `state`, its loss and the size of its batch to a function when it is done."""

    def make(world: World) -> Callable[..., Tensor]:
        state = world.state

        def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
            loss = mse_step(model, optimizer, features, targets)
            write(state, loss, features.shape[0])
            return loss

        return step

    return make


def world_with(state: Callable[[], Any]) -> Callable[[], World]:
    def build() -> World:
        world = small_world()()
        world.state = state()
        return world

    return build


def namespace(**values: Any) -> Callable[[], SimpleNamespace]:
    """Makes a namespace; a callable value is called for each."""
    return lambda: SimpleNamespace(**{key: value() if callable(value) else value for key, value in values.items()})


class Slots:
    __slots__ = ("loss", "n")

    def __init__(self) -> None:
        self.n = 0


class Watched:
    """Counts how often its value was set."""

    def __init__(self) -> None:
        self._value, self.writes = None, 0

    @property
    def value(self) -> Any:
        return self._value

    @value.setter
    def value(self, value: Any) -> None:
        self._value = value
        self.writes += 1


@dataclasses.dataclass
class Report:
    loss: Any
    size: int


class Meter:
    def __init__(self) -> None:
        self.val: Any = 0
        self.sum: Any = 0
        self.count = 0
        self.avg: Any = 0

    def update(self, val: Any, n: int) -> None:
        self.val = val
        self.sum = self.sum + val * n
        self.count += n
        self.avg = self.sum / self.count


def count_and_log(state: Any, loss: Tensor, size: int) -> None:
    state.n += 1
    state.log.append((state.n, loss.detach(), "step"))


def keep_twice(state: Any, loss: Tensor, size: int) -> None:
    kept = [loss.detach()]
    state.first, state.second = kept, kept


def swap(state: Any, loss: Tensor, size: int) -> None:
    state.a, state.b = state.b, state.a
    state.a.append(size)


def write_and_delete(state: dict[str, Any], loss: Tensor, size: int) -> None:
    state["temporary"] = loss
    state["kept"] = state.pop("temporary") * 2
    del state["old"]
    state["old"] = size


def write_then_read(state: Any, loss: Tensor, size: int) -> None:
    state.loss = loss.detach()
    state.double = state.loss * 2
    state.history.append(state.double)
    state.history[-1] = state.history[-1] + 1


def at_most_two(state: list[Any], loss: Tensor, size: int) -> None:
    state.insert(0, loss.detach())
    if len(state) > 2:
        state.pop()


WRITES: dict[str, tuple[Callable[[], Any], Write]] = {
    "an attribute": (namespace(loss=None), lambda s, loss, n: setattr(s, "loss", loss.detach())),
    "a new attribute": (namespace(), lambda s, loss, n: setattr(s, "fresh", loss.detach())),
    "an attribute with history": (namespace(loss=None), lambda s, loss, n: setattr(s, "loss", loss)),
    "a slot": (Slots, lambda s, loss, n: (setattr(s, "loss", loss.detach()), setattr(s, "n", s.n + 1))),
    "a property": (Watched, lambda s, loss, n: setattr(s, "value", loss.detach())),
    "a dataclass": (lambda: Report(None, 0), lambda s, loss, n: vars(s).update(loss=loss.detach(), size=n)),
    "a dataclass made anew": (
        namespace(report=None),
        lambda s, loss, n: setattr(s, "report", Report(loss.detach(), n)),
    ),
    "a number": (namespace(size=0), lambda s, loss, n: setattr(s, "size", n)),
    "a counter": (namespace(n=0), lambda s, loss, n: setattr(s, "n", s.n + 1)),
    "a counter in a dict": (dict, lambda s, loss, n: s.update(n=s.get("n", 0) + n)),
    "a counter in an array": (lambda: np.zeros(3), lambda s, loss, n: s.__setitem__(0, s[0] + n)),
    "a Counter": (collections.Counter, lambda s, loss, n: s.update([f"size {n}"])),
    "a list": (list, lambda s, loss, n: s.append(loss.detach())),
    "a list extended": (list, lambda s, loss, n: s.extend([loss.detach(), n])),
    "a list of tuples": (list, lambda s, loss, n: s.append((n, loss.detach(), {"loss": loss.detach()}))),
    "a list in a slice": (lambda: [0, 0, 0], lambda s, loss, n: s.__setitem__(slice(0, 2), [loss.detach(), n])),
    "a list of at most two": (list, at_most_two),
    "a list cleared": (list, lambda s, loss, n: (s.clear(), s.append(loss.detach()))),
    "a deque": (collections.deque, lambda s, loss, n: s.append(loss.detach())),
    "a short deque": (lambda: collections.deque(maxlen=2), lambda s, loss, n: s.appendleft(loss.detach())),
    "a defaultdict": (lambda: collections.defaultdict(list), lambda s, loss, n: s["loss"].append(loss.detach())),
    "a dict": (dict, lambda s, loss, n: s.__setitem__("loss", loss.detach())),
    "a dict updated": (dict, lambda s, loss, n: s.update(loss=loss.detach(), size=n)),
    "a dict's default": (dict, lambda s, loss, n: s.setdefault("first", loss.detach())),
    "a dict with deletion": (lambda: {"old": 1, "b": 2}, write_and_delete),
    "a set": (set, lambda s, loss, n: s.add(n)),
    "a meter": (Meter, lambda s, loss, n: s.update(loss.detach(), n)),
    "a count and a log": (namespace(n=0, log=list), count_and_log),
    "one list in two places": (namespace(), keep_twice),
    "swapped lists": (namespace(a=list, b=list), swap),
    "a value written, then read": (namespace(history=list), write_then_read),
    "a tensor in place": (lambda: torch.zeros(()), lambda s, loss, n: s.add_(loss.detach())),
    "a sum that is replaced": (namespace(sum=0.0), lambda s, loss, n: setattr(s, "sum", s.sum + loss.detach())),
}


@pytest.mark.sample(17)
@pytest.mark.parametrize("kind", WRITES)
def test_a_write(kind: str) -> None:
    state, write = WRITES[kind]
    twins = Twins(world_with(state), make=writing(write))
    for batch in ((X, Y), (OTHER_X, OTHER_Y), (X, Y), (OTHER_X, OTHER_Y), (X, Y)):
        twins.step(*batch)
    # The content of an array is taken as a whole.
    assert twins.num_captures <= (5 if "array" in kind else 3)


def test_what_is_stored_is_what_is_returned() -> None:
    twins = Twins(world_with(namespace(loss=None)), make=writing(lambda s, loss, n: setattr(s, "loss", loss)))
    for _ in range(3):
        returned = twins.step(X, Y)
        assert twins.worlds[1].state.loss is returned


def test_a_count_goes_on_after_the_user_sets_it_back() -> None:
    twins = Twins(world_with(namespace(n=0)), make=writing(lambda s, loss, n: setattr(s, "n", s.n + 1)))
    twins.steps(3, X, Y)
    twins.change(lambda world: setattr(world.state, "n", 100))
    twins.steps(3, X, Y)
    assert twins.worlds[1].state.n == 103
    assert twins.num_captures <= 3


def test_counts_in_a_closure_and_in_a_global() -> None:
    def make(world: World) -> Callable[..., Tensor]:
        calls = 0
        module: dict[str, Any] = {"__name__": "world_counts", "CALLS": 0}
        exec("def count():\n    global CALLS\n    CALLS += 1\n    return CALLS", module)
        world.globals = SimpleNamespace(read=lambda: module["CALLS"])
        world.calls = lambda: calls

        def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Any:
            nonlocal calls
            calls += 1
            return mse_step(model, optimizer, features, targets), calls, module["count"]()

        return step

    twins = Twins(small_world(), make=make)
    for number in range(1, 6):
        assert twins.step(X, Y)[1:] == (number, number)
        assert twins.worlds[1].calls() == twins.worlds[1].globals.read() == number
    assert twins.num_captures <= 3


def test_the_previous_loss() -> None:
    """What one step stores, the next one reads."""

    def make(world: World) -> Callable[..., Tensor]:
        state = world.state

        def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(features), targets)
            if state.previous is not None:
                loss = loss + (loss - state.previous).abs()
            state.previous = loss.detach()
            loss.backward()
            optimizer.step()
            return loss

        return step

    twins = Twins(world_with(namespace(previous=None)), make=make)
    twins.steps(5, X, Y)
    assert twins.num_captures <= 3


def test_a_running_mean_object() -> None:
    class Mean:
        def __init__(self) -> None:
            self.value = torch.zeros(())
            self.n = 0

        def add(self, new: Tensor) -> Tensor:
            self.n += 1
            self.value = self.value + (new - self.value) / self.n
            return self.value

    def make(world: World) -> Callable[..., Tensor]:
        mean = world.state

        def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Any:
            loss = mse_step(model, optimizer, features, targets)
            return loss, mean.add(loss.detach())

        return step

    twins = Twins(world_with(Mean), make=make)
    twins.steps(6, X, Y)
    assert twins.num_captures <= 3


# Hooks


def hooked(register: Callable[[nn.Module, Any], Any], kept: Callable[[], Any]) -> Callable[[], World]:
    def build() -> World:
        world = small_world()()
        world.kept = kept()
        register(world.model, world.kept)
        return world

    return build


HOOKS: dict[str, tuple[Callable[[], Any], Callable[[Any, Any], Any]]] = {
    "a forward hook and a dict": (
        dict,
        lambda m, d: m.first.register_forward_hook(lambda mod, args, out: d.update(mean=out.detach().mean())),
    ),
    "a forward hook and a list": (
        list,
        lambda m, d: m.first.register_forward_hook(lambda mod, args, out: d.append(out.detach().mean())),
    ),
    "a forward hook that counts": (
        lambda: collections.Counter(),
        lambda m, d: m.second.register_forward_hook(lambda mod, args, out: d.update(["calls"])),
    ),
    "a forward pre-hook": (
        list,
        lambda m, d: m.first.register_forward_pre_hook(lambda mod, args: d.append(args[0].mean())),
    ),
    "a gradient hook": (list, lambda m, d: m.first.weight.register_hook(lambda grad: d.append(grad.norm()))),
    "a full backward hook": (
        list,
        lambda m, d: m.second.register_full_backward_hook(lambda mod, grads, outs: d.append(outs[0].norm())),
    ),
    "a hook after accumulation": (
        list,
        lambda m, d: m.first.weight.register_post_accumulate_grad_hook(lambda p: d.append(p.grad.norm())),
    ),
}


@pytest.mark.parametrize("kind", HOOKS)
def test_a_hook(kind: str) -> None:
    kept, register = HOOKS[kind]
    twins = Twins(hooked(register, kept), mse_step)
    for batch in ((X, Y), (OTHER_X, OTHER_Y), (X, Y)):
        twins.step(*batch)
    assert twins.num_captures <= 3


# Averages of weights that count


class Ema:
    """The average of the weights, with a decay that warms up."""

    def __init__(self, parameters: Any) -> None:
        self.shadow = [parameter.clone().detach() for parameter in parameters]
        self.n = 0

    def _update(self, parameters: Any) -> None:
        self.n += 1
        decay = min(0.99, (1 + self.n) / (10 + self.n))
        for kept, parameter in zip(self.shadow, parameters):
            kept.sub_((1 - decay) * (kept - parameter))

    @torch.no_grad()
    def decorated(self, parameters: Any) -> None:
        self._update(parameters)

    @torch.no_grad()
    def direct(self, parameters: Any) -> None:
        self.n += 1
        decay = min(0.99, (1 + self.n) / (10 + self.n))
        for kept, parameter in zip(self.shadow, parameters):
            kept.sub_((1 - decay) * (kept - parameter))

    def context(self, parameters: Any) -> None:
        with torch.no_grad():
            self._update(parameters)


def with_ema() -> World:
    world = small_world()()
    world.ema = Ema(world.model.parameters())
    return world


@pytest.mark.parametrize("where", ["argument", "closure"])
@pytest.mark.parametrize("method", ["direct", "decorated", "context"])
def test_an_average_that_counts(method: str, where: str) -> None:
    def make(world: World) -> Callable[..., Tensor]:
        own = world.ema

        def step(model: nn.Module, optimizer: Optimizer, ema: Ema | None, features: Tensor, targets: Tensor) -> Tensor:
            loss = mse_step(model, optimizer, features, targets)
            getattr(ema or own, method)(model.parameters())
            return loss

        return step

    def call(world: World, step: Callable[..., Any], *batch: Tensor) -> Any:
        return step(world.model, world.optimizer, world.ema if where == "argument" else None, *batch)

    twins = Twins(with_ema, make=make, call=call)
    twins.steps(6, X, Y)
    assert twins.num_captures <= 3


# Trainers that keep their loss


class Trainer:
    def __init__(self) -> None:
        world = small_world()()
        self.model, self.optimizer, self.loss = world.model, world.optimizer, None

    def step(self, features: Tensor, targets: Tensor) -> None:
        self.loss = F.mse_loss(self.model(features), targets)
        self.model.zero_grad(set_to_none=True)
        self.loss.backward()
        self.optimizer.step()


def in_closure(world: World) -> Callable[..., None]:
    trainer = world.trainer
    return lambda features, targets: trainer.step(features, targets)


TRAINERS: dict[str, Callable[[World], Callable[..., None]]] = {
    "bound method": lambda world: world.trainer.step,
    "closure": in_closure,
    "argument": lambda world: lambda trainer, *batch: trainer.step(*batch),
}


@pytest.mark.parametrize("has_loss", [True, False])
@pytest.mark.parametrize("kind", TRAINERS)
def test_a_trainer_that_keeps_its_loss(kind: str, has_loss: bool) -> None:
    def build() -> World:
        world = World(trainer=Trainer())
        if not has_loss:
            del world.trainer.loss
        return world

    def call(world: World, step: Callable[..., Any], *batch: Tensor) -> Any:
        return step(*([world.trainer] if kind == "argument" else []), *batch)

    twins = Twins(build, make=TRAINERS[kind], call=call)
    for batch in ((X, Y), (OTHER_X, OTHER_Y), (X, Y)):
        twins.step(*batch)
        twins.change(lambda world: world.trainer.loss.item())
    assert twins.num_captures <= 2
