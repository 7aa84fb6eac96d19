"""Guards in a process that was forked: the questions that C++ answers take locks, which may be taken for ever there."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.twins import small_world, square_step

import wholestep
from wholestep import _recording_torch
from wholestep.capture.record import Contents, Watch

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.. may lead to deadlocks:DeprecationWarning")


def _in_child(function: Callable[[], Any]) -> str:
    """What a function finds in a forked process."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, repr(function()).encode())
        except BaseException as error:
            os.write(write, repr(error).encode())
        os._exit(0)
    os.close(write)
    with open(read) as file:
        text = file.read()
    os.waitpid(child, 0)
    return text


def test_what_was_asked_in_cpp_is_asked_in_python() -> None:
    own = {"a": 1}
    unwritten = _recording_torch.unwritten([own])
    if unwritten is None:
        pytest.skip("this version of Python has no versions of dicts")
    watch = Watch()
    contents = Contents([own], watch)

    def written() -> list[int]:
        watch.begin()
        found = contents.written()
        if not found:
            watch.passed()
        return found

    for _ in range(_recording_torch.QUIET_CALLS + 2):
        assert written() == []
    assert watch.is_quiet

    def write() -> list[list[int]]:
        found = [written()]
        own["a"] = 2
        return [*found, written()]

    assert _in_child(unwritten) == "False"
    assert _in_child(write) == "[[], [0]]"
    assert unwritten()
    assert written() == []
    assert watch.is_quiet


def test_a_step_goes_on_in_a_child() -> None:
    world = small_world()()
    step = wholestep.compile(square_step)
    features = torch.ones(2, 4)
    for _ in range(2 * _recording_torch.QUIET_CALLS):
        step(world.model, world.optimizer, features)

    def go_on() -> tuple[int, list[float]]:
        return step.num_captures, [step(world.model, world.optimizer, features).item() for _ in range(5)]

    assert _in_child(go_on) == repr(go_on())
