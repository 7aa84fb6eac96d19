"""How a failure is put into words, written down and noticed."""

from __future__ import annotations

import threading

import pytest
import torch.distributed as dist

from wholestep.pipe import Action
from wholestep.runtime.agreement import plain
from wholestep.runtime.pipeline import failures
from wholestep.runtime.pipeline.failures import Alarm, Watch, sentence


def alarms(number: int) -> list[Alarm]:
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    return [Alarm(store, "0,1,2") for _ in range(number)]


class BrokenStore:
    def check(self, keys: list[str]) -> bool:
        raise RuntimeError("connection reset")

    def compare_set(self, key: str, expected: str, wanted: str) -> bytes:
        raise RuntimeError("connection reset")


def test_the_first_sentence_counts() -> None:
    first, second, third = alarms(3)
    assert third.heard() is None
    assert first.ring("rank 0 failed", 2) is not None
    assert second.ring("rank 0 is gone", 1) is None
    assert [one.heard() for one in (first, second, third)] == ["rank 0 failed"] * 3


def test_whoever_rings_stays_until_others_have_heard_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "_STAY_S", 60.0)
    first, second, third = alarms(3)
    stay = first.ring("rank 0 failed", 2)
    assert stay is not None
    thread = threading.Thread(target=stay)
    thread.start()
    for listener in (second, second):  # who hears it twice counts once
        listener.heard()
        thread.join(0.1)
        assert thread.is_alive()
    third.heard()
    thread.join(30)
    assert not thread.is_alive()


def test_nobody_stays_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "_STAY_S", 0.01)
    (first,) = alarms(1)
    stay = first.ring("rank 0 failed", 2)
    assert stay is not None
    stay()


def test_a_store_that_is_gone() -> None:
    broken = Alarm(BrokenStore(), "0")  # pyright: ignore[reportArgumentType]
    with pytest.raises(RuntimeError, match="connection reset"):
        broken.heard()
    called = threading.Semaphore(0)
    Watch(broken, called.release).is_on = True
    assert called.acquire(timeout=30)
    assert broken.ring("rank 1 is gone", 1) is None
    assert broken.heard() == "rank 1 is gone"


def test_a_watch_calls_once_when_it_is_on() -> None:
    (bell, other), called = alarms(2), threading.Semaphore(0)
    watch = Watch(bell, called.release)
    other.ring("rank 1 failed", 0)
    assert not called.acquire(timeout=0.6)
    watch.is_on = True
    assert called.acquire(timeout=30)
    assert not called.acquire(timeout=0.6)


def test_a_watch_that_is_stopped_has_no_thread() -> None:
    before = set(threading.enumerate())
    watch = Watch(alarms(1)[0], lambda: None)
    (own,) = set(threading.enumerate()) - before
    watch.stop()
    own.join(30)
    assert not own.is_alive()


@pytest.mark.parametrize(
    ("action", "error", "text"),
    [
        ("2F3", ValueError("no label"), "rank 1 failed in 2F3 (stage 2, micro-batch 3): ValueError: no label"),
        ("0W0", KeyboardInterrupt(), "rank 1 failed in 0W0 (stage 0, micro-batch 0): KeyboardInterrupt"),
        (None, KeyError("x"), "rank 1 failed: KeyError: 'x'"),
    ],
)
def test_a_failure_in_words(action: str | None, error: BaseException, text: str) -> None:
    assert sentence(1, None if action is None else Action.from_text(action), error) == text


def test_what_torch_says_of_a_connection_without_its_sources() -> None:
    error = RuntimeError("[/torch/gloo/pair.cc:553] Connection closed by peer [127.0.0.1]:80. It crashed.\nframe #0")
    assert plain(error) == "Connection closed by peer [127.0.0.1]:80. It crashed."
