"""Pipelines: ours against `torch.distributed.pipelining` and against the ideal.

    python -m benchmarks.pipeline [--quick] [--parts emulated cost real paper] [--ranks 2 4] [--json FILE]

- emulated: stages sleep 20 ms for a forward and for each half of a backward, so that cores do not matter. The ideal is
  what `simulate` says if messages take no time: for ours of our order, for torch of torch's own.
- cost: the same without sleeps. What is left is the cost of running stages, per stage and micro-batch; next to it a
  bare loop that only receives and sends on, as 1F1B does.
- real: a GPT over two ranks; torch gets stages made by hand, its best case. Peaks are live bytes beyond parameters;
  backwards whole and in parts are CPU time of one stage on one rank.
- paper: schedules that save memory against 1F1B, and planned ones against a bound that no schedule can beat.

All contenders of a part run in the same processes (gloo, one thread each) in turns; figures are medians.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.data_parallel import ENVIRONMENT
from benchmarks.pipeline_emulated import OURS_ONLY, SHARED
from wholestep.pipe import StageCosts, build_schedule, simulate
from wholestep.pipe.schedule import loop_placement, v_placement
from wholestep.pipe.schedules import planned
from wholestep.pipe.simulate import fill_bound

PARTS = ("emulated", "cost", "real", "paper")
SLEEP_MS = 20.0
NUM_MICRO_BATCHES = {"emulated": 8, "cost": 16, "real": 8}
REAL = ("1f1b", "zbv")
REAL_RANKS = 2
Result = dict[str, Any]


def main(argv: list[str] | None = None) -> int:
    arguments = _parse(argv)
    print(f"torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores\n")
    results: dict[str, Result] = {}
    try:
        for part, num_ranks in _runs(arguments):
            key = f"{part}, {num_ranks} ranks"
            print(f"measuring {key} …", file=sys.stderr, flush=True)
            results[key] = _measure(part, num_ranks, arguments)
    except ChildProcessError as error:
        print(error, file=sys.stderr)
        return 1
    for part, num_ranks in _runs(arguments):
        _TABLES[part](results[f"{part}, {num_ranks} ranks"], num_ranks)
    if "paper" in arguments.parts:
        results["paper"] = {"lean": list(_lean_rows()), "planned": list(_planned_rows())}
        _print_paper(results["paper"])
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))
    return 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="default all")
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4], help="of what is emulated (default 2 4)")
    parser.add_argument("--repeats", type=int, default=9, help="windows per contender (default 9)")
    parser.add_argument("--quick", action="store_true", help="few repeats: a look, not a measurement")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there too")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.repeats = 3
    return arguments


def _runs(arguments: argparse.Namespace) -> Iterator[tuple[str, int]]:
    for part in arguments.parts:
        if part in ("emulated", "cost"):
            yield from ((part, num_ranks) for num_ranks in arguments.ranks)
        elif part == "real":
            yield part, REAL_RANKS


def _measure(part: str, num_ranks: int, arguments: argparse.Namespace) -> Result:
    names = REAL if part == "real" else SHARED if part == "cost" else (*SHARED, *OURS_ONLY)
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "figures.json"
        launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
        command = [sys.executable, "-m", *launcher, "-m", "benchmarks.pipeline_rank", part, "--names", *names]
        options = {
            "micro-batches": NUM_MICRO_BATCHES[part],
            "sleep-ms": SLEEP_MS if part == "emulated" else 0,
            "warmup": 1 if part == "emulated" else 3,
            "repeats": arguments.repeats,
            "window-steps": 10 if part == "cost" else 1,
            "output": output,
        }
        for name, value in options.items():
            command += [f"--{name}", str(value)]
        code = subprocess.run(
            command, env={**os.environ, **ENVIRONMENT, "OMP_NUM_THREADS": "1"}, stdout=sys.stderr, check=False
        ).returncode
        if code != 0:
            raise ChildProcessError(f"a rank failed ({part}, {num_ranks} ranks); its output is above")
        return json.loads(output.read_text())


def _median(result: Result, name: str, key: str = "wall_s") -> float:
    return statistics.median(window[key] for window in result[name]["windows"])


def _print_emulated(result: Result, num_ranks: int) -> None:
    print(f"Stages that sleep {SLEEP_MS:.0f} ms, {num_ranks} ranks, {NUM_MICRO_BATCHES['emulated']} micro-batches\n")
    _print_head(["schedule", "ideal ms", "ours ms", "/ideal", "torch's ideal ms", "torch ms", "/its ideal", "/ours"])
    for name in (*SHARED, *OURS_ONLY):
        cells = [name]
        for side in ("wholestep", "torch"):
            key = f"{side} {name}"
            if key not in result:
                cells += ["-", "-", "-"]
                continue
            ideal_s, wall_s = result[key]["ideal_s"], _median(result, key)
            cells += [f"{ideal_s * 1e3:.0f}", f"{wall_s * 1e3:.1f}", f"{wall_s / ideal_s:.3f}"]
        ratio = _median(result, f"torch {name}") / _median(result, f"wholestep {name}") if name in SHARED else None
        _print_row([*cells, "-" if ratio is None else f"{ratio:.3f}"])
    print()


def _print_cost(result: Result, num_ranks: int) -> None:
    print(f"Microseconds per stage and micro-batch, {num_ranks} ranks, {NUM_MICRO_BATCHES['cost']} micro-batches\n")
    _print_head(["schedule", "ours", "torch", "ours/torch", "CPU ours", "CPU torch", "CPU ours/torch"])
    for name in SHARED:
        cells = [name]
        for key in ("wall_s", "cpu_s"):
            own, other = (_cost_us(result, f"{side} {name}", key) for side in ("wholestep", "torch"))
            cells += [f"{own:.0f}", f"{other:.0f}", f"{own / other:.2f}"]
        _print_row(cells)
    own, other = _cost_us(result, "wholestep 1f1b", "wall_s"), _cost_us(result, "bare 1f1b", "wall_s")
    print(f"\nA bare loop of 1F1B's messages: {other:.0f} (CPU {_cost_us(result, 'bare 1f1b', 'cpu_s'):.0f}); ", end="")
    print(f"our 1F1B is {own / other:.2f} times that.\n")


def _cost_us(result: Result, name: str, key: str) -> float:
    return _median(result, name, key) * 1e6 / (NUM_MICRO_BATCHES["cost"] * result[name]["num_stages"])


def _print_real(result: Result, num_ranks: int) -> None:
    print(f"A GPT, {num_ranks} ranks, {NUM_MICRO_BATCHES['real']} micro-batches\n")
    _print_head(["schedule", "ours ms", "torch ms", "ours/torch", "peak of ranks MB", "torch", "gradients differ by"])
    for name in REAL:
        own, other = (_median(result, f"{side} {name}") for side in ("wholestep", "torch"))
        cells = [name, f"{own * 1e3:.0f}", f"{other * 1e3:.0f}", f"{own / other:.2f}"]
        for side in ("wholestep", "torch"):
            cells.append(", ".join(f"{peak / 1e6:.1f}" for peak in result[f"{side} {name}"]["peak_bytes"]))
        _print_row([*cells, f"{result[f'torch {name}']['difference']:.1e}"])
    print("\nBackward of a stage in the middle\n")
    _print_head(["side", "whole ms", "two parts ms", "parts/whole"])
    for side, times in result["backward"].items():
        whole, parts = times["whole"], times["parts"]
        _print_row([side, f"{whole * 1e3:.2f}", f"{parts * 1e3:.2f}", f"{parts / whole:.3f}"])
    print()


_TABLES = {"emulated": _print_emulated, "cost": _print_cost, "real": _print_real}


# On paper


def _lean_rows() -> Iterator[Result]:
    """What schedules hold and how long their ranks stand idle, against 1F1B with stages of twice the size."""
    for num_ranks in (4, 8, 16, 32):
        num_micro_batches = 4 * num_ranks
        plain = simulate(build_schedule("1f1b", num_ranks, num_micro_batches), StageCosts(2.0, 2.0, 2.0))
        for name in ("v-half", "v-min", "zbv"):
            lean = simulate(build_schedule(name, num_ranks, num_micro_batches), StageCosts())
            work = 6.0 * num_micro_batches
            yield {
                "name": name,
                "ranks": num_ranks,
                "micro_batches": num_micro_batches,
                "peak": max(lean.peaks) / 2 / max(plain.peaks),
                "idle": (lean.makespan - work) / (plain.makespan - work),
                "bubble": lean.bubble,
                "1f1b": plain.bubble,
            }


def _planned_rows() -> Iterator[Result]:
    """Schedules for F = 1, I = 1.3, W = 0.7, as they are and with every stage's own up to 20% off."""
    shape = (1.0, 1.3, 0.7)
    for num_ranks, num_micro_batches in ((4, 8), (8, 16), (8, 32), (16, 64)):
        for placement, stage_ranks in (("loop", loop_placement(num_ranks, 1)), ("V", v_placement(num_ranks))):
            for seed in (None, 0, 1, 2):
                draw = random.Random(seed)
                scales = [[1.0 if seed is None else draw.uniform(0.8, 1.2) for _ in shape] for _ in stage_ranks]
                costs = [StageCosts(*(a * b for a, b in zip(shape, scale, strict=True))) for scale in scales]
                per_rank = len(stage_ranks) // num_ranks
                schedule = planned(num_ranks, num_micro_batches, per_rank, costs=costs, stage_ranks=stage_ranks)
                found = simulate(schedule, costs)
                bound = fill_bound(stage_ranks, num_micro_batches, costs)
                work = statistics.mean(found.busy(rank) for rank in range(num_ranks))
                yield {
                    "ranks": num_ranks,
                    "micro_batches": num_micro_batches,
                    "placement": placement,
                    "costs": "equal stages" if seed is None else f"unequal stages {seed}",
                    "bubble": found.bubble,
                    "bound": 1 - work / bound,
                    "makespan": found.makespan / bound,
                    "others": {
                        name: simulate(build_schedule(name, num_ranks, num_micro_batches), costs).bubble
                        for name in (("zb-h1", "1f1b") if placement == "loop" else ("zbv", "v-half"))
                    },
                }


