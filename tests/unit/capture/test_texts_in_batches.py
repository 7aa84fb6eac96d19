"""Texts and numbers beside the tensors of a batch: what the step only hands on may be another at each call."""

from __future__ import annotations

import collections
import copy
import dataclasses
import json
import os
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.twins import Twins, World, mse_step, pair, small_world
from torch import Tensor, nn

FACTORS = {"one": 1.0, "two": 2.0}
PAIRS = {(name, "and more"): factor for name, factor in FACTORS.items()}


@dataclasses.dataclass
class Row:
    features: Tensor
    targets: Tensor
    name: str
    names: list[str]


def batch(index: int, **others: Any) -> dict[str, Any]:
    features, targets = pair(seed=index)
    name = ("one", "two")[index % 2]
    rows = {"name": name, "names": [f"{name}{row}" for row in range(6)], "pair": (name, "and more")}
    return {"features": features, "targets": targets, **rows, "index": index, **others}


def build() -> World:
    world = small_world()()
    world.kept, world.seen, world.last = [], {}, None
    return world


def train(step: Callable[..., Any], number: int = 6, make: Callable[[int], Any] = batch) -> Twins:
    def call(world: World, step: Callable[..., Any], given: Any) -> Any:
        return step(world, given)

    twins = Twins(build, step, call=call)
    for index in range(number):
        twins.step(make(index))
    return twins


def trained(world: World, given: Any, scale: float = 1.0) -> Tensor:
    return mse_step(world.model, world.optimizer, given["features"] * scale, given["targets"])


def not_read(world: World, given: Any) -> Any:
    return trained(world, given)


def moved(world: World, given: Any) -> Any:
    given = {key: value.to("cpu") if torch.is_tensor(value) else value for key, value in given.items()}
    return trained(world, given)


def handed_over(world: World, given: Any) -> Any:
    def inner(features: Tensor, targets: Tensor, **others: Any) -> Tensor:
        return mse_step(world.model, world.optimizer, features, targets)

    return inner(**given)


def returned(world: World, given: Any) -> Any:
    return trained(world, given), given["name"], {given["name"]: given["names"]}, (given["pair"], [given["name"]])


def kept(world: World, given: Any) -> Any:
    world.kept.append(given["name"])
    world.seen["name"] = given["name"]
    world.seen[given["name"]] = 1
    return trained(world, given)


def kept_as_attribute(world: World, given: Any) -> Any:
    world.last = given["name"]
    return trained(world, given)


def printed(world: World, given: Any) -> Any:
    print(given["name"], given["names"])
    return trained(world, given)


def asked_for_none(world: World, given: Any) -> Any:
    return trained(world, given, 1.0 if given["name"] is None else 3.0)


@pytest.mark.parametrize(
    "step", [not_read, moved, handed_over, returned, printed, asked_for_none], ids=lambda step: step.__name__
)
def test_texts_that_are_handed_on_cost_no_capture(step: Callable[..., Any]) -> None:
    twins = train(step)
    assert twins.num_captures <= 2, twins.reasons  # the number beside them, where it is read


def compared(world: World, given: Any) -> Any:
    return trained(world, given, 2.0 if given["name"] == "two" else 1.0)


def looked_up(world: World, given: Any) -> Any:
    return trained(world, given, FACTORS[given["name"]])


def got(world: World, given: Any) -> Any:
    return trained(world, given, FACTORS.get(given["name"], 0.0))


def key_of_own_dict(world: World, given: Any) -> Any:
    return trained(world, given, {given["name"]: 3.0, "other": 4.0}.get("two", 1.0))


def in_own_set(world: World, given: Any) -> Any:
    return trained(world, given, 2.0 if "two" in {given["name"]} else 1.0)


def contained(world: World, given: Any) -> Any:
    return trained(world, given, 2.0 if "wo" in given["name"] else 1.0)


def contained_in_list(world: World, given: Any) -> Any:
    return trained(world, given, 2.0 if given["name"] in ["two"] else 1.0)


def measured(world: World, given: Any) -> Any:
    return trained(world, given, float(len(given["name"]) + len(given["names"][0])))


def first_letter(world: World, given: Any) -> Any:
    return trained(world, given, 2.0 if given["name"][0] == "t" else 1.0)


def formatted(world: World, given: Any) -> Any:
    made = f"{given['name']}!", "%s?" % given["name"], given["name"] + ".", given["name"].upper()  # noqa: UP031
    return trained(world, given), made


def searched(world: World, given: Any) -> Any:
    return trained(world, given, 2.0 if re.match("t", given["name"]) else 1.0)


def dumped(world: World, given: Any) -> Any:
    return trained(world, given, float(len(json.dumps({"a": [given["name"], given["pair"]]}))))


def path(world: World, given: Any) -> Any:
    return trained(world, given), os.path.join("folder", given["name"])


def joined(world: World, given: Any) -> Any:
    return trained(world, given), "-".join([given["name"], *given["names"]])


def sorted_(world: World, given: Any) -> Any:
    return trained(world, given), sorted([given["name"], "pear"])[0], max(given["name"], "pear")


