"""Ranks compare notes before they communicate: a mismatch, a failure or a silence is an error on all (SAFE-1)."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import FileStore, HashStore  # pyright: ignore[reportPrivateImportUsage]

from wholestep import _torch
from wholestep.errors import RankError, WholestepError
from wholestep.runtime import agreement, job_store
from wholestep.runtime.agreement import Ranks, is_due, plain, require_same

Run = Callable[[Ranks], Any]


@pytest.fixture(name="store", params=["hash", "file"])
def _store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    store = HashStore() if request.param == "hash" else FileStore(str(tmp_path / "store"), -1)
    monkeypatch.setattr(_torch, "group_store", lambda group: store)
    monkeypatch.setattr(agreement, "_POLL_S", 0.05)
    return store


def ranks_of(world: int, *, number: int = 1, timeout_s: float = 20.0, group: str = "g") -> list[Ranks]:
    fake: Any = SimpleNamespace(group_name=group)
    return [Ranks(fake, rank, world, number, timeout_s) for rank in range(world)]


def together(ranks: list[Ranks], *runs: Run) -> list[Any]:
    """What each rank's function returns or raises; one function serves all if there is only one."""
    results: list[Any] = [None] * len(ranks)

    def work(index: int) -> None:
        try:
            results[index] = runs[index % len(runs)](ranks[index])
        except BaseException as error:
            results[index] = error

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    return results


# Exchange


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("world", [1, 2, 5])
def test_everybody_hears_everybody(world: int) -> None:
    answers = together(ranks_of(world), lambda ranks: ranks.exchange("facts", {"rank": ranks.rank, "sizes": [1, 2.5]}))
    assert answers == [[{"rank": rank, "sizes": [1, 2.5]} for rank in range(world)]] * world


@pytest.mark.usefixtures("store")
def test_a_slow_rank_is_waited_for() -> None:
    def slow(ranks: Ranks) -> Any:
        time.sleep(0.3)
        return ranks.exchange("facts", "slow")

    answers = together(ranks_of(2), lambda ranks: ranks.exchange("facts", "fast"), slow)
    assert answers == [["fast", "slow"]] * 2


@pytest.mark.usefixtures("store")
def test_moments_steps_and_groups_do_not_mix() -> None:
    def talk(ranks: Ranks) -> Any:
        return [ranks.exchange(moment, f"{ranks.name}{ranks.number}{moment}") for moment in ("a", "b")]

    for group in ("g", "h"):
        for number in (1, 2):
            answers = together(ranks_of(2, number=number, group=group), talk)
            assert answers == [[[f"{group}{number}{moment}"] * 2 for moment in ("a", "b")]] * 2


@pytest.mark.usefixtures("store")
def test_none_is_an_answer() -> None:
    """Only rank 0 has facts."""
    answers = together(ranks_of(3), lambda ranks: ranks.exchange("facts", None if ranks.rank else {"a": 1}))
    assert answers == [[{"a": 1}, None, None]] * 3


# Failures


def compile_and_exchange(ranks: Ranks, *, failing: int, error: BaseException) -> Any:
    with ranks.failing_together("gradients"):
        if ranks.rank == failing:
            raise error
    return ranks.exchange("gradients", "fine")


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize(
    ("error", "text"),
    [(ValueError("model.py:3: no such layer"), "model.py:3: no such layer"), (KeyError(), "KeyError")],
)
def test_a_rank_that_fails_fails_all(error: Exception, text: str) -> None:
    results = together(ranks_of(3), lambda ranks: compile_and_exchange(ranks, failing=1, error=error))
    assert results[1] is error
    for result in (results[0], results[2]):
        assert isinstance(result, RankError)
        assert isinstance(result, WholestepError)
        assert str(result) == f"rank 1 could not compile the step: {text}"


@pytest.mark.usefixtures("store")
def test_the_first_failing_rank_is_named() -> None:
    def run(ranks: Ranks) -> Any:
        with ranks.failing_together("gradients"):
            if ranks.rank:
                raise ValueError(f"of rank {ranks.rank}")
        return ranks.exchange("gradients", "fine")

    assert str(together(ranks_of(3), run)[0]) == "rank 1 could not compile the step: of rank 1"


