"""Train a small GPT with a compiled step: a schedule, the first steps checked against eager, and a report.

    python examples/train_gpt.py [--steps 200] [--report report.html]

The data is made up: each next token is the last one plus the one before, modulo the vocabulary.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import OneCycleLR

import wholestep
from wholestep.zoo.gpt import GPT, GPTConfig, loss

CONFIG = GPTConfig(vocab_size=17, context=32, width=64, heads=4, layers=2, dropout=0.1)
BATCH_SIZE = 16


@wholestep.compile(verify=2)
def train_step(model: nn.Module, optimizer: Optimizer, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Everything between two batches, as you would write it for eager."""
    optimizer.zero_grad()
    value = loss(model, batch)
    value.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return {"loss": value, "norm": norm}


def make_batch(generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Sequences that follow the rule, from random starts."""
    tokens = torch.randint(CONFIG.vocab_size, (BATCH_SIZE, CONFIG.context + 1), generator=generator)
    for position in range(2, CONFIG.context + 1):
        tokens[:, position] = (tokens[:, position - 1] + tokens[:, position - 2]) % CONFIG.vocab_size
    return {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="training steps (default %(default)s)")
    parser.add_argument("--report", default="report.html", help="where the report goes (default %(default)s)")
    options = parser.parse_args()

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = GPT(CONFIG)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    scheduler = OneCycleLR(optimizer, max_lr=5e-3, total_steps=options.steps + 1, cycle_momentum=False)
    generator = torch.Generator().manual_seed(1)

    started = time.perf_counter()
    for number in range(1, options.steps + 1):
        metrics = train_step(model, optimizer, make_batch(generator))
        scheduler.step()  # the learning rate is an input of the graph: no capture
        if number in (1, options.steps) or number % 50 == 0:
            print(f"step {number:4d}  loss {metrics['loss']:.4f}  gradient norm {metrics['norm']:.3f}")
    print(
        f"{time.perf_counter() - started:.1f} s, {train_step.num_captures} capture(s), the first 2 steps equal eager's"
    )
    print(f"{train_step.graph.num_ops} ops in one graph; report: {train_step.report(options.report)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
