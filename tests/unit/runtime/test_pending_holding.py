"""Tensors are held all at once or not at all: whatever fails on the way, nobody is left with one that is half held."""

from __future__ import annotations

import _thread
import gc
import operator
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from tests.waiting import WORDS, Pair, X, is_pending
from torch import Tensor

from wholestep import _waiting_torch
from wholestep.errors import WholestepError

pytestmark = pytest.mark.usefixtures("nothing_waits")


class _FailsAt:
    """Stands in for what makes a call of C, one of which fails: the `number`th."""

    def __init__(self, make: Callable[..., Callable[[], Any]], number: int) -> None:
        self._make = make
        self._number = number

    def __call__(self, *args: Any) -> Callable[[], Any]:
        self._number -= 1
        return partial(operator.truediv, 1, 0) if self._number == 0 else self._make(*args)


def _assert_usual() -> None:
    assert torch._C._is_torch_function_enabled()  # pyright: ignore[reportPrivateUsage]
    assert gc.isenabled()


@pytest.fixture(params=["alone", "beside another thread"])
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """Memory is taken from tensors only where no other thread may be about to read there."""
    if request.param == "alone":
        yield
        return
    over = threading.Event()
    other = threading.Thread(target=over.wait)
    other.start()
    yield
    over.set()
    other.join()


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("number", [1, 2, 5])
def test_a_call_that_fails_while_tensors_are_being_held(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair("sgd")
    pair.steps(2)
    pair.assert_same()
    with monkeypatch.context() as patch:
        patch.setattr(_waiting_torch, "setting_data", _FailsAt(_waiting_torch.setting_data, number))
        with pytest.raises(ZeroDivisionError):
            pair.ours.step(pair.ours.model, pair.ours.optimizer, X, WORDS)
    _assert_usual()
    for parameter in pair.ours.parameters:
        assert bool(parameter.detach().isfinite().all())
    assert not is_pending(pair.ours)


@pytest.mark.parametrize("number", [1, 2, 4])
def test_a_call_that_fails_while_tensors_are_given_back(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair("sgd")
    pair.steps(3)
    with monkeypatch.context() as patch:
        patch.setattr(_waiting_torch, "setting_data", _FailsAt(_waiting_torch.setting_data, number))
        with pytest.raises(ZeroDivisionError):
            pair.compiled.flush()
    _assert_usual()
    pair.assert_same()
    pair.steps(2)
    assert is_pending(pair.ours)
    pair.assert_same()


def test_memory_is_there_for_threads_that_threading_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that C starts, or `_thread`: one may be reading when tensors are held."""
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    begun, over, gone = threading.Event(), threading.Event(), threading.Event()

    def run() -> None:
        begun.set()
        over.wait()
        gone.set()

    _thread.start_new_thread(run, ())
    begun.wait()
    pair = Pair("sgd")
    pair.steps(2)
    assert is_pending(pair.ours)
    with _waiting_torch.past_traps():
        storages = [*map(torch._C.TensorBase.untyped_storage, pair.ours.parameters)]
    assert is_pending(pair.ours)
    assert all(storage.data_ptr() for storage in storages)
    del storages
    over.set()
    gone.wait()
    pair.steps(2)
    pair.assert_same()


READS: dict[str, Callable[[Tensor], Tensor]] = {
    "in Python": lambda parameter: parameter.detach().clone(),
    "in C++": lambda parameter: torch.ops.aten.mul.Tensor(parameter, 1).detach(),
}


@pytest.mark.parametrize("name", READS)
def test_what_nobody_holds_is_given_back(name: str) -> None:
    pair = Pair("sgd")
    pair.steps(3)
    pair.assert_same()
    waiting = pair.compiled._current.rotation.pending
    waiting._last_grip.holding()()  # as if whoever did so had been thrown out of it
    for expected, found in zip(pair.eager.parameters, pair.ours.parameters, strict=True):
        assert torch.equal(READS[name](found), expected)
    pair.steps(2)
    pair.assert_same()


def test_what_one_step_holds_is_not_given_back_for_another() -> None:
    """Two graphs on one model, of which the second has left work: the first has held the same tensors before."""
    pair = Pair("sgd")
    pair.steps(2)
    pair.step(X[:4], WORDS[:4])
    first, second = (known.rotation.pending for known in pair.compiled._specializations)
    assert second.is_waiting
    first.let_go(pair.ours.parameters[0])
    assert is_pending(pair.ours)
    pair.assert_same()


def test_no_garbage_is_collected_while_calls_are_made_at_once() -> None:
    """Finalizers are Python: they would run between two tensors."""
    found: list[bool] = []
    _waiting_torch.past_everything([partial(found.extend, map(operator.call, [gc.isenabled]))])
    assert found == [False]
    _assert_usual()


def test_steps_of_two_threads_that_wait_for_each_other_are_refused() -> None:
    """As if another thread ran the second step, and waited for what this one has yet to finish."""
    pairs = [Pair("sgd"), Pair("sgd")]
    for pair in pairs:
        pair.steps(2)
    first, second = (pair.compiled._current.rotation.pending for pair in pairs)
    another = threading.get_ident() + 1
    first.runner, second.runner = threading.get_ident(), another
    second.settle()  # it waits for nobody yet
    pairs[1].step()
    second.runner = another
    first._readers.append(another)
    with pytest.raises(WholestepError, match="run in two threads, and each waits for an update"):
        second.settle()
    first._readers.remove(another)
    first.runner = second.runner = None
    for pair in pairs:
        pair.assert_same()


class _Unreadable(Mapping[str, Any]):
    """An argument that fails when it is asked for what it holds."""

    def __getitem__(self, key: str) -> Any:
        raise KeyError(key)

    def __iter__(self) -> Iterator[str]:
        raise ZeroDivisionError

    def __len__(self) -> int:
        return 1


def test_measuring_gives_nothing_back_before_it_is_applied() -> None:
    pair = Pair("sgd")
    pair.steps(3)
    with pytest.raises(ZeroDivisionError):
        pair.compiled.measure(pair.ours.model, pair.ours.optimizer, X, _Unreadable())
    assert is_pending(pair.ours)
    pair.assert_same()