@pytest.mark.usefixtures("store")
def test_disagreement_is_not_reported_as_a_failure() -> None:
    """All ranks have found it out by themselves."""

    def run(ranks: Ranks) -> Any:
        with ranks.failing_together("zeros"):
            require_same("the plans", ranks.exchange("plan", ranks.rank))

    results = together(ranks_of(2), run)
    assert [str(result) for result in results] == ["the plans differ between ranks: 0 on rank 0 and 1 on rank 1"] * 2
    late = together(ranks_of(2), lambda ranks: ranks.exchange("zeros", "fine"))
    assert late == [["fine", "fine"]] * 2


@pytest.mark.usefixtures("store")
def test_after_a_failure_the_next_attempt_starts_afresh() -> None:
    together(ranks_of(2), lambda ranks: compile_and_exchange(ranks, failing=0, error=ValueError("once")))
    answers = together(ranks_of(2), lambda ranks: ranks.exchange("2/gradients", ranks.rank))
    assert answers == [[0, 1]] * 2


@pytest.mark.usefixtures("store")
def test_a_rank_that_fails_is_heard_at_a_later_moment_of_the_call() -> None:
    """Some had nothing to compile and have gone on."""

    def run(ranks: Ranks) -> Any:
        if ranks.rank:
            return ranks.exchange("4/options", "fine")
        with ranks.failing_together("4/step"):
            raise ValueError("no such layer")

    results = together(ranks_of(2), run)
    assert isinstance(results[0], ValueError)
    assert str(results[1]) == "rank 0 could not compile the step: no such layer"


# Silence


@pytest.mark.usefixtures("store")
def test_a_rank_that_never_comes_is_named_in_time() -> None:
    [present, _, also] = ranks_of(3, timeout_s=0.4)
    started = time.monotonic()
    results = together([present, also], lambda ranks: ranks.exchange("gradients", "here"))
    assert time.monotonic() - started < 5
    for result, rank in zip(results, (0, 2), strict=True):
        assert isinstance(result, RankError)
        assert re.match(rf"rank 1 has not compiled this step \d s after rank {rank} did: ", str(result))
        assert "ranks must call the step equally often" in str(result)


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("store", ["hash"], indirect=True)  # a file is looked at every second only
def test_a_long_wait_is_remarked_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "_SAY_SO_AFTER_S", 0.1)

    def slow(ranks: Ranks) -> Any:
        time.sleep(0.6)
        return ranks.exchange("facts", "slow")

    with caplog.at_level(logging.WARNING, "wholestep"):
        answers = together(ranks_of(2), lambda ranks: ranks.exchange("facts", "fast"), slow)
    assert answers == [["fast", "slow"]] * 2
    assert caplog.messages == ["waiting for rank 1 to compile its step"]


# Differences


def test_equal_values_pass() -> None:
    require_same("the plans", [])
    require_same("the plans", [{"a": 1}] * 3)


@pytest.mark.parametrize(
    ("by_rank", "text"),
    [
        ([1, 1, 2], "1 on rank 0 and 2 on rank 2"),
        ([["a"], ["a", "b"]], "['a'] on rank 0 and ['a', 'b'] on rank 1"),
        ([{"mb": 25, "reduce": "mean"}, {"mb": 25, "reduce": "sum"}], "reduce is 'mean' on rank 0 and 'sum' on rank 1"),
        ([{"a": 1}, {"a": 1, "b": 2}], "b is missing on rank 0 and 2 on rank 1"),
        ([{"a": 1, "b": 2}, {"a": 1}], "b is 2 on rank 0 and missing on rank 1"),
        ([{"a": 1}, {"b": 1}], "a is 1 on rank 0 and missing on rank 1, which has b instead"),
        ([None, "x"], "missing on rank 0 and 'x' on rank 1"),
    ],
)
def test_differences_are_named(by_rank: list[Any], text: str) -> None:
    with pytest.raises(RankError) as caught:
        require_same("the options", by_rank)
    assert str(caught.value) == f"the options differ between ranks: {text}"


