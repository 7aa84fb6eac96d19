# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false, reportIndexIssue=false, reportArgumentType=false
# pyright: reportOptionalMemberAccess=false, reportCallIssue=false, reportPossiblyUnboundVariable=false, reportIncompatibleMethodOverride=false
"""What several kinds of loops need: data, small networks, the meters that scripts carry around."""

from __future__ import annotations

import collections
from collections.abc import Callable

import torch
from torch import Tensor, nn

from wholestep.zoo.case import seeded_generator


def normal(number: int, *shape: int, seed: int = 0) -> Tensor:
    """Normal values, the same for each number of a call."""
    return torch.randn(*shape, generator=seeded_generator(1000 * seed + number))


def integers(number: int, high: int, *shape: int, seed: int = 50) -> Tensor:
    """Integers below `high`, the same for each number of a call."""
    return torch.randint(high, shape, generator=seeded_generator(1000 * seed + number))


def mlp(*sizes: int, norm: bool = False, last: Callable[[], nn.Module] | None = None) -> nn.Sequential:
    """Linear layers with ReLU in between, and batch norms if asked for."""
    layers: list[nn.Module] = []
    for number, (size_in, size_out) in enumerate(zip(sizes, sizes[1:]), start=2):
        layers.append(nn.Linear(size_in, size_out))
        if number < len(sizes):
            layers += [nn.BatchNorm1d(size_out), nn.ReLU()] if norm else [nn.ReLU()]
    return nn.Sequential(*layers, *([last()] if last is not None else []))


class AverageMeter:
    """Computes and stores the average and current value, as in a thousand scripts."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.val = 0
        self.avg = 0
        self.sum = 0
        self.count = 0

    def update(self, val, n=1) -> None:
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count


class SummaryWriter:
    """The scalars that a script writes for its dashboard."""

    def __init__(self) -> None:
        self.scalars: dict[str, list[tuple[int, float]]] = collections.defaultdict(list)

    def add_scalar(self, tag, scalar_value, global_step=None) -> None:
        scalar_value = scalar_value.detach() if isinstance(scalar_value, Tensor) else scalar_value
        self.scalars[tag].append((global_step, float(scalar_value)))


def accuracy(output, target, topk=(1,)):
    """The accuracy over the k top predictions for the values of k, of the ImageNet example."""
    with torch.no_grad():
        maxk = max(topk)
        batch_size = target.size(0)
        _, pred = output.topk(maxk, 1, True, True)
        pred = pred.t()
        correct = pred.eq(target.view(1, -1).expand_as(pred))
        res = []
        for k in topk:
            correct_k = correct[:k].reshape(-1).float().sum(0, keepdim=True)
            res.append(correct_k.mul_(100.0 / batch_size))
        return res
