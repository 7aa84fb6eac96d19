"""Data parallelism over slow links: how near to the limit max(computation, communication) a step comes.

    python -m benchmarks.data_parallel [--quick] [--only NAME ...] [--models ...] [--rates ...] [--json FILE]

Needs root on Linux (see `benchmarks.netlab`). Two ranks, one thread each, joined by a link of a given rate; GPTs with
dropout 0.1, fused AdamW, no clipping. All contenders run in one pair of processes in turns. Figures are medians over
windows, of the slower rank; windows in which others kept the machine busy are measured again. C is the local step
without communication (on both ranks at once), M a bare all-reduce of all gradients in chunks of 25 MB. "Both at once"
is a local step with such an all-reduce next to it, neither waiting for the other: what max(C, M) becomes when a rank
computes and communicates on the same core. DDP is measured at several bucket sizes; its best one is the peer.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.data_parallel_rank import (
    BACKEND,
    BARE,
    BOTH,
    COMPILED,
    CONTENDERS,
    DDP,
    LOCAL,
    LOWERED,
    MODELS,
    OURS,
    PEERS,
    Window,
)
from benchmarks.netlab import Lab, LabError, Rate, exit_on_signals

NUM_RANKS = 2
# Large thresholds keep freed memory in the process: page faults come and go otherwise, and with them 10-20% of a step.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": 2**30, "MALLOC_TRIM_THRESHOLD_": 2**32, "MALLOC_TOP_PAD_": 2**28}
# No name server answers inside the lab, which torch would warn about on every rank.
ENVIRONMENT = {**{name: str(value) for name, value in MALLOC.items()}, "TORCH_CPP_LOG_LEVEL": "ERROR"}


@dataclass(frozen=True)
class Row:
    """One model on one link: seconds per step, by contender; cores that others kept busy in the worst window."""

    model: str
    rate: str
    gradient_mb: float
    wall_s: dict[str, float]
    spread_s: dict[str, float]
    cpu_s: dict[str, float]
    others_cores: float

    @property
    def limit_s(self) -> float:
        return max(self.wall_s[LOCAL], self.wall_s[BARE])

    @property
    def best_ddp(self) -> str:
        return min((name for name in self.wall_s if name in DDP), key=lambda name: self.wall_s[name])


def main(argv: list[str] | None = None) -> int:
    arguments = _parse(argv)
    exit_on_signals()
    contenders = _chosen(arguments.only)
    if BACKEND != "inductor" and set(COMPILED) & set(contenders):
        print(f"no C++ compiler found: torch.compile(DDP) runs with backend {BACKEND}", file=sys.stderr)
    rows: list[Row] = []
    try:
        for model in arguments.models or MODELS:
            for rate in arguments.rates or MODELS[model].rates:
                print(f"measuring {model}, {rate} …", file=sys.stderr, flush=True)
                rows.append(_measure(model, rate, contenders, arguments))
    except (LabError, ChildProcessError) as error:
        print(error, file=sys.stderr)
        return 2 if isinstance(error, LabError) else 1
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    _print_tables(rows, contenders)
    return 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, help="default all")
    parser.add_argument("--rates", nargs="+", type=str, metavar="RATE", help="default: those that suit the model")
    groups = {
        "peers": "the default",
        "compiled": "torch.compile(DDP), slow to start",
        "ours": "Wholestep",
        "lowered": "Wholestep with and without Inductor, and without communication",
    }
    described = "; ".join(f"{name}: {text}" for name, text in groups.items())
    parser.add_argument("--only", nargs="+", metavar="NAME", help=f"contenders or groups of them ({described})")
    parser.add_argument("--repeats", type=int, default=5, help="quiet windows per contender (default 5)")
    parser.add_argument("--max-repeats", type=int, help="the same, with disturbed windows (default: 3 x repeats)")
    parser.add_argument("--window-steps", type=int, default=3, help="steps per window (default 3)")
    parser.add_argument("--warmup", type=int, default=3, help="steps before all windows (default 3)")
    parser.add_argument("--quick", action="store_true", help="few repeats: a look, not a measurement")
    parser.add_argument("--pin", action="store_true", help="keep rank N on core N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there too")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.repeats, arguments.window_steps, arguments.warmup = 2, 2, 2
    arguments.max_repeats = arguments.max_repeats or 3 * arguments.repeats
    try:
        for rate in arguments.rates or []:
            Rate.parse(rate)
        _chosen(arguments.only)
    except ValueError as error:
        parser.error(str(error))
    return arguments


def _chosen(only: list[str] | None) -> list[str]:
    """Names of contenders; C, M and both at once are always among them, as every figure is held against these."""
    groups = {"peers": list(PEERS), "compiled": list(COMPILED), "ours": list(OURS), "lowered": list(LOWERED)}
    names = [LOCAL, BARE, BOTH]
    for name in only or ["peers"]:
        if name not in groups and name not in CONTENDERS:
            raise ValueError(f"no contender '{name}': choose from {', '.join([*groups, *CONTENDERS])}")
        names += groups.get(name, [name])
    return list(dict.fromkeys(names))


def _measure(model: str, rate: str, contenders: list[str], arguments: argparse.Namespace) -> Row:
    with tempfile.TemporaryDirectory() as folder, Lab(NUM_RANKS, rate, pin=arguments.pin) as lab:
        output = Path(folder) / "times.json"
        command = [sys.executable, "-m", "benchmarks.data_parallel_rank", "--model", model, "--output", str(output)]
        for option in ("warmup", "repeats", "max_repeats", "window_steps"):
            command += [f"--{option.replace('_', '-')}", str(getattr(arguments, option))]
        code = lab.run([*command, "--contenders", *contenders], env=ENVIRONMENT, output=sys.stderr)
        if code != 0:
            raise ChildProcessError(f"a rank ended with exit code {code}: {model}, {rate}; its output is above")
        return _row(model, rate, json.loads(output.read_text()), arguments.repeats)


def _row(model: str, rate: str, result: dict[str, Any], repeats: int) -> Row:
    windows = {name: [Window(**values) for values in each] for name, each in result["windows"].items()}
    quietest = {name: sorted(each, key=lambda window: window.others_cores)[:repeats] for name, each in windows.items()}
    walls_s = {name: [window.wall_s for window in each] for name, each in quietest.items()}
    return Row(
        model=model,
        rate=rate,
        gradient_mb=result["gradient_bytes"] / 1e6,
        wall_s={name: statistics.median(values) for name, values in walls_s.items()},
        spread_s={name: max(values) - min(values) for name, values in walls_s.items()},
        cpu_s={name: statistics.median(window.cpu_s for window in each) for name, each in quietest.items()},
        others_cores=max(window.others_cores for each in quietest.values() for window in each),
    )


def _print_tables(rows: list[Row], contenders: list[str]) -> None:
    others = max(row.others_cores for row in rows)
    machine = f"{platform.machine()}, {os.cpu_count()} cores, at most {others:.1f} of them busy with others"
    print(f"torch {torch.__version__}, {machine}\n")
    for model in dict.fromkeys(row.model for row in rows):
        size, config = MODELS[model], MODELS[model].config
        sizes = f"{config.layers} layers, width {config.width}, vocabulary {config.vocab_size}"
        gradient_mb = next(row.gradient_mb for row in rows if row.model == model)
        print(f"- {model}: {sizes}, batch {size.batch_size}x{config.context}, {gradient_mb:.0f} MB of gradients")
    _print_summary(rows, contenders)
    print("\nms per step (distance of slowest and fastest window)\n")
    _print_head(["model", "link", *contenders, "cores busy with others, at most"])
    for row in rows:
        cells = [f"{row.wall_s[name] * 1e3:.0f} ({row.spread_s[name] * 1e3:.0f})" for name in contenders]
        print(f"| {row.model} | {row.rate} | {' | '.join(cells)} | {row.others_cores:.1f} |")
    print("\nCPU ms per step and rank, all threads\n")
    _print_head(["model", "link", *contenders])
    for row in rows:
        print(
            f"| {row.model} | {row.rate} | " + " | ".join(f"{row.cpu_s[name] * 1e3:.0f}" for name in contenders) + " |"
        )


def _print_head(names: list[str]) -> None:
    print(f"| {' | '.join(names)} |\n|{'---|' * len(names)}")


def _print_summary(rows: list[Row], contenders: list[str]) -> None:
    """Everyone against the limit, and against the best DDP where there is one."""
    with_ddp = any(name in DDP for name in contenders)
    others = [name for name in contenders if name not in DDP and name not in (LOCAL, BARE, BOTH)]
    heads = ["model", "link", "C ms", "M ms", "M/C", "both at once ms"]
    heads += ["best DDP ms (bucket)", "DDP/max(C,M)"] if with_ddp else []
    for name in others:
        heads += [f"{name} ms", "/max(C,M)", "/both"] + (["/DDP"] if with_ddp else [])
    print()
    _print_head(heads)
    for row in rows:
        local_s, bare_s = row.wall_s[LOCAL], row.wall_s[BARE]
        both_s = row.wall_s[BOTH]
        cells = [row.model, row.rate, f"{local_s * 1e3:.0f}", f"{bare_s * 1e3:.0f}", f"{bare_s / local_s:.2f}"]
        cells += [f"{both_s * 1e3:.0f}"]
        best_s = row.wall_s[row.best_ddp] if with_ddp else 0.0
        if with_ddp:
            cells += [f"{best_s * 1e3:.0f} ({row.best_ddp.removeprefix('DDP ')})", f"{best_s / row.limit_s:.2f}"]
        for name in others:
            cells += [
                f"{row.wall_s[name] * 1e3:.0f}",
                f"{row.wall_s[name] / row.limit_s:.2f}",
                f"{row.wall_s[name] / both_s:.2f}",
            ]
            cells += [f"{row.wall_s[name] / best_s:.2f}"] if with_ddp else []
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    sys.exit(main())
