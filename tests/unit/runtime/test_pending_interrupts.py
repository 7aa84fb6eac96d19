"""Ctrl-C, signal handlers and readers at any moment while updates wait: whole updates, none missing (ITER-7, P2).

The gradient of the model here is 1 for every element, whatever its parameters are, so that with a learning rate of 1
each parameter is the number of updates it has had.
"""

from __future__ import annotations

import io
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import wholestep
from wholestep.runtime import pending
from wholestep.runtime.held import GuardedTensor

TRACED = ("runtime/pending.py", "runtime/held.py", "runtime/journal.py", "runtime/rotation.py", "runtime/executable.py")


pytestmark = pytest.mark.usefixtures("nothing_waits")


class Counters(nn.Module):
    def __init__(self, number: int = 3) -> None:
        super().__init__()
        self.counters = nn.ParameterList([nn.Parameter(torch.zeros(4)) for _ in range(number)])

    def forward(self, x: Tensor) -> Tensor:
        total = x.sum() * 0
        for counter in self.counters:
            total = total + (counter * x).sum()
        return total


def count(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = -model(x)
    loss.backward()
    optimizer.step()
    return loss


class Training:
    """A training whose updates can be counted: by its parameters, or by what AdamW counts itself."""

    def __init__(self, optimizer: str, number: int = 3) -> None:
        self.model = Counters(number)
        self.is_adamw = optimizer == "adamw"
        self.optimizer: Optimizer = (
            AdamW(self.model.parameters(), foreach=False) if self.is_adamw else SGD(self.model.parameters(), lr=1.0)
        )
        self.compiled: Any = wholestep.compile(count, cross_iteration="all")
        self.num_returned = 0
        self.x = torch.ones(4)
        self._twin = Counters(1)
        self._eager = AdamW(self._twin.parameters(), foreach=False)
        self._expected: dict[int, list[Tensor]] = {}

    def step(self) -> None:
        self.compiled(self.model, self.optimizer, self.x)
        self.num_returned += 1

    def num_updates(self) -> list[int]:
        """How many updates each parameter has had, looking at a saved copy of model and optimizer."""
        file = io.BytesIO()
        torch.save([self.model.state_dict(), self.optimizer.state_dict()], file)
        file.seek(0)
        parameters, states = torch.load(file)
        if not self.is_adamw:
            return [int(value[0]) for value in parameters.values()]
        numbers = [int(state["step"]) for state in states["state"].values()]
        for number, value, state in zip(numbers, parameters.values(), states["state"].values(), strict=True):
            expected = self._after(number)
            for name, found in {"parameter": value, **state}.items():
                assert torch.equal(found, expected[name]), f"{name} is not what it is after {number} updates"
        return numbers

    def _after(self, number: int) -> dict[str, Tensor]:
        """Parameter and state of AdamW after so many updates in eager."""
        while len(self._expected) <= number:
            [parameter] = self._twin.parameters()
            state = self._eager.state.get(parameter, {})
            self._expected[len(self._expected)] = {  # pyright: ignore[reportArgumentType]
                name: value.detach().clone() for name, value in {"parameter": parameter, **state}.items()
            }
            with torch.enable_grad():  # whoever asks may be in the middle of a step
                count(self._twin, self._eager, self.x)
        return self._expected[number]  # pyright: ignore[reportReturnType]

    def assert_whole(self) -> None:
        """All parameters have had the same number of updates: those of all calls that returned, or one more."""
        [number] = set(self.num_updates())
        assert number in (self.num_returned, self.num_returned + 1)
        self.num_returned = number
        self._assert_usual_modes()

    def assert_finished_ones(self) -> None:
        """No update of a call that returned is missing; one that did not may be there in part, as in eager."""
        assert set(self.num_updates()) <= {self.num_returned, self.num_returned + 1}
        for counter in self.model.counters:
            counter.data.fill_(self.num_returned)
        self._assert_usual_modes()

    def _assert_usual_modes(self) -> None:
        assert torch.is_grad_enabled()
        assert torch._C._is_torch_function_enabled()  # pyright: ignore[reportPrivateUsage]


class Interrupt:
    """Raises KeyboardInterrupt at the `number`th opcode of the code under test; `is_over` if it has fewer."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._count = 0
        self.place = ""

    @property
    def is_over(self) -> bool:
        return self._count <= self._number

    def run(self, function: Callable[[], None]) -> None:
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            function()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        name = frame.f_code.co_filename
        if not name.endswith(TRACED) and not name.startswith("<wholestep step"):
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        if event == "opcode":
            self._count += 1
            if self._count == self._number + 1:
                self.place = f"{name}:{frame.f_lineno}"
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._trace


def _interrupt_everywhere(
    optimizer: str,
    act: Callable[[Training], None],
    *,
    every: int,
    first: int = 0,
    check: Callable[[Training], None] = Training.assert_whole,
) -> int:
    """Interrupt an act at each `every`th opcode, from a state in which updates wait; returns at how many."""
    training = Training(optimizer, number=2)
    for _ in range(3):  # by then all graphs have been compiled
        training.step()
        act(training)
        training.compiled.flush()
    number = first
    while True:
        training.step()
        training.step()
        interrupt = Interrupt(number)
        interrupt.run(lambda: act(training))
        if interrupt.is_over:
            assert number > 100, "the code under test was traced"
            return number
        try:
            check(training)
            training.step()
            check(training)
        except BaseException as error:
            error.add_note(f"interrupted at opcode {number}, {interrupt.place}")
            raise
        number += every


def _look(training: Training) -> None:
    training.num_updates()


def _step_last(training: Training) -> None:
    training.compiled(training.model, training.optimizer, training.x, last=True)
    training.num_returned += 1


def _flush_and_step(training: Training) -> None:
    training.compiled.flush()
    training.step()


ACTS: dict[str, Callable[[Training], None]] = {
    "step": Training.step,
    "flush and step": _flush_and_step,
    "look": _look,
}


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_interrupted_at_many_opcodes(optimizer: str, act: str) -> None:
    _interrupt_everywhere(optimizer, ACTS[act], every=37, first=len(act))


@pytest.mark.slow
@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_interrupted_at_every_opcode(optimizer: str, act: str) -> None:
    assert _interrupt_everywhere(optimizer, ACTS[act], every=1) > 500


@pytest.mark.parametrize("every", [37, pytest.param(1, marks=pytest.mark.slow)])
def test_interrupted_in_the_last_call(every: int) -> None:
    _interrupt_everywhere("sgd", _step_last, every=every, check=Training.assert_finished_ones)


def _exchange_states_and_step(training: Training) -> None:
    """What was held is not what is to be held: it is all made anew."""
    training.compiled.flush()
    for state in training.optimizer.state.values():
        state["step"] = state["step"].clone()
    training.step()


def _assert_held_and_whole(training: Training) -> None:
    training.assert_whole()
    training.step()
    tensors = [state["step"] for state in training.optimizer.state.values()]
    assert {type(tensor) for tensor in tensors} == {GuardedTensor}, "there is something to be seen"
    training.assert_whole()


@pytest.mark.parametrize("every", [37, pytest.param(1, marks=pytest.mark.slow)])
def test_interrupted_where_tensors_are_held_for_the_first_time(every: int) -> None:
    _interrupt_everywhere("adamw", _exchange_states_and_step, every=every, first=5, check=_assert_held_and_whole)


class Alarm(BaseException):
    pass


@pytest.fixture
def _always_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates that cannot wait are as whole as they are in eager: not if a signal comes in the middle of one.

    They could not if somebody looked after each step, nor if somebody held a view. Pytest does: it keeps what is raised
    where Python ignores it (a signal may come while something is collected), and with it the frames it was raised in.
    """
    monkeypatch.setattr(pending, "_TOO_OFTEN", 10**9)
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)


