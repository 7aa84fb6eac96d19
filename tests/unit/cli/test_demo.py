"""The demo: a short run end to end, what it prints, what it writes, and how it fails."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import wholestep
from wholestep.api import CompiledStep
from wholestep.cli import main
from wholestep.cli.comparison import Comparison, Difference, Side, Window
from wholestep.cli.corpus import load_corpus
from wholestep.cli.present import print_result
from wholestep.comm.plan import BucketPlan, DataParallelPlan
from wholestep.zoo.case import Batch

STEPS = 5


def check_sides(result: dict[str, Any], *compiled: str) -> None:
    """What every demo promises."""
    eager = result["eager"]
    assert result["agrees"]
    assert result["num_steps"] == len(eager["losses"]) == STEPS
    assert eager["losses"][-1] < eager["losses"][0]
    for side in map(result.__getitem__, compiled):
        assert side["losses"] == pytest.approx(eager["losses"], abs=1e-5)
        assert side["num_captures"] == 1
        assert side["first_step_s"] > side["median_step_s"] > 0
        assert side["peak_bytes"] < 1.05 * eager["peak_bytes"]


def titles(page: Path) -> set[str]:
    return set(re.findall(r'<h2 id="([\w-]+)-title">', page.read_text(encoding="utf-8")))


def test_one_rank_is_compared_with_plain_eager(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "outputs" / "report.html"
    # Two real threads take forever where another test runs beside this one.
    threads: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    before = torch.get_num_threads()
    arguments = ["--ranks", "1", "--steps", str(STEPS), "--json", "--threads", "2", "--output", str(output)]
    assert main(["demo", *arguments]) == 0
    assert threads == [2, before]
    monkeypatch.undo()
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    check_sides(result, "wholestep")
    assert result["num_ranks"] == 1
    assert result["max_parameter_difference"] < 1e-4
    assert result["predicted_peak_bytes"] == pytest.approx(result["wholestep"]["peak_bytes"], rel=0.01)
    assert result["wholestep"]["plan"] is None
    assert f"step {STEPS} of {STEPS}, loss {result['wholestep']['final_loss']:.4f}" in printed.err
    assert {"compared-with-eager", "loss", "phases", "memory"} <= titles(output)


def test_two_ranks_are_compared_with_ddp(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "outputs" / "report.html"
    assert main(["demo", "--steps", str(STEPS), "--json", "--output", str(output)]) == 0
    printed = capfd.readouterr()
    result = json.loads(printed.out)
    check_sides(result, "wholestep", "wholestep_slow_link")
    assert result["num_ranks"] == 2
    for name in ("wholestep", "wholestep_slow_link"):
        side, plan = result[name], result[name]["plan"]
        assert side["max_loss_difference"] == side["max_parameter_difference"] == 0
        assert side["predicted_peak_bytes"] == pytest.approx(side["peak_bytes"], rel=0.05)
        assert plan["world"] == 2
        assert 0 < plan["compute_us"] < plan["predicted_us"]
        assert [index for index, bucket in enumerate(plan["buckets"]) if bucket["moved"]] == plan["moved"]
    assert result["wholestep_slow_link"]["plan"]["moved"]
    assert printed.err.startswith("starting 2 ranks\n")
    assert printed.err.count(f"step {STEPS} of {STEPS}") == 1
    assert {"compared-with-eager", "plan-of-slow-link", "loss", "data-parallel", "phases"} <= titles(output)


def tiny_step(model: nn.Module, optimizer: Optimizer, batch: Batch) -> torch.Tensor:
    optimizer.zero_grad()
    loss = model(batch["features"]).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def tiny_sides(*names: str) -> dict[str, Side]:
    """One eager training and some compiled ones that agree."""
    steps = [tiny_step, *(wholestep.compile(tiny_step) for _ in names[1:])]
    sides = {name: Side.of(step, nn.Linear(2, 1), STEPS) for name, step in zip(names, steps, strict=True)}
    for side in sides.values():
        side.train([({"features": torch.ones(3, 2)}, seed) for seed in range(STEPS)])
    return sides


def test_the_table_of_two_ranks_gives_reasons(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = {"a": "stays", "b": "stays", "c": "moves", "d": "stays", "e": "moves"}
    buckets = [BucketPlan((key, "x"), 1024, kind == "moves", f"{kind}: because") for key, kind in kinds.items()]
    plan = DataParallelPlan(2, True, tuple(buckets), "1gbit,50us", 100.0, 50.0, 1600.0, exposed_us=1500.0)
    monkeypatch.setattr(CompiledStep, "plan", SimpleNamespace(communication=plan))
    sides = tiny_sides("eager DDP", "wholestep", "slow link")
    print_result(
        Comparison(sides, 2, {name: Difference(0, 0) for name in ("wholestep", "slow link")}),
        Path("report.html"),
        7.0,
        as_json=False,
    )
    lines = capsys.readouterr().out.splitlines()
    assert any("buckets (crossing border)" in line and line.count("5 (2)") == 2 for line in lines)
    assert any("of it exposed" in line and line.count("1.5 ms") == 2 for line in lines)
    num_ops = sides["wholestep"].compiled.graph.num_ops
    assert lines[0].strip() == f"GPT on 2 ranks, {STEPS} steps, {num_ops} ops in one graph"
    text = " ".join(" ".join(lines).split())
    shown = [(2, "c", "moves"), (3, "d", "stays"), (4, "e", "moves")]
    reasons = " ".join(f"bucket {at}: {key} and 1 more (1.0 KiB) {kind}: because" for at, key, kind in shown)
    for name in ("wholestep", "slow link"):
        assert f"plan of {name}: {reasons} 2 more in the report" in text
    assert "clip_grad_norm_" in text
    assert text.endswith("are equal, bit for bit. report: report.html (7 s in all)")


@pytest.mark.slow
def test_losses_that_differ_are_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    train = Side.train

    def train_with_other_dropout(side: Side, window: Window, *, is_measured: bool) -> None:
        offset = 1000 * isinstance(side.step, CompiledStep)
        train(side, [(batch, seed + offset) for batch, seed in window], is_measured=is_measured)

    monkeypatch.setattr(Side, "train", train_with_other_dropout)
    monkeypatch.setenv("WHOLESTEP_PROGRESS", "0")
    arguments = ["--ranks", "1", "--steps", str(STEPS), "--output", str(tmp_path / "report.html")]
    assert main(["demo", *arguments]) == 1
    printed = capsys.readouterr()
    assert "LOSSES DIFFER" in printed.out
    assert "bit for bit" not in printed.out
    assert printed.err == ""
    assert "LOSSES DIFFER" in (tmp_path / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "required"),
        (["demo", "--steps", "1"], "'1' is not a whole number of 4 or more"),
        (["demo", "--threads", "many"], "'many' is not a whole number of 1 or more"),
        (["demo", "--ranks", "0"], "'0' is not a whole number of 1 or more"),
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
