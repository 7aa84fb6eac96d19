"""The example for several ranks, started as users start it. The other example is run with the documentation."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

ROOT = Path(__file__).parents[3]
EPOCHS, STEPS_PER_EPOCH = 2, 32

pytestmark = pytest.mark.distributed


def test_data_parallel_training_under_torchrun(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
            *(str(ROOT / "examples" / "train_data_parallel.py"), "--epochs", str(EPOCHS)),
        ],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    shares = [float(share) for share in re.findall(r"held out: ([\d.]+)% right", done.stdout)]
    assert len(shares) == EPOCHS
    assert shares[-1] > 90
    assert f"{EPOCHS * STEPS_PER_EPOCH} steps, 1 capture(s), 1 bucket(s)" in done.stdout
    assert "the updates of 1 of them run in the next iteration" in done.stdout
    checkpoint = torch.load(tmp_path / "model.pt")
    # Saved while updates were pending, so looking has applied them: it has the last step, and what was evaluated later.
    assert {float(state["step"]) for state in checkpoint["optimizer"]["state"].values()} == {EPOCHS * STEPS_PER_EPOCH}
    assert share_right(checkpoint["model"]) == pytest.approx(shares[-1], abs=0.05)


def test_a_run_is_resumed(tmp_path: Path) -> None:
    """The script twice, the second time for more steps; under torchrun, and killed, it is among the slow tests."""
    example = str(ROOT / "examples" / "resumable.py")
    twice = f"""
import runpy, sys
for steps in (4, 6):
    sys.argv = ["resumable.py", "--steps", str(steps), "--every", "2"]
    runpy.run_path({example!r}, run_name="__main__")
"""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    done = subprocess.run(
        [sys.executable, "-c", twice],
        cwd=tmp_path,
        env={**os.environ, **alone, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert re.findall(r"(\d+) steps are done", done.stdout) == ["0", "4"]
    assert re.findall(r"step (\d+)  loss", done.stdout) == [str(number) for number in range(1, 7)]


def share_right(weights: dict[str, torch.Tensor]) -> float:
    """Percent of the example's held out points that a checkpoint is right about."""
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Identity(), nn.Linear(64, 4))
    model.load_state_dict(weights)
    points = torch.randn(1000, 2, generator=torch.Generator().manual_seed(1))
    labels = 2 * (points[:, 0] > 0).long() + (points[:, 1] > 0).long()
    return 100 * (model(points).argmax(dim=1) == labels).float().mean().item()
