"""Step time against peak memory on one GPU: upstream's memory budget and ours, both compiled by Inductor.

    python -m benchmarks.gpu.remat [--points "upstream 1.0" "ours 0.3" ...] [--layers N] [--json FILE]

GPT-2 medium, batch 32 x 1024, bf16 autocast, fused AdamW. Every contender is compiled in this process, one after the
other; times are medians over CUDA events, peaks those of the allocator over a step. "upstream B" is torch.compile with
activation_memory_budget B, "ours B" torch.compile with `wholestep.inductor(memory_budget=B)`.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch import nn

import wholestep
from wholestep.zoo import gpt
from wholestep.zoo.checkpointed import CheckpointedGPT

UPSTREAM = ("upstream 1.0", "upstream 0.7", "upstream 0.5", "upstream 0.3", "upstream 0.1", "upstream 0.0")
OURS = ("ours 1.0", "ours 0.7", "ours 0.4", "ours 0.2", "ours 0.1", "ours 0.0")
POINTS = ("eager", "eager checkpointed", *UPSTREAM, *OURS)


@dataclass(frozen=True)
class Measured:
    """One contender: milliseconds and GiB per step, the loss of its last step, seconds to compile."""

    point: str
    step_ms: float
    peak_gib: float
    loss: float
    compile_s: float


def measure(point: str, config: gpt.GPTConfig, batch: dict[str, torch.Tensor], steps: int) -> Measured:
    """Compile and time one contender from the same initial weights."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    kind, _, budget = point.rpartition(" ")
    is_checkpointed = point == "eager checkpointed"
    model: nn.Module = CheckpointedGPT(config, use_reentrant=False) if is_checkpointed else gpt.GPT(config)
    model = model.cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def loss_of(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return gpt.loss(model, inputs)

    forward: Callable[..., torch.Tensor] = loss_of
    if kind == "upstream":
        forward = torch.compile(loss_of)
    elif kind == "ours":
        share: Any = float(budget) if float(budget) <= 1 else int(float(budget))
        forward = torch.compile(loss_of, backend=wholestep.inductor(memory_budget=share))

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = forward(batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    patch: Any = {"activation_memory_budget": float(budget)} if kind == "upstream" else {}
    with functorch_config.patch(patch):
        started = time.perf_counter()
        for _ in range(3):
            step()
        torch.cuda.synchronize()
        compile_s = time.perf_counter() - started
        torch.cuda.reset_peak_memory_stats()
        times_ms: list[float] = []
        loss = torch.zeros(())
        for _ in range(steps):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            loss = step()
            end.record()
            torch.cuda.synchronize()
            times_ms.append(begin.elapsed_time(end))
    peak_gib = torch.cuda.max_memory_allocated() / 2**30
    return Measured(point, statistics.median(times_ms), peak_gib, loss.item(), compile_s)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", nargs="+", default=POINTS)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("wholestep").setLevel(logging.INFO)
    config = gpt.GPTConfig(
        vocab_size=50257, context=1024, width=1024, heads=16, layers=arguments.layers, dropout=arguments.dropout
    )
    batch = {name: value.cuda() for name, value in gpt.make_batch(config, arguments.batch, 0).items()}
    found: list[Measured] = []
    print("| contender | ms/step | peak GiB | loss | to compile s |\n|---|---|---|---|---|", flush=True)
    for point in arguments.points:
        result = measure(point, config, batch, arguments.steps)
        found.append(result)
        print(
            f"| {point} | {result.step_ms:.1f} | {result.peak_gib:.1f} | {result.loss:.4f} | {result.compile_s:.0f} |",
            flush=True,
        )
        gc.collect()
        torch.cuda.empty_cache()
        if arguments.json:
            arguments.json.write_text(json.dumps([asdict(item) for item in found], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
