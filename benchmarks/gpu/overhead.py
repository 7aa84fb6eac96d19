"""Captured step against eager on one GPU: step time and peak memory.

python -m benchmarks.gpu.overhead
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable
from typing import Any

import torch

import wholestep
from wholestep.zoo import gpt

CONFIGS = {
    "GPT 25M, batch 16x256": (gpt.GPTConfig(vocab_size=8192, context=256, width=512, heads=8, layers=6), 16),
    "GPT 124M, batch 16x512": (gpt.GPTConfig(vocab_size=50304, context=512, width=768, heads=12, layers=12), 16),
}


def main() -> None:
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16 autocast, fused AdamW, dropout 0.1")
    for name, (config, batch_size) in CONFIGS.items():
        case = gpt.make_case(name, config)
        torch.manual_seed(0)
        model = case.build().cuda()
        batch = {key: value.cuda() for key, value in case.make_batch(batch_size, 0).items()}

        def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = case.loss(model, batch)  # noqa: B023 (used within this iteration only)
            loss.backward()
            optimizer.step()
            return loss

        rows = {
            "eager": _measure(train_step, model, batch),
            "wholestep": _measure(wholestep.compile(train_step), model, batch),
        }
        for row, (milliseconds, peak_gib, first_s) in rows.items():
            ratio = milliseconds / rows["eager"][0], peak_gib / rows["eager"][1]
            print(
                f"{name:24s} {row:10s} {milliseconds:8.2f} ms ({ratio[0]:.3f}x)  {peak_gib:6.2f} GiB ({ratio[1]:.3f}x)"
                f"  first call {first_s:.1f} s"
            )


def _measure(step: Callable[..., Any], model: torch.nn.Module, batch: Any) -> tuple[float, float, float]:
    """Median step time in ms, peak memory in GiB of a steady step, and the first call in seconds."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def timed() -> float:
        start.record()
        step(model, optimizer, batch)
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end)

    first_s = timed() / 1e3
    for _ in range(5):
        timed()
    torch.cuda.reset_peak_memory_stats()
    times = [timed() for _ in range(30)]
    return statistics.median(times), torch.cuda.max_memory_allocated() / 2**30, first_s


if __name__ == "__main__":
    main()
