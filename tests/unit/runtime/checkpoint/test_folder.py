"""A checkpoint is complete or it is not there: whatever moment a process dies at, whatever happens to its files."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import wholestep
from wholestep.errors import CheckpointError
from wholestep.runtime.checkpoint import folder as folders
from wholestep.runtime.checkpoint import lock as locks
from wholestep.runtime.checkpoint.writing import Draft


def save(folder: Path, *steps: int, keep: int | None = None) -> wholestep.Checkpoints:
    checkpoints = wholestep.Checkpoints(folder, keep=keep)
    for step in steps:
        checkpoints.save(step, position={"seen": step}, wait=True)
    return checkpoints


def resumed(folder: Path) -> int:
    """The step that a new process resumes from, checked against what was saved there."""
    position: dict[str, int] = {}
    step = wholestep.Checkpoints(folder).resume(position=position)
    assert position == ({"seen": step} if step else {})
    return step


def names(folder: Path) -> list[str]:
    """What is in a folder, without the lock of whoever saves there."""
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


class Died(BaseException):
    """The process is gone: nothing that cleans up may count on running."""


class Disk:
    """Notes what is done to the disk, and dies before the operation with a given number.

    The writer runs in the thread of whoever saves, where death can be seen.
    """

    def __init__(self, patch: pytest.MonkeyPatch, dies_at: int | None = None) -> None:
        self.log: list[tuple[str, str]] = []
        self._dies_at = dies_at
        for name in ("mkdir", "open", "fsync", "rename", "replace", "unlink", "rmdir"):
            patch.setattr(os, name, self._watched(name, getattr(os, name)))
        patch.setattr(threading.Thread, "start", threading.Thread.run)
        patch.setattr(threading.Thread, "join", lambda thread: None)

    def _watched(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if len(self.log) == self._dies_at:
                raise Died
            target = os.readlink(f"/proc/self/fd/{args[0]}") if isinstance(args[0], int) else str(args[0])
            self.log.append((name, Path(target).name))
            return function(*args, **kwargs)

        return call


def is_saved_before(folder: Path, number: int) -> bool:
    """Save step 3, and die before operation `number` if there are as many."""
    with pytest.MonkeyPatch.context() as patch:
        Disk(patch, dies_at=number)
        try:
            save(folder, 3, keep=1)
        except Died:
            return False
        return True


def test_death_at_every_operation_leaves_the_last_one_or_the_new_one(tmp_path: Path) -> None:
    """Before each thing that is done to the disk in turn; the next save then works, and clears what was left."""
    outcomes: list[int] = []
    good = tmp_path / "good"
    save(good, 1, 2)
    is_saved = False
    while not is_saved:
        folder = tmp_path / str(len(outcomes))
        shutil.copytree(good, folder)
        is_saved = is_saved_before(folder, len(outcomes))
        outcomes.append(resumed(folder))
        save(folder, 4, keep=1)
        assert names(folder) == ["step-00000004"]
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {2, 3}
    assert min(outcomes.count(2), outcomes.count(3)) > 4


def test_everything_is_on_disk_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)
    save(tmp_path, 1, keep=1)
    done = [(name, target.split("-")[0]) for name, target in disk.log]
    renamed = done.index(("rename", ".writing"))
    synced = [target for name, target in done[:renamed] if name == "fsync"]
    assert set(synced) == {"__0_0.distcp", ".metadata.tmp", "manifest.json", ".writing"}
    assert synced[-2:] == ["manifest.json", ".writing"]
    assert ("fsync", tmp_path.name) in [(name, target) for name, target in disk.log[renamed:]]


def cut_off(path: Path) -> None:
    file = path / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])


def change_a_bit(path: Path) -> None:
    file = path / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def lose(name: str) -> Callable[[Path], None]:
    return lambda path: (path / name).unlink()


def tamper(path: Path) -> None:
    file = path / "manifest.json"
    file.write_bytes(file.read_bytes().replace(b'"step":3', b'"step":9'))


def rewrite(**changes: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        content = json.loads((path / "manifest.json").read_text()) | changes
        content.pop("fingerprint")
        content["fingerprint"] = folders.strict_json.fingerprint(content)
        (path / "manifest.json").write_text(json.dumps(content))

    return change


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (cut_off, "__0_0.distcp has"),
        (change_a_bit, "__0_0.distcp is damaged: its SHA-256 is not that of the manifest"),
        (lose("__0_0.distcp"), "__0_0.distcp is missing"),
        (lose(".metadata"), ".metadata is missing"),
        (lose("manifest.json"), "it has no manifest"),
        (lambda path: (path / "manifest.json").write_text("{"), "its manifest is damaged: manifest.json is no JSON"),
        (tamper, "its manifest is damaged: it does not have its own fingerprint"),
        (rewrite(format=2), "it is of format 2, which is not known here"),
        (rewrite(files={"../x": {"num_bytes": 1, "sha256": ""}}), "its manifest names '../x', which is no file of"),
        (rewrite(files={"x": {"num_bytes": -1, "sha256": ""}}), "its manifest is damaged: num_bytes is -1"),
        (rewrite(files=[]), "its manifest is damaged: files is an object"),
    ],
)
def test_a_torn_checkpoint_is_passed_over(
    damage: Callable[[Path], None], reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 1, 2, 3)
    damage(tmp_path / "step-00000003")
    assert resumed(tmp_path) == 2
    assert f"step-00000003 is passed over: {reason}" in caplog.text.replace(str(tmp_path) + "/", "")


def test_a_torn_one_stands_in_nobodys_way_and_goes_when_it_is_passed(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 5)
    cut_off(tmp_path / "step-00000005")
    checkpoints = wholestep.Checkpoints(tmp_path, keep=2)
    assert checkpoints.resume(position={}) == 2
    for step in (3, 5):
        checkpoints.save(step, position={"seen": step}, wait=True)
    assert names(tmp_path) == ["step-00000003", "step-00000005-1"]
    assert resumed(tmp_path) == 5


def test_only_the_last_ones_are_kept(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3, 4, keep=2)
    assert names(tmp_path) == ["step-00000003", "step-00000004"]


def test_nothing_goes_before_the_new_one_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = save(tmp_path, 1, keep=1)
    monkeypatch.setattr(Draft, "finish", fail)
    checkpoints.save(2, position={})
    with pytest.raises(CheckpointError, match="the checkpoint of step 2 was not written: no space left on device"):
        checkpoints.wait()
    checkpoints.wait()  # an error is told once
    assert resumed(tmp_path) == 1


def fail(draft: Draft) -> Path:
    raise OSError("no space left on device")


def test_files_that_rank_0_does_not_see(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with folders that each machine has for itself."""
    write = Draft._write

    def elsewhere(draft: Draft) -> Any:
        written = write(draft)
        for file in draft._temporary.iterdir():
            file.unlink()
        return written

    monkeypatch.setattr(Draft, "_write", elsewhere)
    with pytest.raises(
        CheckpointError, match=r"__0_0\.distcp is missing\): the folder must be one that all machines share"
    ):
        wholestep.Checkpoints(tmp_path).save(1, position={}, wait=True)


