"""Files that were asked for: folders are made, and what cannot be written is an error in one sentence (F8)."""

from __future__ import annotations

from pathlib import Path

import pytest

from wholestep import UsageError
from wholestep._output import require_writable, write_output
from wholestep.cli import main

STEP = """
import torch

def make():
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return train_step, (model, optimizer, torch.randn(3, 4))

def train_step(model, optimizer, x):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss
"""


def test_folders_are_made(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "x.txt"
    assert write_output(path, "text").read_text() == "text"
    require_writable(None)


def in_the_way(tmp_path: Path) -> Path:
    (tmp_path / "file").touch()
    return tmp_path / "file" / "x.txt"


def test_what_cannot_be_written_is_said_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"x\.txt cannot be written: (Not a directory|File exists)$"):
        write_output(in_the_way(tmp_path), "text")
    with pytest.raises(UsageError, match=r"cannot be written: it is a folder$"):
        write_output(tmp_path, "text")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(UsageError, match="cannot be written: "):
        write_output(tmp_path / "loop", "text")


@pytest.mark.parametrize(
    "arguments",
    [
        ("report", "step.py:make", "-o", "OUT"),
        ("plan", "step.py:make", "--report", "OUT"),
        ("simulate", "step.py:make", "--cluster", "cluster.json", "--trace", "OUT"),
        ("simulate", "--calibrate", "OUT"),
        ("demo", "--output", "OUT"),
    ],
)
def test_commands_refuse_before_they_work(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "step.py").write_text(STEP)
    path = in_the_way(tmp_path)
    assert main([str(path) if argument == "OUT" else argument for argument in arguments]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"wholestep: {path} cannot be written: ")
    assert "Traceback" not in told


def test_a_report_into_a_folder_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "step.py").write_text(STEP)
    path = tmp_path / "new" / "report.html"
    assert main(["report", f"{tmp_path / 'step.py'}:make", "-o", str(path)]) == 0
    assert path.exists()
    assert str(path) in capsys.readouterr().out
