"""A lowered step against torch.compile with a fused optimizer, against eager and against itself unlowered, on the CPU.

    python -m benchmarks.lowering [--quick] [--threads N] [--json FILE]

"compile" is `torch.compile` of forward and loss, with autograd's backward compiled by it and AdamW's fused step in
eager: the best a user can do today. "lowered" is `wholestep.compile(lower="inductor")`, "unlowered" the same without.
Steps of all contenders are interleaved; times are medians. First calls are timed in processes of their own, with an
empty Inductor cache ("cold") and again with what that left ("warm"); imports count for both. Peaks are not measured
here: `torch.compile` runs eager as soon as anybody watches its tensors.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

import wholestep
from wholestep.zoo import ZooCase, gpt, resnet

CONTENDERS = ("eager", "compile", "unlowered", "lowered")


@dataclass(frozen=True)
class Row:
    """One model: ms per step, seconds of the first call with an empty and a full cache."""

    case: str
    step_ms: dict[str, float]
    cold_s: dict[str, float]
    warm_s: dict[str, float]


def cases() -> dict[str, tuple[ZooCase, int]]:
    """Models with their batch sizes."""
    small = gpt.GPTConfig(vocab_size=512, context=64, width=128, heads=4, layers=4, dropout=0.0)
    medium = gpt.GPTConfig(vocab_size=2048, context=128, width=256, heads=4, layers=6, dropout=0.0)
    images = resnet.ResNetConfig(image_size=32, stage_widths=(32, 64, 128))
    return {
        "GPT 0.9M, 8x64": (gpt.make_case("gpt", small), 8),
        "GPT 0.9M, 8x64, dropout": (gpt.make_case("gpt", replace(small, dropout=0.1)), 8),
        "GPT 5M, 8x128": (gpt.make_case("gpt", medium), 8),
        "ResNet, 16x32x32": (resnet.make_case("resnet", images), 16),
    }


def make_step(contender: str, case: ZooCase) -> Callable[..., torch.Tensor]:
    """A step of `(model, optimizer, batch)`."""
    loss_of: Any = torch.compile(case.loss) if contender == "compile" else case.loss

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    if contender == "unlowered":
        return wholestep.compile(step)
    return wholestep.compile(step, lower="inductor") if contender == "lowered" else step


def prepared(contender: str, name: str) -> Callable[[], torch.Tensor]:
    """A contender with weights, optimizer and batch of its own, ready to be called."""
    case, batch_size = cases()[name]
    torch.manual_seed(0)
    model = case.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    batch = case.make_batch(batch_size, 0)
    step = make_step(contender, case)
    return lambda: step(model, optimizer, batch)


def measure(name: str, num_rounds: int, steps: int) -> dict[str, float]:
    """Medians over interleaved rounds, in ms."""
    runs = {contender: prepared(contender, name) for contender in CONTENDERS}
    for run in runs.values():
        for _ in range(3):
            run()
    times: dict[str, list[float]] = {contender: [] for contender in CONTENDERS}
    for _ in range(num_rounds):
        for contender, run in runs.items():
            run()
            for _ in range(steps):
                started = time.perf_counter()
                run()
                times[contender].append(time.perf_counter() - started)
    return {contender: 1e3 * statistics.median(values) for contender, values in times.items()}


def first_call(contender: str, name: str, cache: str, threads: int) -> float:
    """Seconds until the first step is done, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.lowering", "--first-call", contender, name, "--threads", str(threads)]
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache}
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return float(done.stdout.splitlines()[-1])


def main(argv: list[str] | None = None) -> int:
    started = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few repeats: a look, not a measurement")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default 1)")
    parser.add_argument("--cases", nargs="+", default=list(cases()))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--first-call", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    if arguments.first_call:
        prepared(*arguments.first_call)()
        print(time.perf_counter() - started)
        return 0
    rows: list[Row] = []
    for name in arguments.cases:
        print(f"measuring {name} …", file=sys.stderr, flush=True)
        cold: dict[str, float] = {}
        warm: dict[str, float] = {}
        for contender in ("compile", "lowered"):
            with tempfile.TemporaryDirectory() as cache:
                cold[contender] = first_call(contender, name, cache, arguments.threads)
                warm[contender] = first_call(contender, name, cache, arguments.threads)
        rounds, steps = (3, 5) if arguments.quick else (8, 12)
        rows.append(Row(name, measure(name, rounds, steps), cold, warm))
        _print(rows[-1])
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}, {arguments.threads} thread(s)")
    return 0


def _print(row: Row) -> None:
    print(f"\n{row.case}\n| | ms/step | of compile | first call, cold s | warm s |\n|---|---|---|---|---|")
    for contender in CONTENDERS:
        first = [f"{times[contender]:.1f}" if contender in times else "" for times in (row.cold_s, row.warm_s)]
        step_ms = row.step_ms[contender]
        cells = [f"{step_ms:.1f}", f"{step_ms / row.step_ms['compile']:.2f}", *first]
        print(f"| {contender} | {' | '.join(cells)} |")
    print(f"compile time: {row.cold_s['lowered'] / row.cold_s['compile']:.2f}x; "
          f"warm over cold: {row.warm_s['lowered'] / row.cold_s['lowered']:.2f}x", flush=True)  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
