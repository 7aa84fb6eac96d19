"""Whole steps on one GPU: Wholestep lowered to Inductor against torch.compile with a fused optimizer.

    python -m benchmarks.gpu.step [--sizes small medium] [--contenders compile ours ...] [--json FILE] [--profile 1]

GPT-2 small and medium, bf16 autocast, dropout off, fused AdamW. "compile" is torch.compile of forward and loss in mode
default, "autotuned" in mode max-autotune-no-cudagraphs, "reduce-overhead" in that mode, each with AdamW's fused step in
eager; "ours" is `wholestep.compile(lower="inductor")` of the whole step, "ours, graphs" that with `cuda_graphs=True`.

Each contender has a process of its own. They compile side by side, whatever is timed has the GPU to itself, and they
take turns `--rounds` times, each time with some steps in a row, as in training. Times are medians of the rounds; "peak"
is the allocator's over a step, which knows nothing of what CUDA graphs hold, "held" what the process has taken from the
device after its steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import wholestep
from benchmarks.gpu.turns import Gpu, pause, share_out
from wholestep.zoo import gpt

MODES = {"compile": None, "autotuned": "max-autotune-no-cudagraphs", "reduce-overhead": "reduce-overhead"}
OURS: dict[str, dict[str, Any]] = {"ours": {}, "ours, graphs": {"cuda_graphs": True}}
CONTENDERS = ("eager", *MODES, *OURS)
# Layers, width, heads, batch.
SIZES = {"small": (12, 768, 12, 32), "medium": (24, 1024, 16, 16)}
CONTEXT = 1024
_GIB = 2**30


@dataclass(frozen=True)
class Measured:
    """One contender on one model."""

    size: str
    contender: str
    step_ms: float
    tokens_per_s: float
    peak_gib: float
    held_gib: float
    loss: float
    compile_s: float


def make_step(contender: str) -> Callable[..., torch.Tensor]:
    """A step of `(model, optimizer, batch)`."""

    def loss_of(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return gpt.loss(model, batch)

    forward = torch.compile(loss_of, mode=MODES[contender]) if contender in MODES else loss_of

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        optimizer.zero_grad()
        loss = forward(model, batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return wholestep.compile(step, lower="inductor", **OURS[contender]) if contender in OURS else step


class Runner:
    """A contender with its model, compiled by its first steps."""

    def __init__(self, size: str, contender: str) -> None:
        layers, width, heads, self.batch_size = SIZES[size]
        self.size, self.contender = size, contender
        config = gpt.GPTConfig(vocab_size=50257, context=CONTEXT, width=width, heads=heads, layers=layers, dropout=0.0)
        torch.manual_seed(0)
        self.model = gpt.GPT(config).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self.batch = {name: value.cuda() for name, value in gpt.make_batch(config, self.batch_size, 0).items()}
        self.step = make_step(contender)
        self.times_ms: list[float] = []
        self.peak_bytes = self.held_bytes = 0
        self.compile_s = self.loss = 0.0

    def run(self) -> torch.Tensor:
        return self.step(self.model, self.optimizer, self.batch)

    def compile(self) -> None:
        started = time.perf_counter()
        self.run()
        torch.cuda.synchronize()
        self.compile_s = time.perf_counter() - started
        for _ in range(3):  # graphs are recorded
            self.run()
        self._let_go()

    def measure(self, steps: int) -> None:
        for _ in range(3):
            self.run()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        loss = torch.zeros(())
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(steps):
            loss = self.run()
        end.record()
        torch.cuda.synchronize()
        self.times_ms.append(begin.elapsed_time(end) / steps)
        self.loss = loss.item()
        self.peak_bytes = torch.cuda.max_memory_allocated()
        self.held_bytes = torch.cuda.memory_reserved()
        self._let_go()

    def _let_go(self) -> None:
        self.optimizer.zero_grad()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def result(self) -> Measured:
        step_ms = statistics.median(self.times_ms)
        tokens = self.batch_size * CONTEXT / step_ms * 1e3
        memory = (self.peak_bytes / _GIB, self.held_bytes / _GIB)
        return Measured(self.size, self.contender, step_ms, tokens, *memory, self.loss, self.compile_s)

    def profile(self) -> str:
        """The kernels of a step, the longest first."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            for _ in range(3):
                self.run()
            torch.cuda.synchronize()
        found = sorted(profiler.key_averages(), key=lambda item: -item.self_device_time_total)
        rows = [f"{e.self_device_time_total / 3e3:8.3f} ms {e.count / 3:6.0f}x  {e.key[:110]}" for e in found[:45]]
        total = sum(item.self_device_time_total for item in found) / 3e3
        return "\n".join([f"{self.size} {self.contender}: {total:.2f} ms of kernels", *rows])


def work(arguments: argparse.Namespace) -> None:
    """Compile and time some contenders, as one of several processes; results go to the JSON file."""
    gpu = Gpu(arguments.lock)
    gpu.guard_trials()
    runners: list[Runner] = []
    for point in arguments.points:
        runner = Runner(*point.split(" ", 1))
        runner.compile()
        runners.append(runner)
        print(f"{point}: compiled in {runner.compile_s:.0f} s", flush=True)
    for _ in range(arguments.rounds):
        for runner in runners:
            with gpu.alone():
                runner.measure(arguments.steps)
            pause()
    if arguments.profile:
        for runner in runners:
            with gpu.alone():
                print(runner.profile(), flush=True)
    arguments.json.write_text(json.dumps([asdict(runner.result()) for runner in runners]))


def table(results: Sequence[Measured]) -> str:
    lines = [
        "| model | | ms/step | tokens/s | of compile | peak GiB | held GiB | loss | first call s |",
        "|---" * 9 + "|",
    ]
    for item in results:
        peers = [other for other in results if (other.size, other.contender) == (item.size, "compile")]
        ratio = f"{item.tokens_per_s / peers[0].tokens_per_s:.3f}" if peers else ""
        cells = (item.size, item.contender, f"{item.step_ms:.2f}", f"{item.tokens_per_s:,.0f}", ratio)
        memory = (f"{item.peak_gib:.1f}", f"{item.held_gib:.1f}")
        lines.append(f"| {' | '.join((*cells, *memory, f'{item.loss:.4f}', f'{item.compile_s:.0f}'))} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--profile", type=int, default=0, help="1 prints the kernels of a step")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--lock", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--points", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.lock:
        work(arguments)
        return 0
    points = [f"{size} {contender}" for size in arguments.sizes for contender in arguments.contenders]
    options = {key: getattr(arguments, key) for key in ("steps", "rounds", "profile")}
    texts = share_out("benchmarks.gpu.step", points, len(points), options)
    found = [Measured(**item) for text in texts for item in json.loads(text)]
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(item) for item in found], indent=1))
    print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
