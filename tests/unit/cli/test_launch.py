"""Ranks that are started together end together: what they say, how they fail, and that none is left behind."""

from __future__ import annotations

import inspect
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from wholestep.cli.launch import end_with_launcher, launch, reporting_errors
from wholestep.errors import RankError, WholestepError

# What a rank has before its own lines. It tells of an error as `reporting_errors` would, without importing torch.
HEAD = """
import os, signal, sys, threading, time
from pathlib import Path

rank, folder = int(os.environ["RANK"]), Path(sys.argv[-1])

def fail(text):
    (folder / f"error{rank}").write_text(text)
    sys.exit(1)

def wait_for(file):
    while not (folder / file).exists():
        time.sleep(0.01)
"""
SLEEP_S = 60


def command(*lines: str) -> list[str]:
    return [sys.executable, "-c", HEAD + "\n".join(lines)]


def test_only_rank_0_is_heard_and_its_exit_code_counts(capfd: pytest.CaptureFixture[str]) -> None:
    told = "print(rank, os.environ['WORLD_SIZE'], os.environ['LOCAL_RANK'], os.environ['LOCAL_WORLD_SIZE'])"
    assert launch(command(told, "print('progress', rank, file=sys.stderr)", "sys.exit(1 if rank == 0 else 0)"), 3) == 1
    assert capfd.readouterr() == ("0 3 0 3\n", "progress 0\n")
    assert launch(command(), 2) == 0


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_is_told_with_its_rank_and_ends_the_others(failing: int, capfd: pytest.CaptureFixture[str]) -> None:
    started = time.monotonic()
    with pytest.raises(RankError, match=f"^rank {failing} of 2 failed: line 7: something is wrong$"):
        launch(command(f"fail('line 7: something is wrong') if rank == {failing} else time.sleep({SLEEP_S})"), 2)
    assert time.monotonic() - started < SLEEP_S / 4
    assert capfd.readouterr() == ("", "")


def test_the_first_to_fail_is_the_one_to_blame() -> None:
    lines = ["if rank == 0:", "    wait_for('error1')", "    time.sleep(0.05)", "fail(f'error of rank {rank}')"]
    with pytest.raises(RankError, match=r"^rank 1 of 2 failed: error of rank 1$"):
        launch(command(*lines), 2)


def test_a_rank_that_is_killed_is_to_blame_whatever_the_others_say() -> None:
    lines = [
        "if rank == 0: fail('Connection closed by peer')",
        "print('out of luck', file=sys.stderr, flush=True)",
        "wait_for('error0')",
        "os.kill(os.getpid(), signal.SIGKILL)",
    ]
    with pytest.raises(RankError) as caught:
        launch(command(*lines), 2)
    assert str(caught.value) == "rank 1 of 2 failed: ended by SIGKILL\nout of luck"


def test_a_rank_that_fails_before_it_can_tell() -> None:
    with pytest.raises(RankError) as caught:
        launch(command("1 / (1 - rank)"), 2)
    assert str(caught.value).startswith("rank 1 of 2 failed: Traceback")
    assert str(caught.value).endswith("ZeroDivisionError: division by zero")


def test_errors_of_ours_are_a_sentence_others_a_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank, error in enumerate([WholestepError("line 7: something is wrong"), KeyError("label")]):
        with pytest.raises(SystemExit) as left, reporting_errors(tmp_path, rank):
            raise error
        assert left.value.code == 1
    assert (tmp_path / "error0").read_text() == "line 7: something is wrong"
    assert (tmp_path / "error1").read_text().startswith("Traceback")
    assert (tmp_path / "error1").read_text().endswith("KeyError: 'label'")
    assert capsys.readouterr() == ("", "")


LAUNCHER = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where tests run in the background of a shell
from wholestep.cli import demo, main
from wholestep.cli.launch import launch

demo.launch = lambda command, num_ranks: launch([sys.executable, "-c", *sys.argv[1:]], num_ranks)
sys.exit(main(["demo"]))
"""
RANK = f"""{HEAD}
{inspect.getsource(end_with_launcher)}
end_with_launcher()
(Path(sys.argv[1]) / str(rank)).write_text(f"{{os.getpid()}} {{folder}}")
time.sleep({SLEEP_S})
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("number", "code", "said"), [(signal.SIGINT, 130, "wholestep: interrupted"), (signal.SIGKILL, -9, "")]
)
def test_whatever_ends_the_launcher_ends_its_ranks(number: int, code: int, said: str, tmp_path: Path) -> None:
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, RANK, str(tmp_path)],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stderr=subprocess.PIPE,
        text=True,
    )
    notes = [tmp_path / str(rank) for rank in range(2)]
    try:
        wait_until(lambda: all(note.exists() and note.read_text() for note in notes))
        launcher.send_signal(number)
        errors = launcher.communicate(timeout=SLEEP_S / 2)[1]
    finally:
        launcher.kill()
    assert launcher.returncode == code
    assert errors.splitlines()[1:] == ([said] if said else [])
    found = [note.read_text().split() for note in notes]
    wait_until(lambda: not any(is_alive(pid) for pid, _ in found))
    if number == signal.SIGINT:
        assert not Path(found[0][1]).exists()


def wait_until(condition: Callable[[], bool], timeout_s: float = SLEEP_S / 2) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_alive(pid: str) -> bool:
    """Whether a process runs; one that nobody has buried yet does not."""
    shown = subprocess.run(["ps", "-o", "stat=", "-p", pid], capture_output=True, text=True).stdout.strip()
    return bool(shown) and not shown.startswith("Z")
