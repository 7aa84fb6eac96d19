"""What a step draws in Python is drawn at every call, in order and from the same generator, or refused (S1, S7)."""

import itertools
import random
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.pictures import differences, generators, picture
from tests.twins import Twins, World, mse_step, pair, small_world
from torch import Tensor, nn
from torch.optim import Optimizer

import wholestep
from wholestep import CaptureError

X, Y = pair()
Draw = Callable[[Any], Any]


def drawing(draw: Draw) -> Callable[[World], Callable[..., Tensor]]:
    """A step that scales its prediction by what it draws from the generators of its world."""

    def make(world: World) -> Callable[..., Tensor]:
        own = world.own

        def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(features) * draw(own), targets)
            loss.backward()
            optimizer.step()
            return loss

        return step

    return make


def with_generators() -> World:
    world = small_world()()
    world.own = SimpleNamespace(
        python=random.Random(0),
        numpy=np.random.default_rng(0),
        legacy=np.random.RandomState(0),
        order=[1.0, 2.0, 3.0],
        array=np.arange(3.0),
    )
    return world


def shuffled(own: Any) -> float:
    random.shuffle(own.order)
    return own.order[0]


def shuffled_array(own: Any) -> float:
    np.random.shuffle(own.array)
    return float(own.array[0]) + 1


def of_several(own: Any) -> float:
    """The order of draws from one generator, and between several, is eager's."""
    first = random.random()
    second = np.random.rand()
    third = own.python.random()
    return first + second * 2 + third * 3 + random.random() * 4 + float(own.numpy.random()) * 5


NUMBERS: dict[str, Draw] = {
    "random.random": lambda own: random.random(),
    "random.uniform": lambda own: random.uniform(0.5, 1.5),
    "random.gauss": lambda own: random.gauss(1.0, 0.1),
    "random.betavariate": lambda own: random.betavariate(0.4, 0.4),
    "np.random.rand": lambda own: np.random.rand(),
    "np.random.beta": lambda own: np.random.beta(0.4, 0.4),
    "np.random.normal": lambda own: float(np.random.normal()),
    "np.random.uniform": lambda own: np.random.uniform(0, 2),
    "random.Random": lambda own: own.python.random(),
    "default_rng": lambda own: float(own.numpy.random()),
    "RandomState": lambda own: own.legacy.rand(),
    "arithmetic on a draw": lambda own: (random.random() * 0.1) * 3.0 + 1.0 / (1.0 + random.random()),
    "several generators": of_several,
}
OTHERS: dict[str, Draw] = {
    "an array": lambda own: torch.tensor(np.random.rand(3), dtype=torch.float32),
    "from_numpy": lambda own: torch.from_numpy(np.random.rand(3)).float(),
    "a coin": lambda own: 1.0 if random.random() < 0.5 else 2.0,
    "a choice": lambda own: {"a": 1.0, "b": 2.0}[random.choice(["a", "b"])],
    "a whole number": lambda own: random.randint(1, 3),
    "randrange": lambda own: torch.arange(1.0, 5.0)[random.randrange(4)],
    "a sample": lambda own: sum(random.sample([1.0, 2.0, 3.0], 2)),
    "a shuffled list": shuffled,
    "a shuffled array": shuffled_array,
    "a permutation": lambda own: torch.ones(3)[torch.as_tensor(np.random.permutation(3))],
}


@pytest.mark.parametrize("kind", NUMBERS)
def test_a_number(kind: str) -> None:
    twins = Twins(with_generators, make=drawing(NUMBERS[kind]))
    twins.steps(6, X, Y)
    assert twins.num_captures <= 2


@pytest.mark.parametrize("kind", OTHERS)
def test_what_is_not_a_number(kind: str) -> None:
    """Each value may be a capture of its own, and a draw that cannot be repeated is refused; none is kept for ever."""
    twins = Twins(with_generators, make=drawing(OTHERS[kind]))
    refusal = refusal_of(lambda: twins.steps(6, X, Y))
    assert refusal is None or "test_python_draws.py" in refusal


def refusal_of(run: Callable[[], Any]) -> str | None:
    try:
        run()
    except CaptureError as refusal:
        return str(refusal)
    return None


@pytest.mark.parametrize("kind", ["random.random", "np.random.beta", "default_rng"])
def test_a_generator_that_is_seeded_between_calls(kind: str) -> None:
    def call(world: World, step: Callable[..., Any], *batch: Tensor) -> Any:
        if world.again:
            world.own.numpy = np.random.default_rng(3)
            random.seed(3)
            np.random.seed(3)
        return step(world.model, world.optimizer, *batch)

    twins = Twins(with_generators, make=drawing(NUMBERS[kind]), call=call)
    for again in (False, False, True, False, True):
        twins.change(lambda world, again=again: setattr(world, "again", again))
        twins.step(X, Y)


