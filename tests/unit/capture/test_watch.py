"""Dicts that guards ask of: what was written is noticed at once, whoever asks, in Python or all together in C++."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.twins import Twins, World, pair, small_world
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from wholestep import _recording_torch
from wholestep.capture.record import Contents, Watch

X, Y = pair()
in_cpp = pytest.mark.skipif(sys.version_info >= (3, 12), reason="versions are asked for one by one there")


class Asked:
    """Two guards of one watch, each of some dicts, and an oracle that keeps copies of what it has let pass."""

    def __init__(self, dicts: list[dict[str, int]], parts: list[list[int]]) -> None:
        self.dicts = dicts
        self.watch = Watch()
        self.parts = parts
        self.contents = [Contents([dicts[index] for index in part], self.watch) for part in parts]
        self.num_writes = [[0] * len(dicts) for _ in parts]

    def write(self, index: int) -> None:
        self.dicts[index]["a"] = self.dicts[index].get("a", 0) + 1
        for counts in self.num_writes:
            counts[index] += 1

    def call(self) -> None:
        self.watch.begin()
        for part, contents, counts in zip(self.parts, self.contents, self.num_writes, strict=True):
            assert contents.written() == [place for place, index in enumerate(part) if counts[index]]
            if any(counts[index] for index in part):
                contents.look()
            for index in part:
                counts[index] = 0
        self.watch.passed()


@given(st.lists(st.lists(st.integers(0, 4), max_size=3), min_size=1, max_size=30))
@settings(max_examples=60, deadline=None)
def test_each_write_is_told_once_to_each_guard(calls: list[list[int]]) -> None:
    asked = Asked([{"a": 0} for _ in range(5)], [[0, 1, 2], [2, 3, 4], [1]])
    for written in calls:
        for index in written:
            asked.write(index)
        asked.call()


@in_cpp
def test_a_dict_that_is_written_to_at_each_call_does_not_keep_others_from_being_watched() -> None:
    asked = Asked([{"a": 0} for _ in range(3)], [[0, 1], [2]])
    for _ in range(10):
        asked.write(0)
        asked.call()
    assert asked.watch.is_quiet
    asked.write(2)
    asked.call()
    assert not asked.watch.is_quiet


@in_cpp
def test_a_write_between_the_question_and_the_look_of_the_guards_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked([{"a": 0}], [[0]])
    original = _recording_torch.unwritten

    def unwritten(*args: Any) -> Any:
        asked.write(0)
        question = original(*args)
        monkeypatch.setattr(_recording_torch, "unwritten", original)
        return question

    monkeypatch.setattr(_recording_torch, "unwritten", unwritten)
    for _ in range(6):
        asked.call()
    assert asked.watch.is_quiet


def _step_of(state: SimpleNamespace) -> Any:
    def step(model: nn.Module, optimizer: Optimizer, features: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(features), targets)
        if state.table["mode"] == "double":
            loss = loss * 2
        if state.kept.mode == "triple":
            loss = loss * 3
        loss.backward()
        optimizer.step()
        state.calls += 1
        return loss

    return step


def _replace(state: SimpleNamespace) -> None:
    state.table = dict(state.table)
    state.kept = SimpleNamespace(**vars(state.kept))


def _write(state: SimpleNamespace) -> None:
    state.table["mode"] = "single" if state.table["mode"] == "double" else "double"


def _set(state: SimpleNamespace) -> None:
    state.kept.mode = "single" if state.kept.mode == "triple" else "triple"


@pytest.mark.parametrize("change", [_write, _set])
def test_what_has_moved_before_is_looked_at_itself(change: Any) -> None:
    def build() -> World:
        world = small_world()()
        state = SimpleNamespace(calls=0, table={"mode": "single"}, kept=SimpleNamespace(mode="single"))
        world.state = state  # which the step writes to at each call, so that it is left out of the question
        return world

    twins = Twins(build, make=lambda world: _step_of(world.state))
    for _ in range(2):
        for now in (_replace, _replace, change):
            twins.steps(4, X, Y)
            twins.change(lambda world, now=now: now(world.state))
    twins.steps(2, X, Y)
