"""Ranks are killed at random moments under `torchrun --max-restarts`: the run ends as if nothing had happened."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

EXAMPLE = Path(__file__).parents[2] / "examples" / "resumable.py"
STEPS, EVERY, WIDTH, NUM_KILLS = 100, 5, 768, 2
LIMIT_S = 180

Losses = dict[int, str]


@contextmanager
def training(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """The example on two ranks, its checkpoints in `folder/run`; it has ended at the end, if need be by force."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("--max-restarts", str(NUM_KILLS), "--monitor-interval", "0.1"),
        *(str(EXAMPLE), "--steps", str(STEPS), "--every", str(EVERY), "--width", str(WIDTH)),
        *("--folder", str(folder / "run")),
    ]
    # Otherwise ranks that are started again may find the addresses of the dead ones in torchrun's store.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with (
        (folder / "errors.txt").open("w") as errors,
        subprocess.Popen(
            command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        # On SIGTERM torchrun ends its ranks first.
        limit = threading.Timer(LIMIT_S, process.terminate)
        limit.start()
        try:
            yield process
        except BaseException:
            process.terminate()
            raise
        finally:
            limit.cancel()


def complete_steps(folder: Path) -> list[int]:
    return [int(path.name[5:13]) for path in (folder / "run").glob("step-*") if (path / "manifest.json").exists()]


class Story:
    """What a run has told so far: the processes of the life it is in, and the losses of all lives."""

    def __init__(self) -> None:
        self.processes: dict[int, int] = {}
        self.beginnings: list[int] = []
        self.losses: Losses = {}
        self.lines: list[str] = []

    def hear(self, line: str) -> None:
        self.lines.append(line)
        if match := re.fullmatch(r"rank (\d+) is process (\d+)\n", line):
            self.processes[int(match[1])] = int(match[2])
        elif match := re.fullmatch(r"(\d+) steps are done\n", line):
            self.beginnings.append(int(match[1]))
        elif match := re.fullmatch(r"step (\d+)  loss ([\d.]+)\n", line):
            known = self.losses.setdefault(int(match[1]), match[2])
            assert known == match[2], f"step {match[1]} has another loss in another life"


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Losses:
    story, folder = Story(), tmp_path_factory.mktemp("unbroken")
    with training(folder) as process:
        assert process.stdout is not None
        for line in process.stdout:
            story.hear(line)
    assert process.returncode == 0, (folder / "errors.txt").read_text()[-3000:]
    assert sorted(story.losses) == list(range(1, STEPS + 1))
    return story.losses


@pytest.mark.parametrize("seed", range(10))
def test_killed_twice_and_none_the_worse(seed: int, unbroken: Losses, tmp_path: Path) -> None:
    """In each of the first lives, a rank is killed some time behind some step: while it computes, talks or writes."""
    chance, story = random.Random(seed), Story()
    deaths = [(chance.randint(1, STEPS - 40), chance.randrange(2), 0.05 * chance.random()) for _ in range(NUM_KILLS)]
    deaths.sort()
    least: list[int] = []
    with training(tmp_path) as process:
        assert process.stdout is not None
        for line in process.stdout:
            story.hear(line)
            is_there = len(story.beginnings) == len(least) + 1 and len(story.processes) == 2
            if len(least) == NUM_KILLS or not is_there or max(story.losses, default=0) < deaths[len(least)][0]:
                continue
            _, victim, delay_s = deaths[len(least)]
            time.sleep(delay_s)
            least.append(max(complete_steps(tmp_path), default=0))
            os.kill(story.processes[victim], signal.SIGKILL)
            story.processes.clear()
    assert process.returncode == 0, (tmp_path / "errors.txt").read_text()[-3000:]
    assert len(least) == NUM_KILLS, story.lines
    assert story.losses == unbroken
    assert len(story.beginnings) == NUM_KILLS + 1
    assert story.beginnings[0] == 0
    # Each life goes on from the newest checkpoint that was complete when the one before ended, or from a newer one.
    assert all(beginning >= step for beginning, step in zip(story.beginnings[1:], least, strict=True))
    assert max(complete_steps(tmp_path)) == STEPS
