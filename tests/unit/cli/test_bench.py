"""`wholestep bench`: both ways from the same start, and a difference is a failure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.unit.cli.scripts import write_script

from wholestep.cli import main

STEPS = 4


def test_equal_steps_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = write_script(tmp_path)
    assert main(["bench", f"{script}:make_step", "--steps", str(STEPS), "--json"]) == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    assert result["num_steps"] == STEPS
    assert result["loss_difference"] == result["parameter_difference"] == 0
    assert result["is_equal"]
    assert result["num_captures"] == 1
    assert result["first_call_s"] > result["compiled_s"] > 0
    assert 0 < result["compiled_peak_bytes"] <= 1.05 * result["eager_peak_bytes"]
    assert f"step {STEPS} of {STEPS}" in printed.err


def test_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = write_script(tmp_path)
    assert main(["bench", f"{script}:make_compiled", "--steps", "3"]) == 0
    out = capsys.readouterr().out
    assert "peak memory" in out
    assert "are equal, bit for bit" in out


def test_results_that_differ_are_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = write_script(tmp_path)
    assert main(["bench", f"{script}:make_drifting", "--steps", "3"]) == 1
    assert "RESULTS DIFFER: losses by up to" in capsys.readouterr().out


def test_a_model_that_is_made_once_cannot_be_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # The file itself is imported once for each of the two, what it imports is not.
    write_script(tmp_path, name="kept_for_bench.py")
    text = "import kept_for_bench\n\nSTEP = kept_for_bench.__dict__.setdefault('STEP', kept_for_bench.make_step())\n"
    script = write_script(tmp_path, text + "\ndef make():\n    return STEP\n")
    assert main(["bench", f"{script}:make", "--steps", "3"]) == 1
    assert "returns the same model twice; make model and optimizer inside the function" in capsys.readouterr().err


def test_too_few_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", f"{write_script(tmp_path)}:make_step", "--steps", "2"]) == 2
    assert "'2' is not a whole number of 3 or more" in capsys.readouterr().err
