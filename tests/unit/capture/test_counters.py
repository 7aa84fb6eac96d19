"""Numbers that the step moves on itself are inputs from the first capture on; so is nothing that it only reads."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.twins import SmallNet, Twins, World, momentum, mse_step, pair, small_world
from torch import Tensor

Step = Callable[[World, Tensor, Tensor], Any]
COUNTS = {"calls": 0}


def build() -> World:
    world = small_world()()
    world.count, world.mean, world.scale, world.flag = 3, 0.5, 2.0, False
    world.history, world.counts, world.by_name = [0.0], [0, 0], {"steps": 0}
    world.recent = collections.deque([1.0], maxlen=2)
    return world


def trained(step: Step, number: int = 6, **options: Any) -> Twins:
    COUNTS["calls"] = 0
    twins = Twins(build, step, call=lambda world, step, *args: step(world, *args), **options)
    for index in range(number):
        twins.step(*pair(seed=index))
    return twins


def train(world: World, features: Tensor, targets: Tensor, scale: float = 1.0) -> Tensor:
    return mse_step(world.model, world.optimizer, features * scale, targets)


def counter(world: World, features: Tensor, targets: Tensor) -> Any:
    world.count += 1
    return train(world, features, targets, 1 / world.count)


def counter_at_the_end(world: World, features: Tensor, targets: Tensor) -> Any:
    loss = train(world, features, targets, 0.9**world.count)
    world.count = world.count + 1
    return loss, world.count


def running_mean(world: World, features: Tensor, targets: Tensor) -> Any:
    loss = train(world, features, targets)
    world.mean = 0.9 * world.mean + 0.1 * loss.item()
    return loss, world.mean


def item_of_a_dict(world: World, features: Tensor, targets: Tensor) -> Any:
    world.by_name["steps"] += 2
    return train(world, features, targets, world.by_name["steps"])


def item_of_a_list(world: World, features: Tensor, targets: Tensor) -> Any:
    world.counts[1] += 1
    return train(world, features, targets, world.counts[1])


def length_of_a_list(world: World, features: Tensor, targets: Tensor) -> Any:
    world.history.append(0.0)
    return train(world, features, targets, 1 / len(world.history))


def two_at_once(world: World, features: Tensor, targets: Tensor) -> Any:
    world.count, world.mean = world.count + 1, world.mean * 0.5
    return train(world, features, targets, world.count * world.mean)


def written_only(world: World, features: Tensor, targets: Tensor) -> Any:
    world.last = 7
    return train(world, features, targets)


def in_a_branch(world: World, features: Tensor, targets: Tensor) -> Any:
    world.count += 1
    if world.count > 100:
        features = features * 2
    return train(world, features, targets)


def of_the_group(world: World, features: Tensor, targets: Tensor) -> Any:
    for group in world.optimizer.param_groups:
        group["momentum"] = group["momentum"] * 0.9
    return train(world, features, targets)


def with_the_epoch(world: World, features: Tensor, targets: Tensor) -> Any:
    world.count += 1
    features = features[:, torch.randperm(4)] * world.scale
    return train(world, features, targets, world.count)


ONE_CAPTURE = [counter, counter_at_the_end, running_mean, item_of_a_dict, item_of_a_list, length_of_a_list]
ONE_CAPTURE += [two_at_once, written_only, in_a_branch, with_the_epoch]


@pytest.mark.parametrize("step", ONE_CAPTURE, ids=lambda step: step.__name__)
def test_a_counter_of_the_step_costs_no_capture(step: Step) -> None:
    twins = trained(step)
    assert twins.num_captures == 1, twins.reasons


@pytest.mark.parametrize("step", [counter, running_mean], ids=lambda step: step.__name__)
def test_a_counter_that_somebody_sets_is_still_one(step: Step) -> None:
    twins = trained(step, 3)
    twins.change(lambda world: vars(world).update(count=10, mean=0.25))
    twins.step(*pair(seed=9))
    assert twins.num_captures == 1, twins.reasons


def first_call(world: World, features: Tensor, targets: Tensor) -> Any:
    world.count += 1
    return train(world, features, targets, 5.0 if world.count == 4 else 1.0)


def every_third(world: World, features: Tensor, targets: Tensor) -> Any:
    world.count += 1
    return train(world, features, targets, 5.0 if world.count % 3 == 0 else 1.0)


def other_type(world: World, features: Tensor, targets: Tensor) -> Any:
    loss = train(world, features, targets)
    world.count += loss.item()
    return loss, world.count


@pytest.mark.parametrize("step", [first_call, every_third, other_type], ids=lambda step: step.__name__)
def test_each_side_of_a_branch_is_a_graph(step: Step) -> None:
    twins = trained(step, 7)
    assert twins.num_captures == 2, twins.reasons


def used_as_a_size(world: World, features: Tensor, targets: Tensor) -> Any:
    world.count = world.count % 3 + 1
    return train(world, features[: 2 + world.count], targets[: 2 + world.count])


def used_as_a_key(world: World, features: Tensor, targets: Tensor) -> Any:
    world.count = (world.count + 1) % 2
    return train(world, features, targets, {0: 1.0, 1: 2.0}[world.count])


@pytest.mark.parametrize("step", [used_as_a_size, used_as_a_key], ids=lambda step: step.__name__)
def test_where_its_value_is_needed_each_is_a_graph(step: Step) -> None:
    twins = trained(step, 8)
    assert twins.num_captures <= 4, twins.reasons


def test_options_that_the_step_sets() -> None:
    assert trained(of_the_group).num_captures <= 2


def test_a_number_that_changes_along_with_a_size_is_no_capture_of_its_own() -> None:
    def step(world: World, features: Tensor, targets: Tensor) -> Any:
        return train(world, features, targets, world.scale)

    twins = Twins(build, step, call=lambda world, step, *args: step(world, *args))
    for index, size in enumerate((6, 7, 8, 9)):
        twins.change(lambda world, index=index: setattr(world, "scale", 2.0 + index))
        twins.step(*pair(size=size, seed=index))
    assert twins.num_captures == 2, twins.reasons


# A step that only accumulates leaves the state of the optimizer alone.


def accumulate(world: World, features: Tensor, targets: Tensor, updates: bool) -> Any:
    loss = torch.nn.functional.mse_loss(world.model(features), targets)
    loss.backward()
    if updates:
        world.optimizer.step()
        world.optimizer.zero_grad()
    return loss


def accumulated(step: Callable[..., Any], number: int = 8) -> Twins:
    def make() -> World:
        model = SmallNet()
        return World(model=model, optimizer=momentum(model.parameters()))

    twins = Twins(make, step, call=lambda world, step, *args: step(world, *args))
    for index in range(number):
        twins.step(*pair(seed=index), index % 2 == 1)
    return twins


def test_accumulation_is_a_graph_that_accumulates_and_one_that_updates() -> None:
    twins = accumulated(accumulate)
    assert twins.num_captures == 2, twins.reasons
    for world in twins.worlds:
        world.optimizer.load_state_dict(world.optimizer.state_dict())
    twins.step(*pair(), False)
    twins.step(*pair(), True)
    assert twins.num_captures == 2, twins.reasons


def asks_whether_there_is_state(world: World, *args: Any) -> Any:
    return accumulate(world, *args), len(world.optimizer.state)


def asks_by_vars(world: World, *args: Any) -> Any:
    return accumulate(world, *args), bool(vars(world.optimizer)["state"])


def looks_at_state(world: World, features: Tensor, targets: Tensor, updates: bool) -> Any:
    state = world.optimizer.state
    total = sum((entry["momentum_buffer"].sum() for entry in state.values() if "momentum_buffer" in entry), 0.0)
    return accumulate(world, features, targets, updates), total


def saves_state(world: World, *args: Any) -> Any:
    return accumulate(world, *args), sorted(world.optimizer.state_dict()["state"])


@pytest.mark.parametrize(
    "step", [asks_whether_there_is_state, asks_by_vars, looks_at_state, saves_state], ids=lambda step: step.__name__
)
def test_one_that_looks_at_it_sees_what_is_there(step: Callable[..., Any]) -> None:
    accumulated(step)


def test_state_that_goes_is_noticed() -> None:
    twins = accumulated(accumulate)
    twins.change(lambda world: world.optimizer.state.clear())
    for index in range(4):
        twins.step(*pair(seed=index), index % 2 == 1)
