"""A lowered step against torch.compile with a fused optimizer, against eager and against itself unlowered, on the CPU.

    python -m benchmarks.lowering [--quick] [--threads N] [--keep-heap] [--json FILE]

"compile" is `torch.compile` of forward and loss, with autograd's backward compiled by it and AdamW's fused step in
eager: the best a user can do today. "lowered" is `wholestep.compile(lower="inductor")`, "unlowered" the same without.
Every contender has a process of its own, as it has in real life: a lowered step keeps the process's memory, which
would help the others too. The processes take turns; times are medians. `--keep-heap` sets all of them up like that, by
glibc's own variables, to tell what else there is to win. First calls are timed with an empty Inductor cache ("cold")
and again with what that left ("warm"); imports count for both. Peaks are not measured here: `torch.compile` runs eager
as soon as anybody watches its tensors.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
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
KEPT_HEAP = {"MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_MMAP_THRESHOLD_": str(32 << 20)}


@dataclass(frozen=True)
class Row:
    """One model: ms and page faults per step, seconds of the first call with an empty and a full cache."""

    case: str
    step_ms: dict[str, float]
    num_faults: dict[str, float]
    cold_s: dict[str, float]
    warm_s: dict[str, float]


def cases() -> dict[str, tuple[ZooCase, int]]:
    """Models with their batch sizes."""
    small = gpt.GPTConfig(vocab_size=512, context=64, width=128, heads=4, layers=4, dropout=0.0)
    medium = gpt.GPTConfig(vocab_size=2048, context=128, width=256, heads=4, layers=6, dropout=0.0)
    images = resnet.ResNetConfig(image_size=32, stage_widths=(32, 64, 128))
    return {
        "GPT 0.9M, 2x64": (gpt.make_case("gpt", small), 2),
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


def serve(contender: str, name: str) -> None:
    """Run as many steps as each line of the input asks for; answer with their times and the page faults of a step."""
    run = prepared(contender, name)
    for _ in range(3):
        run()
    for line in sys.stdin:
        run()
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        times: list[float] = []
        for _ in range(int(line)):
            started = time.perf_counter()
            run()
            times.append(time.perf_counter() - started)
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
        print(json.dumps([times, faults / len(times)]), flush=True)


def measure(
    name: str, num_rounds: int, steps: int, threads: int, keep_heap: bool
) -> tuple[dict[str, float], dict[str, float]]:
    """By contender: ms per step, and page faults. Medians over the rounds of processes that take turns."""
    environment = os.environ | (KEPT_HEAP if keep_heap else {})
    servers = {
        contender: subprocess.Popen(
            _command(threads, "--serve", contender, name),
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for contender in CONTENDERS
    }
    times: dict[str, list[float]] = {contender: [] for contender in CONTENDERS}
    faults: dict[str, list[float]] = {contender: [] for contender in CONTENDERS}
    for current in range(num_rounds + 1):
        for contender, server in servers.items():
            assert server.stdin is not None
            assert server.stdout is not None
            print(steps, file=server.stdin, flush=True)
            taken, num_faults = json.loads(server.stdout.readline())
            if current:  # before that, others were still compiling
                times[contender] += taken
                faults[contender].append(num_faults)
    for server in servers.values():
        server.communicate()
    return (
        {contender: 1e3 * statistics.median(values) for contender, values in times.items()},
        {contender: statistics.median(values) for contender, values in faults.items()},
    )


def _command(threads: int, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks.lowering", *arguments, "--threads", str(threads)]


def first_call(contender: str, name: str, cache: str, threads: int) -> float:
    """Seconds until the first step is done, in a process of its own."""
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache}
    command = _command(threads, "--first-call", contender, name)
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return float(done.stdout.splitlines()[-1])


def main(argv: list[str] | None = None) -> int:
    started = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few repeats: a look, not a measurement")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default 1)")
    parser.add_argument("--cases", nargs="+", default=list(cases()))
    parser.add_argument("--keep-heap", action="store_true", help="no contender gives memory back to the system")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--first-call", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    if arguments.first_call:
        prepared(*arguments.first_call)()
        print(time.perf_counter() - started)
        return 0
    if arguments.serve:
        serve(*arguments.serve)
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
        rows.append(Row(name, *measure(name, rounds, steps, arguments.threads, arguments.keep_heap), cold, warm))
        _print(rows[-1])
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}, {arguments.threads} thread(s)")
    return 0


def _print(row: Row) -> None:
    print(
        f"\n{row.case}\n| | ms/step | of compile | page faults/step | first call, cold s | warm s |\n"
        "|---|---|---|---|---|---|"
    )
    for contender in CONTENDERS:
        first = [f"{times[contender]:.1f}" if contender in times else "" for times in (row.cold_s, row.warm_s)]
        step_ms = row.step_ms[contender]
        cells = [
            f"{step_ms:.1f}",
            f"{step_ms / row.step_ms['compile']:.2f}",
            f"{row.num_faults[contender]:.0f}",
            *first,
        ]
        print(f"| {contender} | {' | '.join(cells)} |")
    print(f"compile time: {row.cold_s['lowered'] / row.cold_s['compile']:.2f}x; "
          f"warm over cold: {row.warm_s['lowered'] / row.cold_s['lowered']:.2f}x", flush=True)  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