def test_the_next_save_raises_what_the_last_one_met(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = wholestep.Checkpoints(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Draft, "finish", fail)
        checkpoints.save(1, position={})
        with pytest.raises(CheckpointError, match="step 1 was not written"):
            checkpoints.save(2, position={})
    checkpoints.save(3, position={"seen": 3}, wait=True)
    assert names(tmp_path) == ["step-00000003"]


def test_a_block_that_fails_is_what_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Draft, "finish", fail)
    with pytest.raises(ZeroDivisionError), wholestep.Checkpoints(tmp_path) as checkpoints:
        save_and_fail(checkpoints)


def save_and_fail(checkpoints: wholestep.Checkpoints) -> None:
    checkpoints.save(1, position={})
    raise ZeroDivisionError


def test_there_is_never_more_than_one_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finish, at_work, most = Draft.finish, [0], [0]

    def counted(draft: Draft) -> Path:
        at_work[0] += 1
        most[0] = max(most[0], at_work[0])
        try:
            return finish(draft)
        finally:
            at_work[0] -= 1

    monkeypatch.setattr(Draft, "finish", counted)
    checkpoints = wholestep.Checkpoints(tmp_path)
    for step in range(1, 6):
        checkpoints.save(step, position={"seen": step})
    checkpoints.wait()
    assert most == [1]
    assert len(names(tmp_path)) == 5


