"""Draws from lists and deques of the user's: places are drawn, and what stands there is an input of the graph."""

import collections
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.twins import Twins, World, mse_step, small_world
from torch import Tensor

import wholestep
from wholestep.errors import CaptureError

Transition = collections.namedtuple("Transition", ("state", "target", "reward", "done"))


def transition(number: int) -> Transition:
    generator = torch.Generator().manual_seed(number)
    state, target = torch.randn(1, 4, generator=generator), torch.randn(1, 3, generator=generator)
    return Transition(state, target, number / 2, number % 3 == 0)


def with_memory(make: Callable[[list[Any]], Any]) -> Callable[[], World]:
    def build() -> World:
        world = small_world()()
        world.memory = make([transition(number) for number in range(8)])
        world.last = None
        return world

    return build


MEMORIES: dict[str, Callable[[list[Any]], Any]] = {
    "a list": list,
    "a deque": lambda items: collections.deque(items, maxlen=11),
}


def update(world: World, batch: Any, scale: Any = 1.0) -> Tensor:
    states, targets = torch.cat([one.state for one in batch]), torch.cat([one.target for one in batch])
    return mse_step(world.model, world.optimizer, states * scale, targets)


def masked(world: World) -> Tensor:
    batch = Transition(*zip(*random.sample(world.memory, 3), strict=True))
    going_on = 1 - torch.tensor(batch.done, dtype=torch.float32)
    rewards = torch.tensor(batch.reward).unsqueeze(1)
    return mse_step(
        world.model, world.optimizer, torch.cat(batch.state) * going_on[:, None], torch.cat(batch.target) * rewards
    )


def kept(world: World) -> Any:
    world.last = random.choice(world.memory)
    return update(world, [world.last]), world.last.state, world.last.state.view(2, 2), {"all": world.last}


STEPS: dict[str, Callable[[World], Any]] = {
    "sample": lambda world: update(world, batch := random.sample(world.memory, 4), sum(one.reward for one in batch)),
    "choices": lambda world: update(world, random.choices(world.memory, k=5)),
    "choices with weights": lambda world: update(world, random.choices(world.memory, [1.0] * len(world.memory), k=3)),
    "by name": lambda world: update(world, random.sample(population=world.memory, k=2)),
    "places by NumPy": lambda world: update(
        world, [world.memory[i] for i in np.random.choice(len(world.memory), 4, replace=False)]
    ),
    "places by Python": lambda world: update(
        world, [world.memory[random.randrange(len(world.memory))] for _ in range(3)]
    ),
    "places from the end": lambda world: update(world, [world.memory[-random.randint(1, 8)] for _ in range(3)]),
    "numbers and truth values": masked,
    "kept and returned": kept,
}


@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize("memory", MEMORIES)
def test_a_memory_that_grows(kind: str, memory: str) -> None:
    twins = Twins(with_memory(MEMORIES[memory]), STEPS[kind], call=lambda world, step: step(world))
    for number in range(6):
        twins.step()
        if kind != "choices with weights":
            twins.change(lambda world, number=number: world.memory.append(transition(10 + number)))
    assert twins.num_captures <= 2  # one more where the length was asked for
    assert twins.compiled.num_eager_calls == 0


def pushes(world: World, state: Tensor, target: Tensor) -> Tensor:
    world.memory.append(Transition(state, target, 1.0, False))
    return update(world, random.sample(world.memory, 4))


@pytest.mark.parametrize("memory", MEMORIES)
def test_a_memory_that_the_step_pushes_to(memory: str) -> None:
    twins = Twins(with_memory(MEMORIES[memory]), pushes, call=lambda world, step, *batch: step(world, *batch))
    for number in range(7):
        twins.step(*transition(20 + number)[:2])
    assert twins.num_captures <= 6


def test_items_of_several_kinds() -> None:
    """Arrays, dicts and None among what was drawn: what is not alike needs another graph, or runs as it is."""

    def build() -> World:
        world = small_world()()
        world.memory = [
            {"x": np.full((1, 4), number, np.float32), "y": None if number == 5 else torch.ones(1, 3), "name": "one"}
            for number in range(8)
        ]
        return world

    def step(world: World) -> Any:
        batch = random.sample(world.memory, 2)
        states = torch.from_numpy(np.concatenate([one["x"] for one in batch]))
        targets = [torch.zeros(1, 3) if one["y"] is None else one["y"] for one in batch]
        return mse_step(world.model, world.optimizer, states, torch.cat(targets)), batch[0]["name"]

    twins = Twins(build, step, call=lambda world, step: step(world))
    twins.steps(10)
    assert twins.num_captures <= 4


