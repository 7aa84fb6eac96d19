"""Draw docs/images/memory_pareto.svg and memory_over_time.svg: a small GPT's step within a memory budget.

    python docs/images/make_memory_svg.py [FOLDER]

The pictures are those of `step.memory_pictures`; the same code gives the same bytes.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch

import wholestep
from wholestep.zoo import gpt

CONFIG = gpt.GPTConfig(vocab_size=256, context=128, width=128, heads=4, layers=4)
BATCH_SIZE = 8
NAMES = {"pareto.svg": "memory_pareto.svg", "memory.svg": "memory_over_time.svg"}


@wholestep.compile(memory_budget=0.3)
def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: gpt.Batch) -> torch.Tensor:
    """The step in the pictures."""
    optimizer.zero_grad()
    loss = gpt.loss(model, batch)
    loss.backward()
    optimizer.step()
    return loss


def main(argv: list[str]) -> int:
    target = Path(argv[0]) if argv else Path(__file__).parent
    torch.manual_seed(0)
    model = gpt.GPT(CONFIG)
    train_step(model, torch.optim.AdamW(model.parameters(), fused=True), gpt.make_batch(CONFIG, BATCH_SIZE, seed=0))
    with tempfile.TemporaryDirectory() as folder:
        for path in train_step.memory_pictures(folder):
            if path.name in NAMES:
                (target / NAMES[path.name]).write_bytes(path.read_bytes())
                print(f"wrote {NAMES[path.name]}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
