"""Gradients averaged over the replicas of a pipeline, while other stages of a rank still compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

_BUCKET_BYTES = 25 * 2**20


class Averages:
    """Averages over the ranks of a group; all of them start the same ones in the same order.

    `wait` waits for one collective. It is the caller's because a rank that fails must be able to end the wait.
    """

    def __init__(self, group: Any, num_ranks: int, wait: Callable[[Any], None], device: torch.device) -> None:
        self._group = group
        self._num_ranks = num_ranks
        self._wait = wait
        self._device = device
        self._comparison: tuple[Any, torch.Tensor] | None = None
        self._started: list[tuple[Any, torch.Tensor]] = []

    def start(self, gradients: MutableMapping[str, torch.Tensor], names: Sequence[str]) -> None:
        """Begin to average some gradients; each is replaced by a part of a bucket, which is right after `finish`."""
        if self._num_ranks == 1:
            return
        for bucket_names in _buckets(gradients, names):
            parts = [gradients[name] for name in bucket_names]
            bucket = torch.cat([part.reshape(-1) for part in parts])
            pieces = bucket.split([part.numel() for part in parts])
            for name, part, piece in zip(bucket_names, parts, pieces, strict=True):
                gradients[name] = piece.view(part.shape)
            self._started.append((dist.all_reduce(bucket, group=self._group, async_op=True), bucket))

    def start_comparison(self, mark: int) -> None:
        """Begin to find out whether all ranks have the same number."""
        if self._num_ranks > 1:
            largest = torch.tensor([mark, -mark], device=self._device)
            work = dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._group, async_op=True)
            self._comparison = work, largest

    def finish(self) -> bool:
        """Wait for all that was started; returns whether numbers that were compared are the same."""
        started, self._started = self._started, []
        for work, bucket in started:
            self._wait(work)
            bucket /= self._num_ranks
        if self._comparison is None:
            return True
        (work, largest), self._comparison = self._comparison, None
        self._wait(work)
        most, least = largest.tolist()
        return most == -least


def _buckets(gradients: MutableMapping[str, torch.Tensor], names: Sequence[str]) -> Iterator[list[str]]:
    """Names in order, those of one type on one device together, until a bucket is full."""
    by_kind: dict[Any, list[str]] = {}
    for name in names:
        by_kind.setdefault((gradients[name].dtype, gradients[name].device), []).append(name)
    for same in by_kind.values():
        bucket: list[str] = []
        num_bytes = 0
        for name in same:
            size = gradients[name].nbytes
            if bucket and num_bytes + size > _BUCKET_BYTES:
                yield bucket
                bucket, num_bytes = [], 0
            bucket.append(name)
            num_bytes += size
        yield bucket