def attribute(world: World, given: Any) -> Any:
    return trained(world, given, 1.0 + getattr(world, given["name"], 5.0))


def counted(world: World, given: Any) -> Any:
    return trained(world, given, float(collections.Counter([given["name"]])["two"]))


def unpacked_letters(world: World, given: Any) -> Any:
    first, *rest = given["name"]
    return trained(world, given, 2.0 if first == "t" else 1.0), rest


def starred(world: World, given: Any) -> Any:
    def count(*letters: str) -> int:
        return 2 if letters[0] == "t" else 1

    return trained(world, given, float(count(*given["name"])))


def true(world: World, given: Any) -> Any:
    return trained(world, given, 2.0 if given["empty"] else 1.0)


def pair_looked_up(world: World, given: Any) -> Any:
    return trained(world, given, PAIRS[given["pair"]])


def pair_in_own_dict(world: World, given: Any) -> Any:
    return trained(world, given, {given["pair"]: 2.0}.get(("two", "and more"), 1.0)), {given["pair"]: given["names"]}


def pair_compared(world: World, given: Any) -> Any:
    return trained(world, given, 2.0 if given["pair"] == ("two", "and more") else 1.0)


def names_walked(world: World, given: Any) -> Any:
    return trained(world, given, float(sum(name.startswith("two") for name in given["names"])))


def names_written(world: World, given: Any) -> Any:
    given["names"].append(given["name"])
    return trained(world, given), given["names"]


def copied(world: World, given: Any) -> Any:
    given = {**given, **copy.deepcopy({key: given[key] for key in ("name", "names", "pair")})}
    return trained(world, given, 2.0 if given["name"] == "two" else 1.0)


def reduced(world: World, given: Any) -> Any:
    loss_function = nn.MSELoss(reduction={"one": "mean", "two": "sum"}[given["name"]])
    world.optimizer.zero_grad()
    loss = loss_function(world.model(given["features"]), given["targets"])
    loss.backward()
    world.optimizer.step()
    return loss


def in_an_object(world: World, given: Any) -> Any:
    box = World(name=given["name"])
    return trained(world, given, 2.0 if vars(box)["name"] == "two" else 1.0)


def matched(world: World, given: Any) -> Any:
    match given["name"]:
        case "two":
            scale = 2.0
        case _:
            scale = 1.0
    return trained(world, given, scale)


def hashed(world: World, given: Any) -> Any:
    return trained(world, given, 2.0 if hash(given["name"]) == hash("two") else 1.0)


READING = [
    *[kept, kept_as_attribute, compared, looked_up, got, key_of_own_dict, in_own_set, contained],
    *[contained_in_list, measured, first_letter, formatted, searched, dumped, path, joined, sorted_],
    *[attribute, counted, unpacked_letters, starred, true, pair_compared, pair_looked_up],
    *[pair_in_own_dict, names_walked, names_written, in_an_object, matched, hashed, copied, reduced],
]


@pytest.mark.parametrize("step", READING, ids=lambda step: step.__name__)
def test_texts_that_are_read_are_never_stale(step: Callable[..., Any]) -> None:
    def made(index: int) -> dict[str, Any]:
        return batch(index % 2) | {"index": 0, "empty": ("", "full")[index % 2]}

    twins = train(step, make=made)
    assert twins.num_captures <= 4, twins.reasons


def test_another_number_of_texts_is_another_size_of_the_batch() -> None:
    def made(index: int) -> dict[str, Any]:
        features, targets = pair(size=6 + index, seed=index)
        return {"features": features, "targets": targets, "names": ["name"] * (6 + index)}

    twins = train(not_read, make=made)
    assert twins.num_captures == 2, twins.reasons


def test_a_batch_that_is_an_object() -> None:
    def step(world: World, given: Row) -> Any:
        return mse_step(world.model, world.optimizer, given.features, given.targets), given.name

    def made(index: int) -> Row:
        return Row(*pair(seed=index), name=f"name {index}", names=["a"] * (1 + index))

    assert train(step, make=made).num_captures == 1


def test_numbers_that_change_together_are_one_more_capture() -> None:
    def step(world: World, given: Any) -> Any:
        return trained(world, given, given["index"] * given["share"]) / given["rows"]

    twins = train(step, make=lambda index: batch(index, share=1.0 + index, rows=96 + index))
    assert twins.num_captures == 2, twins.reasons


def test_plain_arguments_that_change_together_are_one_more_capture() -> None:
    def call(world: World, step: Callable[..., Any], *given: Any) -> Any:
        return step(world.model, world.optimizer, *given)

    def step(model: Any, optimizer: Any, features: Tensor, targets: Tensor, index: int, name: str, share: float) -> Any:
        return mse_step(model, optimizer, features * share, targets) * index, name

    twins = Twins(small_world(), step, call=call)
    for index in range(5):
        twins.step(*pair(seed=index), index, f"name {index}", 1.0 + index)
    assert twins.num_captures == 2, twins.reasons
