"""Waiting updates where Python runs in the middle of C: audit hooks, in which signal handlers may run and raise."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from tests.unit.runtime.test_pending_interrupts import Training

from wholestep import _waiting_torch


class Hook:
    """Does something at the `number`th event since it was set, and counts them; it cannot be taken away again."""

    def __init__(self) -> None:
        self.action: Callable[[], None] | None = None
        self.number = self.count = 0
        sys.addaudithook(self._on_event)

    def set(self, number: int, action: Callable[[], None] | None) -> None:
        self.number, self.count, self.action = number, 0, action

    def _on_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.action is None:
            return
        self.count += 1
        if self.count == self.number:
            action, self.action = self.action, None
            action()
            self.action = action


def interrupt() -> None:
    raise KeyboardInterrupt


def train(optimizer: str) -> None:
    """In a process of its own: what happens at each event of a few steps."""
    hook = Hook()
    training = Training(optimizer)
    for _ in range(3):
        training.step()

    def look() -> None:
        [number] = set(training.num_updates())
        assert number in (training.num_returned, training.num_returned + 1), number

    def step_and_flush() -> None:
        training.step()
        training.compiled.flush()

    for action in (look, interrupt):
        number = 0
        while number == 0 or hook.count >= number:
            number += 1
            training.step()
            hook.set(number, action)
            try:
                step_and_flush()
            except KeyboardInterrupt:
                pass
            finally:
                hook.action = None
            training.assert_whole()
        assert number > 6, "classes of tensors were changed"

    inside: list[str] = []
    at_once = _waiting_torch.at_once

    def watched(calls: Any) -> None:
        hook.set(1, lambda: inside.append("something is told"))
        try:
            at_once(calls)
        finally:
            hook.action = None

    _waiting_torch.at_once = watched
    for _ in range(3):
        step_and_flush()
    assert not inside


@pytest.mark.sample(1)
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_python_in_the_middle_of_holding(optimizer: str) -> None:
    code = f"from tests.unit.runtime.test_pending_audit import train; train({optimizer!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