@pytest.mark.usefixtures("store")
def test_facts_are_compared_by_marks_and_named_in_full() -> None:
    facts = {"the parameters": {"a": "(3,)", "b": "(4,)"}, "the optimizers": {"lr": 0.1}}
    assert together(ranks_of(3), lambda ranks: ranks.require_agreement("1/step", facts)) == [None] * 3
    turned = {"the optimizers": {"lr": 0.1}, "the parameters": {"b": "(4,)", "a": "(3,)"}}
    by_name = together(
        ranks_of(2), lambda r: r.require_agreement("2/step", facts), lambda r: r.require_agreement("2/step", turned)
    )
    assert by_name == [None, None]
    other = facts | {"the optimizers": {"lr": 0.2}}
    results = together(
        ranks_of(2), lambda r: r.require_agreement("3/step", facts), lambda r: r.require_agreement("3/step", other)
    )
    text = "the optimizers differ between ranks: lr is 0.1 on rank 0 and 0.2 on rank 1"
    assert [str(result) for result in results] == [text] * 2


def test_what_changes_with_every_call_is_compared_now_and_then() -> None:
    due = [number for number in range(5000) if is_due(number)]
    assert due == [2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 3072, 4096]


# A real group


@pytest.fixture(name="group")
def _group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_steps_of_a_group_are_numbered(group: dist.ProcessGroup) -> None:
    first, second = Ranks.of(group, 3.0), Ranks.of(group, 3.0)
    assert (first.rank, first.world, first.name) == (0, 1, group.group_name)
    assert (first.number, second.number) == (1, 2)
    assert first.exchange("facts", 1) == [1]
    assert second.exchange("facts", 2) == [2]
    other: Any = dist.new_group([0])
    assert Ranks.of(other, 3.0).number == 1


def test_a_life_of_its_own_for_every_group_and_every_restart(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store may outlive both: what the dead have written there is not read."""
    room = Ranks.of(group, 3.0).room
    agreement._rooms.clear()  # as in a process that makes its group anew
    assert Ranks.of(group, 3.0).room != room
    agreement._rooms.clear()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    restarted = Ranks.of(group, 3.0)
    assert (restarted.number, restarted.room) == (1, "wholestep/1/0/1")


def test_nobody_waits_longer_than_the_group(group: dist.ProcessGroup) -> None:
    assert Ranks.of(group, 3.0).timeout_s == 3.0
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=7))
    assert Ranks.of(group, 300.0).timeout_s == 7.0


def test_what_torch_says_of_a_connection_is_shortened() -> None:
    error = RuntimeError(
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:57544. This "
        "is typically caused by a remote worker crashing. Check the logs of the remote worker before reporting an "
        "error. GLHF!\nException raised from here"
    )
    assert plain(error) == "Connection closed by peer [127.0.0.1]:57544"


# A store that does not answer


class StoppedStore:
    """As if the process that has it were stopped: torch waits for ever, but for keys."""

    def __init__(self, *, stopped: bool = True) -> None:
        self.is_stopped = stopped
        self._over = threading.Event()

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        raise dist.DistStoreError("the time is up")

    def set(self, key: str, value: str) -> None:
        if self.is_stopped:
            self._over.wait()

    def check(self, keys: list[str]) -> bool:
        return self._over.wait()

    def release(self) -> None:
        self._over.set()


ASKING: dict[str, Callable[[Ranks], Any]] = {
    "before it answers a rank": lambda ranks: ranks.exchange("facts", 1),
    "while a word is waited for": lambda ranks: ranks.require_none_failed("1/step"),
    "while others may agree anew": lambda ranks: ranks.require_none_asks("1/step"),
}


@pytest.mark.parametrize("is_stopped", [True, False])
@pytest.mark.parametrize("name", ASKING)
def test_a_store_that_does_not_answer(name: str, is_stopped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    store = StoppedStore(stopped=is_stopped)
    monkeypatch.setattr(_torch, "group_store", lambda group: store)
    monkeypatch.setattr(agreement, "_POLL_S", 0.05)
    monkeypatch.setattr(job_store, "_LEAST_S", 0.2)
    started = time.monotonic()
    for _ in range(2):
        with pytest.raises(RankError, match=r"rank 0 cannot reach the store .* is gone, or hangs"):
            ASKING[name](ranks_of(2, timeout_s=0.2)[0])
    assert time.monotonic() - started < 2
    store.release()
