"""`wholestep plan`, `explain` and `report` on a user's file: what they print, write and refuse."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.cli.scripts import line_of, write_script
from torch import nn

import wholestep
from wholestep.cli import main
from wholestep.cli.options import add_dry_run_options, add_step_options, add_target, planned
from wholestep.compiler import Plan
from wholestep.cost import Link, profile_memory
from wholestep.errors import GuardError

EXAMPLE = Path(__file__).parents[3] / "examples" / "llama_7b_plan.py"


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_script(tmp_path_factory.mktemp("script"))


@pytest.fixture(scope="module")
def plain(script: Path) -> dict[str, Any]:
    """The plan of the file's step without any option."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(["plan", f"{script}:make_step", "--json"]) == 0
    return json.loads(out.getvalue())["plan"]


def printed_plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """What `plan --json` prints."""
    assert main(["plan", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)["plan"]


def figures(plan: dict[str, Any]) -> dict[str, Any]:
    """What a plan predicts."""
    return plan["predictions"]


def real_step(script: Path) -> tuple[Any, ...]:
    """The step of the file with weights."""
    namespace: dict[str, Any] = {"__name__": "script"}
    exec(script.read_text(encoding="utf-8"), namespace)
    return namespace["make_step"]()


def test_a_plan_has_the_figures_of_the_real_step(script: Path, plain: dict[str, Any]) -> None:
    plan = plain
    step, args = real_step(script)
    compiled = wholestep.compile(step)
    compiled(*args)
    parameters = sum(p.numel() for p in args[0].parameters())
    assert figures(plan)["size"]["num_parameters"] == figures(plan)["size"]["num_trainable"] == parameters
    assert figures(plan)["size"]["parameter_bytes"] == 4 * parameters
    assert figures(plan)["size"]["state_bytes"] == 8 * parameters + 4 * len(list(args[0].parameters()))
    assert figures(plan)["memory"]["unlimited_peak_bytes"] == profile_memory(compiled.graph).peak_bytes
    assert figures(plan)["memory"]["peak_bytes"] == figures(plan)["memory"]["unlimited_peak_bytes"]
    # Matrix products of the forward, and twice as many in the backward, but for the gradient of the batch.
    products = [2 * 32 * module.weight.numel() for module in args[0].modules() if isinstance(module, nn.Linear)]
    assert figures(plan)["phases"]["forward"]["flops"] == sum(products)
    assert figures(plan)["phases"]["backward"]["flops"] == 2 * sum(products) - products[0]
    assert plan["communication"] is None
    assert figures(plan)["step_us"] == pytest.approx(
        sum(phase["time_us"] for phase in figures(plan)["phases"].values())
    )


def test_a_budget_is_kept_or_refused_with_the_smallest(
    script: Path, plain: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    memory = figures(plain)["memory"]
    smallest, most = memory["smallest_peak_bytes"], memory["unlimited_peak_bytes"]
    assert smallest < most
    budget = (smallest + most) // 2
    kept = printed_plan(capsys, f"{script}:make_step", "--memory-budget", str(budget))
    memory = figures(kept)["memory"]
    assert smallest <= memory["peak_bytes"] <= budget
    assert (memory["unlimited_peak_bytes"], memory["smallest_peak_bytes"]) == (most, smallest)
    assert kept["memory"]["repeated"]
    assert main(["plan", f"{script}:make_step", "--memory-budget", str(smallest - 1)]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"wholestep: memory_budget={smallest - 1}B cannot be kept")
    assert f"({smallest} bytes)" in error


def test_ranks_and_a_link_that_are_not_there(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (f"{script}:make_step", "--world-size", "64", "--device", "cpu")
    slow, fast = (printed_plan(capsys, *arguments, "--link", link) for link in ("100kbit,1us", "nvlink4"))
    for plan in (slow, fast):
        travel = plan["communication"]
        assert travel["world"] == 64
        assert sum(bucket["num_bytes"] for bucket in travel["buckets"]) == figures(plan)["size"]["parameter_bytes"]
        assert figures(plan)["step_us"] == pytest.approx(
            sum(phase["time_us"] for phase in figures(plan)["phases"].values()) + travel["exposed_us"]
        )
    assert slow["communication"]["exposed_us"] > 100 * fast["communication"]["exposed_us"]
    # A ring: 2 (n - 1) messages of an n-th of the bytes.
    link = Link.from_text(slow["communication"]["link"])
    wire = Link.from_text("100kbit,1us")
    num_bytes = 640_000
    assert link.time_us(num_bytes) == pytest.approx(126 * wire.time_us(num_bytes / 64))


def test_updates_that_may_not_move_are_waited_for(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (f"{script}:make_waiting", "--world-size", "4", "--link", "100kbit,1us", "--device", "cpu")
    travel = printed_plan(capsys, *arguments)["communication"]
    assert len(travel["buckets"]) > 2
    assert not any(bucket["moved"] for bucket in travel["buckets"])
    # So slow a link is busy from the first gradient to the last update.
    assert travel["travel_us"] > travel["exposed_us"] > 0.9 * travel["travel_us"]
    assert travel["predicted_us"] == travel["unmoved_us"] > travel["travel_us"]


def test_a_compiled_step_keeps_its_options(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = printed_plan(capsys, f"{script}:make_compiled")
    assert own["memory"]["budget"] == "0"
    assert figures(own)["memory"]["peak_bytes"] == figures(own)["memory"]["smallest_peak_bytes"]
    other = printed_plan(capsys, f"{script}:make_compiled", "--memory-budget", "1.0")
    assert figures(other)["memory"]["peak_bytes"] == figures(own)["memory"]["unlimited_peak_bytes"]


def test_keyword_arguments_work(script: Path, plain: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert figures(printed_plan(capsys, f"{script}:make_with_kwargs"))["memory"] == figures(plain)["memory"]


def test_a_saved_plan_is_explained_as_it_was_printed(
    script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved, page = tmp_path / "made" / "plan.json", tmp_path / "report.html"
    arguments = ["--memory-budget", "0.5", "--world-size", "8", "--link", "25gbit"]
    assert main(["plan", f"{script}:make_step", *arguments, "--save", str(saved), "--report", str(page)]) == 0
    printed = capsys.readouterr()
    assert "made a model" in printed.err
    for words in ("Parameters", "smallest possible", "Step time", "of it exposed", "What runs again", "on h200"):
        assert words in printed.out
    assert "<html" in page.read_text(encoding="utf-8")
    assert main(["explain", str(saved)]) == 0
    assert capsys.readouterr().out == printed.out
    assert main(["explain", str(saved), "--json"]) == 0
    assert capsys.readouterr().out == saved.read_text(encoding="ascii")
    assert Plan.load(saved).made_for.source == f"{script}:make_step"


def test_lowered_steps_are_planned_without_compiling(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lowered = printed_plan(capsys, f"{script}:make_step", "--lower", "inductor")
    assert figures(lowered)["memory"]["smallest_peak_bytes"] is None
    assert "lower" in [choice["stage"] for choice in lowered["loop"]]
    assert main(["explain", f"{script}:make_step", "--lower", "inductor", "--no-weights"]) == 0
    assert "planned, not compiled" in capsys.readouterr().out


def test_explain_of_a_step_that_runs_and_of_one_that_does_not(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts: list[str] = []
    for further in ([], ["--no-weights"]):
        assert main(["explain", f"{script}:make_step", *further]) == 0
        texts.append(capsys.readouterr().out)
        assert main(["explain", f"{script}:make_step", *further, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["plan"]["made_for"]["step"] == "train_step"
    real, blank = ([line for line in text.splitlines() if "Peak memory" in line] for text in texts)
    assert real == blank
    assert real


@pytest.mark.parametrize("further", [[], ["--no-weights"]])
def test_reports_are_written(
    further: list[str], script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "pages" / "report.html"
    assert main(["report", f"{script}:make_step", "-o", str(page), "--json", *further]) == 0
    assert json.loads(capsys.readouterr().out) == {"report": str(page)}
    assert "train_step" in page.read_text(encoding="utf-8")


def test_devices_come_from_files(script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    device = {"flops_per_us": 1e3, "bytes_per_us": 1e9, "overhead_us": 0.0}
    one = {"format": "wholestep-cost-model", "version": 1, "devices": {"snail": device}, "links": {}}
    file = tmp_path / "costs.json"
    file.write_text(json.dumps(one), encoding="utf-8")
    plan = printed_plan(capsys, f"{script}:make_step", "--device", str(file))
    assert figures(plan)["device"]["name"] == "snail"
    assert figures(plan)["step_us"] >= sum(phase["flops"] for phase in figures(plan)["phases"].values()) / 1e3
    one["devices"]["hare"] = {**device, "flops_per_us": 1e6}
    file.write_text(json.dumps(one), encoding="utf-8")
    assert main(["plan", f"{script}:make_step", "--device", str(file)]) == 2
    assert "has the devices snail, hare; name one" in capsys.readouterr().err
    assert (
        printed_plan(capsys, f"{script}:make_step", "--device", f"{file}:hare")["predictions"]["device"]["flops_per_us"]
        == 1e6
    )


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        (["train.py"], 2, "does not name a function of a file"),
        (["train.py:3"], 2, "does not name a function of a file"),
        (["missing.py:make_step"], 2, "there is no file 'missing.py'"),
        (["train.py:nothing"], 2, "train.py has no function 'nothing'"),
        (["train.py:NUMBER"], 2, "train.py has something that is no function called 'NUMBER'"),
        (["train.py:make_wrong"], 1, f"train.py:{line_of('raise ValueError')}: ValueError: no such"),
        (["train.py:make_nothing"], 1, "train.py:make_nothing returns None, not (train_step, args)"),
        (["train.py:make_half"], 1, "returns (a function, a str), not (train_step, args)"),
        (["train.py:make_reading"], 1, f"train.py:{line_of('sum().item()')}: the value of a tensor is read"),
        (["broken.py:make"], 1, "broken.py:2: SyntaxError"),
        (["failing.py:make"], 1, "failing.py:1: ZeroDivisionError"),
        (["leaving.py:make"], 1, "ends the process"),
        (["train.py:make_step", "--device", "toaster"], 2, "there is no device 'toaster'; choose from h200"),
        (["train.py:make_step", "--device", "missing.json"], 2, "missing.json cannot be read"),
        (["train.py:make_step", "--world-size", "4"], 2, "--world-size needs --link"),
        (["train.py:make_step", "--world-size", "4", "--link", "wet string"], 2, "'wet string' is no link"),
        (["train.py:make_step", "--world-size", "0"], 2, "not a whole number"),
        (["train.py:make_step", "--memory-budget", "much"], 2, "cannot read the memory budget 'much'"),
        (["train.py:make_step", "--chunk-loss", "1"], 2, "not a number of chunks"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(
    arguments: list[str],
    code: int,
    complaint: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_script(tmp_path)
    write_script(tmp_path, "def make():\n    return (", "broken.py")
    write_script(tmp_path, "1 / 0", "failing.py")
    write_script(tmp_path, "raise SystemExit(3)", "leaving.py")
    assert main(["plan", *arguments]) == code
    printed = capsys.readouterr()
    assert printed.out == ""
    last = printed.err.splitlines()[-1]
    assert last.startswith("wholestep")
    assert complaint in last


def test_a_planned_step_cannot_be_called(script: Path) -> None:
    parser = argparse.ArgumentParser()
    add_target(parser)
    add_step_options(parser)
    add_dry_run_options(parser)
    with pytest.raises(GuardError, match="cannot run"):
        planned(parser.parse_args([f"{script}:make_step"])).step()


def test_the_example_in_small(capsys: pytest.CaptureFixture[str]) -> None:
    plan = printed_plan(
        capsys, f"{EXAMPLE}:make_small_step", "--memory-budget", "0.3", "--world-size", "64", "--link", "25gbit"
    )
    embedding, layer = 32000 * 4096, 4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096
    assert figures(plan)["size"]["num_parameters"] == 2 * embedding + 2 * layer + 4096
    assert figures(plan)["size"]["parameter_bytes"] == 2 * figures(plan)["size"]["num_parameters"]
    assert figures(plan)["memory"]["smallest_peak_bytes"] < figures(plan)["memory"]["peak_bytes"]
    assert figures(plan)["memory"]["peak_bytes"] < figures(plan)["memory"]["unlimited_peak_bytes"]
    assert torch.get_default_dtype() is torch.float32


@pytest.mark.slow
def test_seven_billion_parameters_within_eight_gigabytes(tmp_path: Path) -> None:
    code = (
        "import json, resource, sys; from wholestep.cli import main; code = main(sys.argv[1:]); "
        "print(json.dumps({'code': code, 'peak_kib': resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}))"
    )
    arguments = ["plan", f"{EXAMPLE}:make_step", "--memory-budget", "0.5", "--world-size", "64", "--link", "25gbit"]
    saved = tmp_path / "plan.json"
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments, "--save", str(saved)], capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["code"] == 0
    assert result["peak_kib"] < 8 * 2**20
    plan = Plan.load(saved).predictions
    assert plan is not None
    assert plan.size.num_parameters == 6_738_415_616