def test_draws_of_the_model_and_of_torch_mixed() -> None:
    """Layerdrop that only scales, beside dropout and noise of torch's own generator."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
            self.head = nn.Linear(4, 3)

        def forward(self, hidden: Tensor) -> Tensor:
            for layer in self.layers:
                keep = float(random.random() > 0.3)
                hidden = hidden + keep * F.dropout(layer(hidden), 0.2)
            return self.head(hidden + 0.1 * torch.randn_like(hidden))

    twins = Twins(small_world(Model), mse_step)
    twins.steps(6, X, Y)


def test_mixup_costs_no_capture_for_each_lambda() -> None:
    def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Any:
        lam = np.random.beta(0.4, 0.4)
        order = torch.randperm(features.shape[0])
        optimizer.zero_grad()
        output = model(lam * features + (1 - lam) * features[order])
        loss = lam * F.mse_loss(output, targets) + (1 - lam) * F.mse_loss(output, targets[order])
        loss.backward()
        optimizer.step()
        return loss, lam

    twins = Twins(small_world(), step)
    twins.steps(10, X, Y)
    assert twins.num_captures <= 2


def test_a_draw_that_is_kept_and_returned() -> None:
    def make(world: World) -> Callable[..., Any]:
        kept = world.kept = []

        def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Any:
            scale = random.random()
            kept.append(scale)
            return mse_step(model, optimizer, features, targets * scale), scale, f"scaled by {scale:.3f}"

        return step

    twins = Twins(small_world(), make=make)
    twins.steps(5, X, Y)
    assert len(set(twins.worlds[1].kept)) == 5
    assert twins.num_captures <= 2


# What cannot be drawn again


def numbers_from(make: Callable[[], Any]) -> Callable[[], World]:
    def build() -> World:
        world = small_world()()
        world.own = make()
        return world

    return build


REFUSED: dict[str, tuple[Callable[[], Any], Draw, str]] = {
    "a counter of itertools": (lambda: itertools.count(1), lambda own: float(next(own)), "next"),
    "an iterator over tensors": (lambda: iter([torch.tensor(float(i)) for i in range(1, 9)]), next, "next"),
    "a generator": (lambda: (float(i) for i in range(1, 9)), next, "next"),
    "time.time": (list, lambda own: time.time() % 1, "time"),
    "time.perf_counter": (list, lambda own: time.perf_counter() % 1, "perf_counter"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_iterators_and_clocks_are_refused_by_name(kind: str) -> None:
    make, draw, name = REFUSED[kind]
    world = numbers_from(make)()
    compiled = wholestep.compile(drawing(draw)(world))
    before, objects = picture({**vars(world), **generators()})
    with pytest.raises(CaptureError) as caught:
        compiled(world.model, world.optimizer, X, Y)
    assert name in str(caught.value)
    assert "test_python_draws.py" in str(caught.value)
    del caught
    assert differences(before, picture({**vars(world), **generators()})[0]) == []
    assert len(objects) > 0


def test_an_iterator_that_lives_in_the_step_is_not_refused() -> None:
    def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
        numbers = itertools.count(1)
        scales = iter([0.5, 2.0])
        return mse_step(model, optimizer, features, targets * next(numbers) * next(scales) * next(scales))

    twins = Twins(small_world(), step)
    twins.steps(3, X, Y)
    assert twins.num_captures == 1


# Torch's own generator, saved, changed and restored within the step


def forked(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
    optimizer.zero_grad()
    with torch.random.fork_rng():
        torch.manual_seed(42)
        hidden = F.dropout(model(features), 0.5)
    loss = F.mse_loss(hidden, targets)
    loss.backward()
    optimizer.step()
    return loss


def saved_and_restored(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Any:
    optimizer.zero_grad()
    state = torch.get_rng_state()
    first = F.dropout(model(features), 0.5)
    torch.set_rng_state(state)
    second = F.dropout(model(features), 0.5)
    loss = F.mse_loss(first, targets) + (first - second).square().mean()
    loss.backward()
    optimizer.step()
    return loss, (first - second).abs().max()


def saved_and_left(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Any:
    """Draws that leave no trace, then one that does."""
    state = torch.get_rng_state()
    noise = torch.randn(3)
    torch.set_rng_state(state)
    return mse_step(model, optimizer, features, targets + noise), torch.rand(2)


@pytest.mark.parametrize("step", [forked, saved_and_restored, saved_and_left])
def test_a_state_that_is_restored_within_the_step(step: Callable[..., Any]) -> None:
    twins = Twins(small_world(), step)
    twins.steps(4, X, Y)


def test_seeding_that_stays_is_eagers_or_refused() -> None:
    def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
        torch.manual_seed(7)
        return mse_step(model, optimizer, features, targets + torch.randn(3))

    twins = Twins(small_world(), step)
    refusal = refusal_of(lambda: twins.steps(3, X, Y))
    assert refusal is None or "seed" in refusal