def _on_alarms(training: Training, number: int, handler: Callable[..., None]) -> Iterator[None]:
    """Train while signals come, each at another moment; after each, control is here."""
    before = signal.signal(signal.SIGALRM, handler)
    generator = torch.Generator().manual_seed(0)
    try:
        for _ in range(number):
            seconds = 1e-4 + 2e-3 * float(torch.rand((), generator=generator))
            try:
                signal.setitimer(signal.ITIMER_REAL, seconds)
                while signal.getitimer(signal.ITIMER_REAL)[0]:
                    training.step()
            except Alarm:
                pass
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("_always_waiting")
@pytest.mark.parametrize("number", [25, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_signals_that_raise(optimizer: str, number: int) -> None:
    def handler(*_: object) -> None:
        raise Alarm

    training = Training(optimizer, number=10)
    training.step()
    for _ in _on_alarms(training, number, handler):
        training.assert_whole()


@pytest.mark.usefixtures("_always_waiting")
@pytest.mark.parametrize("number", [25, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_signal_handlers_that_save(optimizer: str, number: int) -> None:
    """They run in the thread that runs the step, in the middle of it, and it goes on afterwards."""
    training = Training(optimizer, number=10)
    training.step()
    seen: list[int] = []

    def handler(*_: object) -> None:
        [updates] = set(training.num_updates())
        assert updates in (training.num_returned, training.num_returned + 1)
        seen.append(updates)

    for _ in _on_alarms(training, number, handler):
        training.assert_whole()
    assert len(seen) == number


# Threads


def _read(training: Training, held: list[Tensor], stop: threading.Event, problems: list[str]) -> None:
    readers: list[Callable[[], float]] = [
        lambda: float(held[0].detach()[0]),
        lambda: float(training.model.counters[1].data[0]),
        lambda: float(training.model.state_dict()["counters.2"][0]),
        lambda: float(held[1].numpy(force=True)[0]),
    ]
    last = [0.0] * len(readers)
    try:
        while not stop.is_set():
            for index, read in enumerate(readers):
                value = read()
                if value < last[index]:
                    problems.append(f"reader {index} saw {value} after {last[index]}")
                last[index] = value
    except BaseException as error:
        problems.append(repr(error))


@pytest.mark.parametrize("number", [300, pytest.param(20_000, marks=pytest.mark.slow)])
def test_reading_threads(number: int) -> None:
    """P5: no exception in any thread, the exact number of updates."""
    training = Training("sgd")
    training.step()
    held: list[Tensor] = list(training.model.parameters())
    stop, problems = threading.Event(), list[str]()
    threads = [threading.Thread(target=_read, args=(training, held, stop, problems)) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(number):
            training.step()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert problems == []
    assert training.num_updates() == [number + 1] * 3
