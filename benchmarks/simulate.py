"""The simulator against what it simulates: steps over slow links, predicted and measured.

    python -m benchmarks.simulate [--parts ...] [--rates ...] [--quick] [--json FILE]

Needs root on Linux (see `benchmarks.netlab`). Two ranks compute in earnest, one thread each: a GPT. Four ranks would
share cores here, so their layers sleep (`benchmarks.simulate_emulated`); weights, activations and all that travels are
real. Predictions come from figures that are measured apart: of data parallel steps the link, the local step and the
times of single ops; of pipelines the link, and what actions take where the link is fast. Exposed communication is the
step less the local one, or less the same step over a fast link. Peaks are live bytes of a rank (`measure_peak`).

`scale` simulates 16,384 ranks and says how long that takes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.data_parallel import ENVIRONMENT
from benchmarks.netlab import Lab, LabError, exit_on_signals
from wholestep.pipe import StageCosts, build_schedule
from wholestep.sim import Cluster, CostModel, DataParallelJob, GradientBucket, PipelineJob, StageLoad, simulate

PARTS = ("data-parallel-2", "data-parallel-4", "pipeline-2", "pipeline-4", "scale")
RATES = {
    "data-parallel-2": ("1gbit", "0.5gbit"),
    "data-parallel-4": ("200mbit",),
    "pipeline-2": ("100mbit",),
    "pipeline-4": ("100mbit",),
}
SCHEDULES = ("1f1b", "zb-h1")
# How far predictions may be off.
GOALS = {"step_us": 0.10, "exposed_us": 0.15, "peak_bytes": 0.03}
_FAST = "unlimited"


@dataclass(frozen=True)
class Row:
    """One figure, predicted and measured."""

    part: str
    rate: str
    plan: str
    figure: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1 if self.measured else 0.0

    @property
    def is_near(self) -> bool:
        return abs(self.error) <= GOALS[self.figure]


def main(argv: list[str] | None = None) -> int:
    arguments = _parse(argv)
    exit_on_signals()
    rows: list[Row] = []
    try:
        for part in arguments.parts:
            if part == "scale":
                continue
            print(f"measuring {part} …", file=sys.stderr, flush=True)
            measure = _pipeline_rows if part.startswith("pipeline") else _data_parallel_rows
            rows += measure(part, int(part[-1]), arguments)
    except (LabError, ChildProcessError) as error:
        print(error, file=sys.stderr)
        return 2 if isinstance(error, LabError) else 1
    print(f"torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores\n")
    _print_rows(rows)
    if "scale" in arguments.parts:
        _print_scale()
    if arguments.json:
        arguments.json.write_text(json.dumps([{**vars(row), "error": row.error} for row in rows], indent=1))
    return 0 if all(row.is_near for row in rows) else 1


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="default all")
    parser.add_argument("--rates", nargs="+", metavar="RATE", help="default: those that suit the part")
    parser.add_argument("--repeats", type=int, default=5, help="windows of each (default 5)")
    parser.add_argument("--quick", action="store_true", help="few repeats: a look, not a measurement")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there too")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.repeats = 2
    return arguments


def _run(num_ranks: int, rate: str, folder: Path, options: list[str], repeats: int) -> dict[str, Any]:
    """One lab, one command on each of its ranks."""
    output = folder / "figures.json"
    command = [sys.executable, "-m", "benchmarks.simulate_rank", *options, "--repeats", str(repeats)]
    command += ["--output", str(output)] + (["--emulated"] if num_ranks > 2 else [])
    with Lab(num_ranks, rate) as lab:
        code = lab.run(command, env=ENVIRONMENT, output=sys.stderr)
    if code != 0:
        raise ChildProcessError(f"a rank ended with exit code {code}: {num_ranks} ranks, {rate}; its output is above")
    return json.loads(output.read_text())


def _data_parallel_rows(part: str, num_ranks: int, arguments: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    options = ["data_parallel", "--bucket-mb", "4" if num_ranks == 2 else "1"]
    for rate in arguments.rates or RATES[part]:
        with tempfile.TemporaryDirectory() as folder:
            found = _run(num_ranks, rate, Path(folder), options, arguments.repeats)
        print(f"{part}, {rate}: {found['wire']}, local step {found['local_s'] * 1e3:.0f} ms", file=sys.stderr)
        for way in ("none", "all", "auto"):
            predicted, measured = found[way]["predicted"], found[way]["measured"]
            rows += [
                Row(part, rate, f"cross_iteration={way}", figure, predicted[figure], measured[figure])
                for figure in GOALS
            ]
    return rows


def _pipeline_rows(part: str, num_ranks: int, arguments: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        options = ["pipeline", "--costs", f"{folder}/costs.json", "--schedules", *SCHEDULES]
        fast = _run(num_ranks, _FAST, Path(folder), [*options, "--is-fast"], arguments.repeats)
        for rate in arguments.rates or RATES[part]:
            slow = _run(num_ranks, rate, Path(folder), options, arguments.repeats)
            print(f"{part}, {rate}: {slow['wire']}, fast: {fast['wire']}", file=sys.stderr)
            for name in SCHEDULES:
                predicted, measured = slow[name]["predicted"], slow[name]["measured"]
                exposed_us = measured["step_us"] - fast[name]["measured"]["step_us"]
                rows.append(Row(part, rate, name, "step_us", predicted["step_us"], measured["step_us"]))
                rows.append(Row(part, rate, name, "exposed_us", predicted["exposed_us"], exposed_us))
                peaks = zip(predicted["peak_bytes"], measured["peak_bytes"], strict=True)
                worst = max(peaks, key=lambda pair: abs(pair[0] / pair[1] - 1))
                rows.append(Row(part, rate, name, "peak_bytes", *worst))
    for name in SCHEDULES:
        fast_step = (fast[name][side]["step_us"] for side in ("predicted", "measured"))
        rows.append(Row(part, _FAST, name, "step_us", *fast_step))
    return rows


def _print_rows(rows: list[Row]) -> None:
    if not rows:
        return
    print("| part | link | plan | figure | predicted | measured | off by | goal |\n|---|---|---|---|---|---|---|---|")
    for row in rows:
        unit, scale = ("MB", 1e6) if row.figure == "peak_bytes" else ("ms", 1e3)
        figures = " | ".join(f"{value / scale:.2f} {unit}" for value in (row.predicted, row.measured))
        verdict = f"{100 * GOALS[row.figure]:.0f}%{'' if row.is_near else ' MISSED'}"
        name = row.figure.rpartition("_")[0]
        print(f"| {row.part} | {row.rate} | {row.plan} | {name} | {figures} | {100 * row.error:+.1f}% | {verdict} |")
    print()


def _print_scale() -> None:
    """Large clusters, one of each kind of job."""
    costs = CostModel.builtin()
    cluster = Cluster(2048, 8, costs.devices["h200"], costs.links["nvlink4"], costs.links["infiniband-400"])
    buckets = tuple(GradientBucket(25_000_000, 2_000.0 * (60 + index), moved=True) for index in range(120))
    stages = (StageLoad(StageCosts(900.0, 900.0, 900.0), (25_000_000,) * 4, 500.0),)
    jobs = {
        "data parallel, 120 buckets": DataParallelJob("", 360_000.0, buckets),
        "1f1b, 16 ranks x 1024, 64 micro-batches": PipelineJob("", build_schedule("1f1b", 16, 64), 16 * stages),
        "zbv, 64 ranks x 256, 128 micro-batches": PipelineJob("", build_schedule("zbv", 64, 128), 128 * stages),
    }
    print("| 16,384 ranks | step | simulated in |\n|---|---|---|")
    for name, job in jobs.items():
        started = time.perf_counter()
        found = simulate(job, cluster)
        print(f"| {name} | {found.step_us / 1e3:.1f} ms | {time.perf_counter() - started:.2f} s |")


if __name__ == "__main__":
    sys.exit(main())
