"""Train through crashes: a checkpoint every few steps, and `torchrun` starts again from the last one.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # ranks that start again must not find the addresses of the dead ones
    torchrun --nproc-per-node 2 --max-restarts 3 examples/resumable.py [--steps 200] [--every 10] [--folder run]

Kill a rank while it trains (`kill -9`, with one of the process ids it prints): the losses go on as if nothing had
happened. The same command, given again with more `--steps` or on another number of ranks, goes on from the end.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR

import wholestep

BATCH_SIZE = 64  # of all ranks together, so that runs on more or fewer ranks train on the same batches


@wholestep.compile(data_parallel="replicate", cross_iteration="all")
def train_step(model, optimizer, features, labels):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(features), labels)
    loss.backward()
    optimizer.step()
    return loss


def make_batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Batch `number` of made-up data: in which quadrant is a point? Any batch can be made again, so none is missed."""
    points = torch.randn(BATCH_SIZE, 2, generator=torch.Generator().manual_seed(number))
    return points, 2 * (points[:, 0] > 0).long() + (points[:, 1] > 0).long()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="default %(default)s")
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints, default %(default)s")
    parser.add_argument("--width", type=int, default=256, help="of the model, default %(default)s")
    parser.add_argument("--folder", default="run", help="where checkpoints are, default %(default)s")
    options = parser.parse_args()

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    print(f"rank {rank} is process {os.getpid()}\n", end="", flush=True)  # in one piece: the others print too

    torch.manual_seed(0)
    width = options.width
    hidden = [nn.Linear(2, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, width), nn.ReLU()]
    model = nn.Sequential(*hidden, nn.Linear(width, 4)).to(device)
    optimizer = AdamW(model.parameters(), lr=0.001)
    scheduler = CosineAnnealingLR(optimizer, T_max=1000)
    torch.manual_seed(1 + rank)  # every rank drops out other units

    with wholestep.Checkpoints(options.folder, keep=2) as checkpoints:
        done = checkpoints.resume(model=model, optimizer=optimizer, scheduler=scheduler)
        if rank == 0:
            print(f"{done} steps are done", flush=True)
        for number in range(done, options.steps):
            features, labels = (part.chunk(world)[rank].to(device) for part in make_batch(number))
            loss = train_step(model, optimizer, features, labels)
            scheduler.step()
            if rank == 0:
                print(f"step {number + 1}  loss {loss.item():.9f}", flush=True)
            if (number + 1) % options.every == 0:
                checkpoints.save(number + 1, model=model, optimizer=optimizer, scheduler=scheduler)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
