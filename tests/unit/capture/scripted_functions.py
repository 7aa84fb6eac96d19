"""Functions under `torch.jit.script`, which wants their source in a file that is imported."""

import torch
from torch import Tensor


def root_of_size(x: Tensor, factor: int) -> Tensor:
    return torch.sqrt(torch.tensor(x.size(-1) * factor, dtype=torch.float))


def spread(x: Tensor, like: Tensor) -> Tensor:
    positions = torch.arange(like.size(0), dtype=torch.float, device=like.device)
    return x + positions[:, None].expand([like.size(0), x.size(-1)]) / 7


def appended(items: list[int]) -> int:
    items.append(3)
    return len(items)
