"""Lowered updates of optimizers that are not fused, against the same step without lowering, against eager and fused.

    python -m benchmarks.updates [--quick] [--device cuda] [--threads N] [--json FILE]

A step here is `optimizer.step()` with gradients that are there already, of a GPT's parameters. Steps of all contenders
are interleaved; times are medians, ratios are medians of those of each round, in which contenders follow each other.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import wholestep
from wholestep.zoo import gpt

CONTENDERS = ("eager", "unlowered", "lowered")
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": partial(torch.optim.AdamW, foreach=False),
    "AdamW, foreach": partial(torch.optim.AdamW, foreach=True),
    "AdamW, fused": partial(torch.optim.AdamW, fused=True),
    "SGD with momentum": partial(torch.optim.SGD, lr=1e-3, momentum=0.9, foreach=False),
    "SGD with momentum, foreach": partial(torch.optim.SGD, lr=1e-3, momentum=0.9, foreach=True),
    "SGD": partial(torch.optim.SGD, lr=1e-3, foreach=False),
}


@dataclass(frozen=True)
class Row:
    """One optimizer: ms per update, seconds of the first call, and what lowering leaves of the time."""

    optimizer: str
    step_ms: dict[str, float]
    first_s: dict[str, float]
    ratio: float


def update(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()


def prepared(contender: str, name: str, device: str) -> Callable[[], Any]:
    """A contender with weights, gradients and optimizer of its own."""
    torch.manual_seed(0)
    config = gpt.GPTConfig(vocab_size=2048, context=128, width=256, heads=4, layers=6, dropout=0.0)
    model = gpt.make_case("gpt", config).build().to(device)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer = OPTIMIZERS[name](model.parameters())
    options: dict[str, Any] = {"lower": "inductor"} if contender == "lowered" else {}
    step: Any = update if contender == "eager" else wholestep.compile(update, **options)
    return lambda: step(model, optimizer)


def timed(run: Callable[[], Any], device: str) -> float:
    """Seconds of a call, with the device's work."""
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    synchronize()
    started = time.perf_counter()
    run()
    synchronize()
    return time.perf_counter() - started


def measure(name: str, device: str, num_rounds: int, steps: int) -> Row:
    runs = {contender: prepared(contender, name, device) for contender in CONTENDERS}
    first = {contender: timed(run, device) for contender, run in runs.items()}
    times: dict[str, list[float]] = {contender: [] for contender in CONTENDERS}
    for run in runs.values():
        timed(run, device)
    for _ in range(num_rounds):
        for contender, run in runs.items():
            run()
            times[contender].append(statistics.median(timed(run, device) for _ in range(steps)))
    ratio = statistics.median(lowered / plain for lowered, plain in zip(times["lowered"], times["unlowered"]))
    return Row(name, {key: 1e3 * statistics.median(values) for key, values in times.items()}, first, ratio)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few repeats: a look, not a measurement")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default 1)")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    rounds, steps = (4, 5) if arguments.quick else (15, 12)
    rows: list[Row] = []
    print("| optimizer | eager ms | unlowered ms | lowered ms | lowered over unlowered | first call, lowered s |")
    print("|---|---|---|---|---|---|")
    for name in OPTIMIZERS:
        rows.append(row := measure(name, arguments.device, rounds, steps))
        cells = [f"{row.step_ms[contender]:.2f}" for contender in CONTENDERS]
        print(f"| {name} | {' | '.join(cells)} | {row.ratio:.2f}x | {row.first_s['lowered']:.1f} |", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    print(f"{arguments.device}, torch {torch.__version__}, {arguments.threads} thread(s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