def _print_paper(paper: Result) -> None:
    print("Lean schedules against 1F1B, F = I = W\n")
    _print_head(["schedule", "ranks", "micro-batches", "peak/1F1B", "idle time/1F1B", "bubble", "1F1B's bubble"])
    for row in paper["lean"]:
        figures = [f"{row[key]:.3f}" for key in ("peak", "idle", "bubble", "1f1b")]
        _print_row([row["name"], str(row["ranks"]), str(row["micro_batches"]), *figures])
    print("\nPlanned schedules, F = 1, I = 1.3, W = 0.7, no memory cap\n")
    _print_head(["ranks", "micro-batches", "placement", "costs", "bubble", "bound", "bubble/bound", "others"])
    for row in paper["planned"]:
        others = ", ".join(f"{name} {bubble:.3f}" for name, bubble in row["others"].items())
        figures = [f"{row['bubble']:.4f}", f"{row['bound']:.4f}", f"{row['bubble'] / row['bound']:.3f}"]
        _print_row([str(row["ranks"]), str(row["micro_batches"]), row["placement"], row["costs"], *figures, others])


def _print_head(names: list[str]) -> None:
    _print_row(names)
    print(f"|{'---|' * len(names)}")


def _print_row(cells: list[str]) -> None:
    print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    sys.exit(main())
