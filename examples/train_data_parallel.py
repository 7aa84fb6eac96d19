"""Train on several ranks with a compiled step, as with DistributedDataParallel but without the wrapper.

    torchrun --nproc-per-node 2 examples/train_data_parallel.py [--epochs 3] [--checkpoint model.pt]

The data is made up: in which quadrant is a point? Every rank trains on its share of the points.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import wholestep


# "all" lets every update wait for its gradients under the next forward; the default, "auto", judges by the link.
@wholestep.compile(data_parallel="replicate", cross_iteration="all")
def train_step(model, optimizer, features, labels):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(features), labels)
    loss.backward()
    optimizer.step()
    return loss


def make_points(num_points: int, seed: int) -> TensorDataset:
    points = torch.randn(num_points, 2, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(points, 2 * (points[:, 0] > 0).long() + (points[:, 1] > 0).long())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3, help="default %(default)s")
    parser.add_argument("--checkpoint", default="model.pt", help="default %(default)s")
    options = parser.parse_args()

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank = dist.get_rank()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(rank)  # weights differ until the first step, before which all ranks get those of rank 0

    points = make_points(2048, seed=0)
    sampler = DistributedSampler(points)
    batches = DataLoader(points, batch_size=32, sampler=sampler, drop_last=True)
    held_out, held_out_labels = (tensor.to(device) for tensor in make_points(1000, seed=1).tensors)
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 4)).to(device)
    optimizer = AdamW(model.parameters())
    num_steps = options.epochs * len(batches)
    scheduler = OneCycleLR(optimizer, max_lr=0.02, total_steps=num_steps + 1, cycle_momentum=False)

    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for features, labels in batches:
            loss = train_step(model, optimizer, features.to(device), labels.to(device))
            scheduler.step()  # an update that still waits is made with the rate of its own step
        if rank == 0:  # looking at the model or the optimizer, on any rank and at any time, applies what waits
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, options.checkpoint)
        model.eval()
        with torch.no_grad():
            right = (model(held_out).argmax(dim=1) == held_out_labels).float().mean()
        model.train()
        if rank == 0:
            print(f"epoch {epoch}  loss {loss:.4f}  held out: {right:.1%} right", flush=True)

    if rank == 0:
        plan = train_step.plan.communication
        print(f"{num_steps} steps, {train_step.num_captures} capture(s), {len(plan.buckets)} bucket(s) of gradients,")
        print(f"the updates of {len(plan.moved)} of them run in the next iteration; checkpoint: {options.checkpoint}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
