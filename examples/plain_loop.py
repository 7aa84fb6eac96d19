"""A plain training loop: dataset, scheduler, gradient clipping, evaluation now and then; only the step is compiled.

    python examples/plain_loop.py [--epochs 3] [--eager]

The data is made up: is a point inside the ring? `--eager` runs the same loop without Wholestep.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

import wholestep


def train_step(model, optimizer, features, labels):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(features), labels)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss, norm


def make_points(num_points: int, seed: int) -> TensorDataset:
    points = torch.randn(num_points, 2, generator=torch.Generator().manual_seed(seed))
    radius = points.norm(dim=1)
    return TensorDataset(points, ((radius > 0.7) & (radius < 1.6)).long())


@torch.no_grad()
def evaluate(model, batches) -> float:
    """The share of points that the model is right about."""
    model.eval()
    right = sum((model(features).argmax(dim=1) == labels).sum().item() for features, labels in batches)
    model.train()
    return right / len(batches.dataset)


def train(epochs: int = 3, evaluate_every: int = 40, eager: bool = False) -> list[float]:
    """Train and return the loss of every step."""
    step = train_step if eager else wholestep.compile(train_step)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = AdamW(model.parameters())
    batches = DataLoader(
        make_points(2000, seed=0), batch_size=48, shuffle=True
    )  # the last batch of an epoch is smaller
    held_out = DataLoader(make_points(1000, seed=1), batch_size=500)
    num_steps = epochs * len(batches)
    scheduler = OneCycleLR(optimizer, max_lr=0.01, total_steps=num_steps + 1, cycle_momentum=False)

    losses = []
    for _ in range(epochs):
        for features, labels in batches:
            loss, norm = step(model, optimizer, features, labels)
            scheduler.step()
            losses.append(loss.item())
            if len(losses) % evaluate_every == 0 or len(losses) == num_steps:
                share = evaluate(model, held_out)
                print(
                    f"step {len(losses)}  loss {losses[-1]:.4f}  gradient norm {norm:.3f}  held out: {share:.1%} right"
                )
    if not eager:
        print(f"{step.num_captures} capture(s): {'; '.join(step.recompile_reasons) or 'nothing has changed'}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3, help="default %(default)s")
    parser.add_argument("--eager", action="store_true", help="without Wholestep")
    options = parser.parse_args()
    train(options.epochs, eager=options.eager)