def test_other_shapes_in_the_memory() -> None:
    twins = Twins(with_memory(list), STEPS["choices"], call=lambda world, step: step(world))
    twins.steps(2)
    twins.change(lambda world: world.memory.__setitem__(0, Transition(torch.ones(2, 4), torch.ones(2, 3), 0.0, True)))
    twins.steps(8)


def test_what_was_drawn_is_not_written_to() -> None:
    def step(world: World) -> Tensor:
        one = random.choice(world.memory)
        one.state.add_(1)
        return update(world, [one])

    world = with_memory(list)()
    with pytest.raises(CaptureError, match="writes to a tensor that it has drawn"):
        wholestep.compile(step)(world)


def test_a_list_that_was_drawn_is_not_written_to() -> None:
    def step(world: World) -> Tensor:
        one = random.choice(world.memory)
        one[2] = 5.0
        return update(world, [Transition(*one)])

    world = with_memory(lambda items: [[*item] for item in items])()
    with pytest.raises(CaptureError, match="writes to a list that it has drawn"):
        wholestep.compile(step)(world)


def gives_an_attribute(world: World) -> Any:
    one = random.choice(world.memory)
    one.state.seen = True
    return update(world, [one])


WHICH: dict[str, tuple[Callable[[World], Any], str]] = {
    "is": (lambda world: random.choice(world.memory) is random.choice(world.memory), "it is that it has drawn"),
    "id": (lambda world: len({id(one) for one in random.choices(world.memory, k=3)}), "it is that it has drawn"),
    "tensors": (lambda world: {one.state for one in random.choices(world.memory, k=3)}, "it is that it has drawn"),
    "tuples": (lambda world: {one[:2] for one in random.choices(world.memory, k=3)}, "it is that it has drawn"),
    "in a list of its own": (lambda world: random.choice(world.memory) in [1, 2], "it is that it has drawn"),
    "in": (lambda world: random.choice(world.memory) in world.memory, "looks for something that it has drawn"),
    "an attribute": (gives_an_attribute, "sets 'seen' of a tensor that it has drawn"),
    "where it lies": (lambda world: random.choice(world.memory).state.storage_offset(), "reads storage_offset"),
}


@pytest.mark.parametrize("kind", WHICH)
def test_which_object_was_drawn_is_not_told(kind: str) -> None:
    ask, reason = WHICH[kind]

    def step(world: World) -> Any:
        return update(world, random.sample(world.memory, 2)), ask(world)

    world = with_memory(list)()
    with pytest.raises(CaptureError, match=reason):
        wholestep.compile(step)(world)


def test_memory_that_the_step_writes_to() -> None:
    """The weight of a layer is among what is drawn: the graph might have written to it by then."""

    def build() -> World:
        world = small_world()()
        world.memory = [torch.randn(5, 4) for _ in range(4)]
        return world

    def step(world: World) -> Tensor:
        return mse_step(world.model, world.optimizer, random.choice(world.memory), torch.zeros(5, 3))

    twins = Twins(build, step, call=lambda world, step: step(world))
    twins.steps(3)
    compiled, world = twins.compiled, twins.worlds[1]
    world.memory[:] = [world.model.first.weight.data] * 4
    with pytest.raises(CaptureError, match="share memory"):
        compiled(world)


def test_places_of_the_steps_own_list() -> None:
    def step(world: World) -> Any:
        layers = [torch.tanh, torch.sin, torch.relu]
        one, other = random.sample(layers, 2)
        batch = random.sample([*world.memory], 2)
        return update(world, batch), one(torch.ones(2)) + other(torch.ones(2))

    twins = Twins(with_memory(list), step, call=lambda world, step: step(world))
    twins.steps(10)
    assert twins.num_captures <= 9


def test_lists_of_plain_values() -> None:
    def step(world: World) -> Any:
        places = random.sample(range(8), 3)
        names = random.choices(["a", "b"], k=1)
        rows = torch.arange(32.0).view(8, 4)[places]
        return mse_step(world.model, world.optimizer, rows, torch.zeros(3, 3)), places, names

    twins = Twins(with_memory(list), step, call=lambda world, step: step(world))
    twins.steps(6)
    assert twins.num_captures <= 2
