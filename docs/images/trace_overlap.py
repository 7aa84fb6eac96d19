"""One rank of a data-parallel training; rank 0 writes a profiler trace of a few steps (see make_overlap_svg.py)."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

import wholestep
from wholestep.zoo import gpt


def train_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]
) -> torch.Tensor:
    optimizer.zero_grad()
    loss = gpt.loss(model, batch)
    loss.backward()
    optimizer.step()
    return loss


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    config = gpt.GPTConfig(vocab_size=2048, context=128, width=256, heads=8, layers=12)
    torch.manual_seed(0)
    model = gpt.GPT(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    batch = gpt.make_batch(config, 5, seed=dist.get_rank())
    step = wholestep.compile(train_step, data_parallel="replicate")
    for _ in range(4):
        step(model, optimizer, batch)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(5):
            step(model, optimizer, batch)
    if dist.get_rank() == 0:
        profiler.export_chrome_trace(sys.argv[1])
    step.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
