"""Train on several pipelines side by side: the model is cut into two stages, and on four ranks there are two of them.

    torchrun --nproc-per-node 4 examples/train_pipeline.py [--steps 40]
    torchrun --nproc-per-node 2 examples/train_pipeline.py     # one pipeline
    python examples/train_pipeline.py [--eager]                # both stages in this process; without Wholestep

The data is made up: how long is a vector? Every pipeline trains on its share of each batch, and gradients are averaged,
so the losses are the same on any number of ranks.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.optim import AdamW

import wholestep

NUM_STAGES, NUM_MICRO_BATCHES = 2, 4
BATCH_SIZE, WIDTH = 64, 32


def make_model() -> nn.Module:
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(5)]
    return nn.Sequential(nn.Linear(8, WIDTH), *blocks, nn.Linear(WIDTH, 1))


def make_batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole batch of a step, for all pipelines together."""
    vectors = torch.randn(BATCH_SIZE, 8, generator=torch.Generator().manual_seed(number))
    return vectors, vectors.norm(dim=1, keepdim=True)


def train_eager(num_steps: int) -> list[float]:
    torch.manual_seed(0)
    model = make_model()
    optimizer = AdamW(model.parameters(), lr=3e-3)
    losses = []
    for number in range(num_steps):
        vectors, lengths = make_batch(number)
        optimizer.zero_grad()
        loss = F.mse_loss(model(vectors), lengths)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def train(num_steps: int = 40) -> list[float | None]:
    """Train and return the loss of every step, of this rank's pipeline; None on ranks without the last stage."""
    is_parallel = dist.is_initialized()
    rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if is_parallel else (0, 1)
    num_pipelines = max(1, num_ranks // NUM_STAGES)
    torch.manual_seed(0)
    model = make_model()
    optimizer = AdamW(model.parameters(), lr=3e-3)
    pipe = wholestep.pipeline(
        model,
        num_stages=NUM_STAGES,
        num_micro_batches=NUM_MICRO_BATCHES,
        loss_fn=F.mse_loss,
        optimizer=optimizer,
        max_grad_norm=1.0,
    )
    losses = []
    for number in range(num_steps):
        vectors, lengths = (part.chunk(num_pipelines)[rank // NUM_STAGES] for part in make_batch(number))
        result = pipe.step(vectors, target=lengths)
        losses.append(None if result.loss is None else float(result.loss))
        if losses[-1] is not None and (number + 1) % 10 == 0:
            print(f"step {number + 1}  rank {rank}  loss {losses[-1]:.6f}", flush=True)
    if rank == 0:
        print(f"{num_pipelines} pipeline(s)\n{pipe.plan}", flush=True)
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="default %(default)s")
    parser.add_argument("--eager", action="store_true", help="without Wholestep, in one process")
    options = parser.parse_args()
    if options.eager:
        print(f"loss {train_eager(options.steps)[-1]:.6f}")
    elif "RANK" in os.environ:
        dist.init_process_group("gloo")
        train(options.steps)
        dist.destroy_process_group()
    else:
        train(options.steps)
