"""A short run of the soak: everything on, on two ranks, beside eager DDP."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="what a process holds is read from /proc"),
]


@pytest.mark.parametrize("lower", ["none", "inductor"])
def test_losses_are_those_of_ddp_and_nothing_grows(lower: str, tmp_path: Path) -> None:
    figures = tmp_path / "soak.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.soak", "--steps", "200", "--warmup", "100"),
            *("--lower", lower, "--json", str(figures)),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    ranks = json.loads(figures.read_text())
    assert len(ranks) == 2
    for rank in ranks:
        assert rank["num_steps"] == 200
        assert rank["num_captures"] == 2  # the first size, then all sizes
        assert rank["is_lowered"] == (lower == "inductor")
        assert rank["last_loss"] < rank["first_loss"]
