"""Examples of training loops: each has the losses of the same loop in eager."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[3] / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("name", "arguments", "num_steps", "printed"),
    [
        ("plain_loop", {"epochs": 1}, 42, "2 capture(s): features changed: shape (48, 2) -> (32, 2)"),
        ("huggingface_loop", {"num_steps": 10}, 10, "step 10  loss"),
        ("lightning_style", {"epochs": 1}, 50, "of the last batch are right"),
    ],
    ids=["plain", "huggingface", "lightning"],
)
def test_losses_are_those_of_eager(
    name: str, arguments: dict[str, Any], num_steps: int, printed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    example = load(name)
    expected = example.train(**arguments, eager=True)
    assert len(expected) == num_steps
    assert expected[-1] < expected[0]
    capsys.readouterr()
    assert example.train(**arguments) == expected  # every bit: one thread, float32, on the CPU
    assert printed in capsys.readouterr().out


def test_a_pipeline_in_one_process_trains_like_eager() -> None:
    example = load("train_pipeline")
    assert example.train(10) == pytest.approx(example.train_eager(10), rel=1e-5)


@pytest.mark.slow
@pytest.mark.distributed
def test_two_pipelines_of_two_ranks_train_like_eager() -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    done = subprocess.run(
        [*launch, str(EXAMPLES / "train_pipeline.py"), "--steps", "20"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "2 pipeline(s)" in done.stdout
    losses = {
        (int(step), int(rank)): float(loss)
        for step, rank, loss in re.findall(r"step (\d+)  rank (\d)  loss ([\d.]+)", done.stdout)
    }
    expected = load("train_pipeline").train_eager(20)
    assert {rank for _, rank in losses} == {1, 3}  # those with the last stage
    for step in (10, 20):  # each pipeline has half of the batch
        assert (losses[step, 1] + losses[step, 3]) / 2 == pytest.approx(expected[step - 1], rel=1e-4)
