"""Files as users write them, for tests of commands."""

from __future__ import annotations

from pathlib import Path

SMALL = """\
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode

import wholestep


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.head = nn.Linear(width, 8)

    def forward(self, x):
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return self.head(F.dropout(x, 0.1, self.training))


def train_step(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


def make(width=64):
    model = Net(width)
    print("made a model")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    return model, optimizer, torch.randn(32, width), torch.randint(8, (32,))


def make_step():
    return train_step, make()


def make_with_kwargs():
    model, optimizer, x, y = make()
    return train_step, [model, optimizer], {"x": x, "y": y}


def make_compiled():
    return wholestep.compile(train_step, memory_budget=0.0), make()


def make_waiting():
    return wholestep.compile(train_step, data_parallel="replicate", cross_iteration="none", bucket_mb=0.01), make()


def make_drifting():
    model, optimizer, x, y = make()

    def step():
        if get_proxy_mode() is not None:  # while it is captured
            return train_step(model, optimizer, x * 2, y)
        return train_step(model, optimizer, x, y)

    return step, ()


def make_wrong():
    raise ValueError("no such\\nlayer")


def make_nothing():
    pass


def make_half():
    return train_step, "model"


def make_reading():
    return train_step, (*make()[:2], torch.randn(3).sum().item(), None)


NUMBER = 3
"""


def line_of(text: str) -> int:
    """The number of the first line of the file that has some text in it."""
    return next(number for number, line in enumerate(SMALL.splitlines(), start=1) if text in line)


def write_script(folder: Path, text: str = SMALL, name: str = "train.py") -> Path:
    """The file, in a folder of its own."""
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return file
