"""The demo: a short run end to end, what it prints, what it writes, and how it fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from wholestep.cli import main
from wholestep.cli.comparison import Side
from wholestep.cli.corpus import load_corpus
from wholestep.zoo.case import Batch

STEPS = 4


def test_the_demo_compares_and_reports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "outputs" / "report.html"
    # Two real threads take forever where another test runs beside this one.
    threads: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    before = torch.get_num_threads()
    assert main(["demo", "--steps", str(STEPS), "--json", "--threads", "2", "--output", str(output)]) == 0
    assert threads == [2, before]
    monkeypatch.undo()
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    eager, compiled = result["eager"], result["wholestep"]
    assert result["agrees"]
    assert result["num_captures"] == 1
    assert result["num_steps"] == len(eager["losses"]) == len(compiled["losses"]) == STEPS
    assert compiled["losses"] == pytest.approx(eager["losses"], abs=1e-5)
    assert eager["losses"][-1] < eager["losses"][0]
    assert result["max_parameter_difference"] < 1e-4
    assert compiled["first_step_s"] > compiled["median_step_s"] > 0
    assert result["predicted_peak_bytes"] == pytest.approx(compiled["peak_bytes"], rel=0.01)
    assert compiled["peak_bytes"] < 1.05 * eager["peak_bytes"]
    assert f"step {STEPS} of {STEPS}, loss {compiled['final_loss']:.4f}" in printed.err
    page = output.read_text(encoding="utf-8")
    assert all(f'<h2 id="{slug}-title">' in page for slug in ("compared-with-eager", "loss", "phases", "memory"))


def test_losses_that_differ_are_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    train = Side.train

    def train_with_other_dropout(side: Side, batch: Batch, seed: int) -> None:
        is_compiled = hasattr(side.step, "num_captures")
        train(side, batch, seed + 1000 * is_compiled)

    monkeypatch.setattr(Side, "train", train_with_other_dropout)
    monkeypatch.setenv("WHOLESTEP_PROGRESS", "0")
    assert main(["demo", "--steps", str(STEPS), "--output", str(tmp_path / "report.html")]) == 1
    printed = capsys.readouterr()
    assert "LOSSES DIFFER" in printed.out
    assert "0 (bit for bit)" not in printed.out
    assert printed.err == ""
    assert "The losses differ" in (tmp_path / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "required"),
        (["demo", "--steps", "1"], "'1' is not a whole number of 4 or more"),
        (["demo", "--threads", "many"], "'many' is not a whole number of 1 or more"),
        (["dance"], "invalid choice"),
    ],
)
def test_wrong_usage(arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert complaint in capsys.readouterr().err


def test_version_and_help_are_fine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert main(["demo", "--help"]) == 0
    assert "--steps" in capsys.readouterr().out


def test_a_disabled_wholestep_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHOLESTEP_DISABLE", "1")
    assert main(["demo", "--steps", str(STEPS)]) == 1
    assert "WHOLESTEP_DISABLE" in capsys.readouterr().err


def test_batches_are_windows_of_the_text() -> None:
    corpus = load_corpus()
    batch = corpus.make_batch(batch_size=3, context=32, seed=5)
    assert torch.equal(batch["tokens"][:, 1:], batch["targets"][:, :-1])
    text = "".join(corpus.alphabet[token] for token in corpus.tokens.tolist())
    assert all("".join(corpus.alphabet[token] for token in row) in text for row in batch["tokens"].tolist())
    again = corpus.make_batch(batch_size=3, context=32, seed=5)
    assert torch.equal(batch["tokens"], again["tokens"])
    assert not torch.equal(batch["tokens"], corpus.make_batch(3, 32, 6)["tokens"])
