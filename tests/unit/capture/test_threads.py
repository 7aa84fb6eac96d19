"""A capture and the other threads of a process: they take turns to capture, and eager code runs as ever."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.twins import square_step
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import wholestep

capturing = importlib.import_module("wholestep.capture.capture")


def made(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    return model, torch.optim.AdamW(model.parameters())


def eager_with_everything(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> list[Any]:
    """What a trace replaces in torch: schedulers, checkpoints, saved tensors, backward, clearing gradients."""
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    packed: list[Tensor] = []
    state = torch.get_rng_state()
    assert type(state) is Tensor
    for _ in range(2):
        optimizer.zero_grad()
        with saved_tensors_hooks(lambda tensor: packed.append(tensor) or tensor, lambda tensor: tensor):
            output = checkpoint(model, batch, use_reentrant=False)
        output.square().mean().backward()
        optimizer.step()
        scheduler.step()
    rate = optimizer.param_groups[0]["lr"]
    return [rate, len(packed), *[parameter.detach().clone() for parameter in model.parameters()]]


def during_a_trace(monkeypatch: pytest.MonkeyPatch, visit: Callable[[], None]) -> None:
    """Let something happen while a step is traced, in the thread that traces it."""
    original = capturing.choose

    def choose(recorder: Any, *args: Any) -> Any:
        recorder.is_deaf = True  # what happens is not the step's
        try:
            visit()
        finally:
            recorder.is_deaf = False
        return original(recorder, *args)

    monkeypatch.setattr(capturing, "choose", choose)


def test_threads_that_capture_at_once_train_as_in_eager() -> None:
    batch = torch.randn(6, 4)
    pairs = [made(seed) for seed in range(3)]
    steps = [wholestep.compile(lambda *args: square_step(*args)) for _ in pairs]
    barrier = threading.Barrier(len(pairs))
    errors: list[BaseException] = []

    def work(number: int) -> None:
        barrier.wait()
        try:
            for _ in range(3):
                steps[number](*pairs[number], batch)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(pairs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    for seed, (model, _) in enumerate(pairs):
        eager = made(seed)
        for _ in range(3):
            square_step(*eager, batch)
        for one, other in zip(model.parameters(), eager[0].parameters(), strict=True):
            assert torch.equal(one, other)


def test_eager_code_of_another_thread_runs_on_during_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = torch.randn(6, 4)
    expected = eager_with_everything(*made(), batch)
    other = made()
    found: list[Any] = []

    def visit() -> None:
        thread = threading.Thread(target=lambda: found.extend(eager_with_everything(*other, batch)))
        thread.start()
        thread.join()

    during_a_trace(monkeypatch, visit)
    model, optimizer = made(1)
    step = wholestep.compile(square_step)
    step(model, optimizer, batch)
    assert found[:2] == expected[:2]
    assert all(map(torch.equal, found[2:], expected[2:]))
    assert {call.module for call in step.captured.trail.calls} == {"", "0", "1", "2"}
    twin = made(1)
    square_step(*twin, batch)
    assert all(map(torch.equal, model.parameters(), twin[0].parameters()))


def test_a_thread_that_calls_a_model_waits_for_the_capture_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = torch.randn(6, 4)
    model, optimizer = made()
    found: list[Any] = []

    def look() -> None:
        try:
            with torch.no_grad():
                found.append(model(batch))
        except RuntimeError as error:
            found.append(error)

    threads: list[threading.Thread] = []

    def visit() -> None:
        threads.append(threading.Thread(target=look))
        threads[-1].start()
        threads[-1].join(0.2)  # it cannot end before the trace does

    during_a_trace(monkeypatch, visit)
    wholestep.compile(square_step).prepare(model, optimizer, batch)
    for thread in threads:
        thread.join()
    assert found
    assert all(torch.equal(output, model(batch)) for output in found)


def test_a_capture_that_fails_while_threads_run_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """What other threads do to twins cannot be seen; the error names them as a possible cause."""
    model, optimizer = made()

    def visit() -> None:
        raise RuntimeError("a twin is not what it was")

    during_a_trace(monkeypatch, visit)
    step = wholestep.compile(square_step)
    is_over = threading.Event()
    thread = threading.Thread(target=is_over.wait)
    thread.start()
    try:
        step(model, optimizer, torch.randn(6, 4))  # raises in the trace, and not in eager, as is seen then
        with pytest.raises(wholestep.CaptureError, match="none of them may look at the model"):
            step(model, optimizer, torch.randn(6, 4))
    finally:
        is_over.set()
        thread.join()
