"""Tiny models, data and meters that several loops share."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wholestep.zoo.case import seeded_generator


def images(number: int, size: int = 6, side: int = 8, classes: int = 5) -> tuple[Tensor, Tensor]:
    """A batch of images with labels."""
    generator = seeded_generator(number)
    return torch.randn(size, 3, side, side, generator=generator), torch.randint(classes, (size,), generator=generator)


def tokens(number: int, rows: int = 4, length: int = 8, vocabulary: int = 23) -> tuple[Tensor, Tensor]:
    """A batch of token ids, and the same one token later."""
    ids = torch.randint(vocabulary, (rows, length + 1), generator=seeded_generator(number))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


class SmallConvNet(nn.Module):
    """Two convolutions with batch norm and a classifier for images of 8 x 8."""

    def __init__(self, classes: int = 5, p: float = 0.25) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 6, 3, 1), nn.Conv2d(6, 8, 3, 1)
        self.norm = nn.BatchNorm2d(8)
        self.dropout = nn.Dropout(p)
        self.head = nn.Linear(8 * 2 * 2, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.norm(self.conv2(x))), 2)
        return self.head(torch.flatten(self.dropout(x), 1))


class Block(nn.Module):
    """A transformer block with causal attention."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.size()
        parts = self.c_attn(self.norm1(x)).split(width, dim=2)
        q, k, v = (part.view(rows, length, self.heads, width // self.heads).transpose(1, 2) for part in parts)
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=p, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).contiguous().view(rows, length, width))
        return x + self.mlp(self.norm2(x))


class TinyGPT(nn.Module):
    """Tied embeddings, two blocks; returns logits and, with targets, the loss."""

    def __init__(self, vocabulary: int = 23, width: int = 8, dropout: float = 0.1, layers: int = 2) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(16, width)
        self.h = nn.ModuleList(Block(width, 2, dropout) for _ in range(layers))
        self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        assert idx.size(1) <= 16, f"sequence of {idx.size(1)} is too long"
        x = self.wte(idx) + self.wpe(torch.arange(0, idx.size(1), dtype=torch.long, device=idx.device))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


class AverageMeter:
    """The last value and the running average."""

    def __init__(self, name: str, fmt: str = ":f") -> None:
        self.name, self.fmt = name, fmt
        self.reset()

    def reset(self) -> None:
        self.val: Any = 0
        self.avg: Any = 0
        self.sum: Any = 0
        self.count = 0

    def update(self, val: Any, n: int = 1) -> None:
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count

    def __str__(self) -> str:
        return ("{name} {val" + self.fmt + "} ({avg" + self.fmt + "})").format(**self.__dict__)


class ProgressMeter:
    """Meters in one line."""

    def __init__(self, num_batches: int, meters: list[AverageMeter], prefix: str = "") -> None:
        digits = len(str(num_batches // 1))
        fmt = "{:" + str(digits) + "d}"
        self.batch_fmtstr = "[" + fmt + "/" + fmt.format(num_batches) + "]"
        self.meters, self.prefix = meters, prefix

    def display(self, batch: int) -> None:
        entries = [self.prefix + self.batch_fmtstr.format(batch)]
        entries += [str(meter) for meter in self.meters]
        print("\t".join(entries))


def accuracy(output: Tensor, target: Tensor, topk: tuple[int, ...] = (1,)) -> list[Tensor]:
    """Top-k accuracies in percent."""
    with torch.no_grad():
        maxk, batch_size = max(topk), target.size(0)
        _, pred = output.topk(maxk, 1, True, True)
        correct = pred.t().eq(target.view(1, -1).expand_as(pred.t()))
        res = []
        for k in topk:
            correct_k = correct[:k].reshape(-1).float().sum(0, keepdim=True)
            res.append(correct_k.mul_(100.0 / batch_size))
        return res


class Logger:
    """What `wandb.log` is to a script: rows of plain values."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.name = "run"

    def log(self, row: dict[str, Any], step: int | None = None) -> None:
        self.rows.append(row if step is None else {"step": step, **row})


def warmup_cosine(it: int, lr: float = 0.01, warmup: int = 3, last: int = 40, least: float = 0.001) -> float:
    """Linear warm-up, then a cosine."""
    if it < warmup:
        return lr * (it + 1) / (warmup + 1)
    if it > last:
        return least
    decay_ratio = (it - warmup) / (last - warmup)
    coeff = 0.5 * (1.0 + math.cos(math.pi * decay_ratio))
    return least + coeff * (lr - least)
