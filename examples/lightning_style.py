"""A module in the style of Lightning: `training_step` and `configure_optimizers`, and a fit function around them.

    python examples/lightning_style.py [--epochs 2] [--eager]

Lightning itself is not needed. What `fit` compiles is the whole step, with the optimizer in it; the module is as it
would be. The data is made up: sums of two numbers, as digits one can read.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

import wholestep


class Adder(nn.Module):
    """Learns to add two digits."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.digits = nn.Embedding(10, width)
        self.layers = nn.Sequential(nn.Linear(2 * width, width), nn.GELU(), nn.Linear(width, 19))

    def forward(self, pairs):
        return self.layers(self.digits(pairs).flatten(1))

    def training_step(self, batch):
        pairs, sums = batch
        logits = self(pairs)
        return {"loss": F.cross_entropy(logits, sums), "right": (logits.argmax(dim=1) == sums).float().mean()}

    def configure_optimizers(self):
        optimizer = AdamW(self.parameters(), lr=5e-3)
        return optimizer, CosineAnnealingLR(optimizer, T_max=200)


def fit(module, batches, epochs: int, eager: bool = False) -> list[float]:
    """What a trainer does: everything between two batches is one step; returns the loss of each."""
    optimizer, scheduler = module.configure_optimizers()

    def step(module, batch):
        optimizer.zero_grad()
        logged = module.training_step(batch)
        logged["loss"].backward()
        optimizer.step()
        return logged

    run = step if eager else wholestep.compile(step)
    losses = []
    for epoch in range(epochs):
        for batch in batches:
            logged = run(module, batch)
            scheduler.step()
            losses.append(logged["loss"].item())
        print(f"epoch {epoch}  loss {losses[-1]:.4f}  {logged['right']:.0%} of the last batch are right")
    return losses


def train(epochs: int = 2, eager: bool = False) -> list[float]:
    torch.manual_seed(0)
    pairs = torch.randint(10, (3200, 2), generator=torch.Generator().manual_seed(0))
    batches = DataLoader(TensorDataset(pairs, pairs.sum(dim=1)), batch_size=64, shuffle=True)
    return fit(Adder(), batches, epochs, eager)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=2, help="default %(default)s")
    parser.add_argument("--eager", action="store_true", help="without Wholestep")
    options = parser.parse_args()
    train(options.epochs, options.eager)