def test_a_step_may_be_saved_again_and_the_last_one_counts(tmp_path: Path) -> None:
    checkpoints = wholestep.Checkpoints(tmp_path, keep=1)
    for value in (5, 7):
        checkpoints.save(7, position={"seen": value}, wait=True)
    assert names(tmp_path) == ["step-00000007-1"]
    assert resumed(tmp_path) == 7


def test_a_run_from_the_beginning_does_not_hide_behind_an_older_one(tmp_path: Path) -> None:
    save(tmp_path, 50)
    with pytest.raises(CheckpointError, match="already has a checkpoint of step 50, and this is step 10: begin with"):
        save(tmp_path, 10)


@pytest.mark.parametrize("step", [-1, 10**18, 1.0, None, "3"])
def test_what_cannot_be_resumed_is_not_saved(step: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="step is how many steps are finished"):
        save(tmp_path, step)
    assert resumed(tmp_path) == 0


@pytest.mark.parametrize(
    ("step", "number"), [(True, 1), (np.int64(4), 4), (torch.tensor(3), 3), (10**18 - 1, 10**18 - 1)]
)
def test_whole_numbers_of_every_kind_are_steps(step: Any, number: int, tmp_path: Path) -> None:
    wholestep.Checkpoints(tmp_path).save(step, position={"seen": number}, wait=True)
    assert resumed(tmp_path) == number


@pytest.mark.parametrize("keep", [0, -1])
def test_keeping_none_makes_no_sense(keep: int, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"keep is a positive number or None, not {keep}"):
        wholestep.Checkpoints(tmp_path, keep=keep)


def test_other_folders_are_left_alone(tmp_path: Path) -> None:
    for name in ("notes", "step-1", "step-00000003x", ".hidden"):
        (tmp_path / name).mkdir()
    save(tmp_path, 1, 2, keep=1)
    assert names(tmp_path) == [".hidden", "notes", "step-00000002", "step-00000003x", "step-1"]


HOLD = """
import fcntl, os, sys, time
handle = os.open(sys.argv[1] + "/.lock", os.O_RDWR)
fcntl.lockf(handle, fcntl.LOCK_EX)
os.truncate(handle, 0)
os.write(handle, f"here, process {os.getpid()}".encode())
print("has it", flush=True)
time.sleep(600)
"""
"""Another job, as far as others see it."""


def test_two_jobs_do_not_save_to_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F6: each removed what the other was writing, and older checkpoints of both. It ends with the process."""
    monkeypatch.setattr(locks, "_WAIT_S", 0.1)
    save(tmp_path, 1)
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "has it\n"
        with pytest.raises(CheckpointError, match=rf"another job \(.*process {other.pid}\) saves to .*of its own"):
            save(tmp_path, 2)
        assert resumed(tmp_path) == 1
        other.kill()
    save(tmp_path, 2)
    assert resumed(tmp_path) == 2


def test_a_folder_without_locks_is_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What is in it may be somebody else's."""

    def unknown(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "lockf", unknown)
    (tmp_path / ".writing-00000007-abcd").mkdir()
    save(tmp_path, 2)
    assert names(tmp_path) == [".writing-00000007-abcd", "step-00000002"]
    assert "has no locks" in caplog.text


def test_a_full_disk_is_called_so(tmp_path: Path) -> None:
    """F7: torch says 'unexpected pos 704 vs 598'."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    checkpoints = wholestep.Checkpoints(tmp_path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(CheckpointError, match=rf"{tmp_path} cannot be written to: File too large$"):
            checkpoints.save(1, position={"seen": torch.zeros(100_000)}, wait=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    save(tmp_path, 2)
    assert names(tmp_path) == ["step-00000002"]
