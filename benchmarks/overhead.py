"""What capture costs and what it gives on one CPU process: the captured step against eager and aot_eager.

    python -m benchmarks.overhead [--quick] [--json]

Peers, from the same weights, batch and seeds: the user's eager step, and `torch.compile(model, backend="aot_eager")`
with the eager optimizer (the peer that also runs captured graphs op by op). Steps of all three are interleaved, so that
drift of the machine hits them alike; figures are medians. First calls are timed after a small model has gone through
the same route, so that imports count for nobody. Peak memory is live bytes, measured by one tool for all three.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

import wholestep
from wholestep.cost.measure import measure_peak
from wholestep.zoo import ZooCase, gpt, mlp

OPTIMIZERS: dict[str, dict[str, Any]] = {"AdamW": {}, "AdamW fused": {"fused": True}}
PEERS = ("eager", "aot_eager", "wholestep")


@dataclass(frozen=True)
class Row:
    """One model and optimizer; times in ms per step or s per first call, memory in MB."""

    case: str
    optimizer: str
    step_ms: dict[str, float]
    peak_mb: dict[str, float]
    first_call_s: dict[str, float]

    @property
    def targets(self) -> dict[str, tuple[float, float]]:
        """Ratio and its limit, by name."""
        first = self.first_call_s
        return {
            "step / eager": (self.step_ms["wholestep"] / self.step_ms["eager"], 1.00),
            "peak / eager": (self.peak_mb["wholestep"] / self.peak_mb["eager"], 1.02),
            "capture / aot_eager": (first["wholestep"] / first["aot_eager"], 1.2),
            "dynamic / static capture": (first["wholestep dynamic"] / first["wholestep"], 2.0),
        }


def cases() -> list[tuple[ZooCase, int]]:
    """Models with their batch sizes, from overhead-bound to compute-bound."""
    small = gpt.GPTConfig(vocab_size=512, context=64, width=128, heads=4, layers=4)
    medium = gpt.GPTConfig(vocab_size=2048, context=128, width=256, heads=8, layers=6)
    return [
        (mlp.make_case("MLP 32 wide, batch 4", mlp.MLPConfig()), 4),
        (mlp.make_case("MLP 512 wide, batch 64", mlp.MLPConfig(features=256, width=512)), 64),
        (gpt.make_case("GPT 0.9M, batch 8x64", small), 8),
        (gpt.make_case("GPT 5M, batch 4x128", medium), 4),
    ]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few repeats: a look, not a measurement")
    parser.add_argument("--json", action="store_true", help="machine-readable result on stdout")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default 1)")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    num_steps, num_first = (20, 1) if arguments.quick else (200, 3)
    _warm_up()
    rows: list[Row] = []
    for case, batch_size in cases():
        for name, options in OPTIMIZERS.items():
            print(f"measuring {case.name}, {name} …", file=sys.stderr, flush=True)
            rows.append(_measure(case, batch_size, name, options, num_steps, num_first))
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
    else:
        _print_table(rows)
    return 0


def _measure(case: ZooCase, batch_size: int, name: str, options: dict[str, Any], num_steps: int, num_first: int) -> Row:
    torch.manual_seed(0)
    base, batch = case.build(), case.make_batch(batch_size, 0)
    first_call_s = {
        peer: statistics.median(_first_call_s(peer, case, base, batch, options) for _ in range(num_first))
        for peer in (*PEERS, "wholestep dynamic")
    }
    sides = {peer: _side(peer, case, base, options) for peer in PEERS}
    times: dict[str, list[float]] = {peer: [] for peer in PEERS}
    budget_s = time.perf_counter() + 60
    for index in range(num_steps):
        for peer, (step, model, optimizer) in sides.items():
            started = time.perf_counter()
            step(model, optimizer, batch)
            times[peer].append(time.perf_counter() - started)
        if time.perf_counter() > budget_s and index > 20:
            break
    peak_mb = {
        peer: measure_peak(step, model, optimizer, batch).peak_bytes / 1e6
        for peer, (step, model, optimizer) in sides.items()
    }
    step_ms = {peer: statistics.median(values[3:]) * 1e3 for peer, values in times.items()}
    return Row(case.name, name, step_ms, peak_mb, first_call_s)


def _side(
    peer: str, case: ZooCase, base: torch.nn.Module, options: dict[str, Any]
) -> tuple[Callable[..., Any], Any, Any]:
    """A step of one peer with a model and optimizer of its own."""
    model = copy.deepcopy(base)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **options)
    forward = torch.compile(model, backend="aot_eager") if peer == "aot_eager" else None

    def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
        optimizer.zero_grad()
        loss = case.loss(model if forward is None else forward, batch)  # pyright: ignore[reportArgumentType]
        loss.backward()
        optimizer.step()
        return loss

    if peer == "wholestep":
        return wholestep.compile(train_step), model, optimizer
    if peer == "wholestep dynamic":
        return wholestep.compile(train_step, dynamic_batch=True), model, optimizer
    return train_step, model, optimizer


def _first_call_s(peer: str, case: ZooCase, base: torch.nn.Module, batch: Any, options: dict[str, Any]) -> float:
    torch.compiler.reset()
    step, model, optimizer = _side(peer, case, base, options)
    started = time.perf_counter()
    step(model, optimizer, batch)
    return time.perf_counter() - started


def _warm_up() -> None:
    """Imports, caches and thread pools, for every peer alike."""
    case = gpt.make_case("warm-up", gpt.GPTConfig(layers=1))
    for options in OPTIMIZERS.values():
        for peer in (*PEERS, "wholestep dynamic"):
            _first_call_s(peer, case, case.build(), case.make_batch(2, 0), options)


def _print_table(rows: list[Row]) -> None:
    print(f"torch {torch.__version__}, {platform.machine()}, {torch.get_num_threads()} thread(s)\n")
    print("| model | optimizer | ms/step eager · aot_eager · ours | peak MB eager · aot_eager · ours "
          "| first call s aot_eager · ours · ours dynamic |")  # fmt: skip
    print("|---|---|---|---|---|")
    for row in rows:
        step, peak, first = row.step_ms, row.peak_mb, row.first_call_s
        print(
            f"| {row.case} | {row.optimizer} | {' · '.join(f'{step[peer]:.2f}' for peer in PEERS)} "
            f"| {' · '.join(f'{peak[peer]:.2f}' for peer in PEERS)} "
            f"| {first['aot_eager']:.2f} · {first['wholestep']:.2f} · {first['wholestep dynamic']:.2f} |"
        )
    print("\n| model | optimizer | " + " | ".join(rows[0].targets) + " |")
    print("|---|---|" + "---|" * len(rows[0].targets))
    for row in rows:
        verdicts = [
            f"{ratio:.2f}x {'ok' if ratio <= limit else 'MISSED'} (<= {limit:.2f})"
            for ratio, limit in row.targets.values()
        ]
        print(f"| {row.case} | {row.optimizer} | {' | '.join(verdicts)} |")


if __name__ == "__main__":
    sys.exit(main())
