"""Connections between the ranks of a pipeline.

They are made apart from the job's process groups, so that closing them, which is how a rank that failed wakes its
neighbours, hurts nobody else. Gloo matches messages of two ranks by direction: one group serves all of them, with one
thread of its own. NCCL does what a connection is asked for strictly in order, on both sides alike, and a rank that has
posted a receive could not send before it is served: each pair of ranks has a connection for each direction in which
values travel.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]

from wholestep.errors import PipelineError

_UNUSED_TAG = 0xC105E


@dataclass(frozen=True)
class Link:
    """One end of a one-way connection; the messages that are sent into it come out in the same order."""

    backend: Any
    peer: int

    def send(self, data: torch.Tensor) -> Any:
        """Start to send; `wait` of what is returned comes back when the memory may be used again."""
        return self.backend.send([data], self.peer, 0)

    def receive(self, buffer: torch.Tensor) -> Any:
        """Post a receive; `wait` of what is returned comes back when the buffer is full."""
        return self.backend.recv([buffer], self.peer, 0)

    def abort(self) -> None:
        """Close the connection now; whoever waits at one of its ends is woken with an error."""
        with contextlib.suppress(RuntimeError):
            if self.backend.name() != "gloo":
                self.backend.abort()
                return
            # Gloo closes a connection, and only then, when somebody has waited for too long.
            nothing = torch.empty(1, dtype=torch.uint8)
            self.backend.recv([nothing], self.peer, _UNUSED_TAG).wait(timedelta(milliseconds=1))


@dataclass(frozen=True)
class Links:
    """The links of one rank, by source and target, and where the bytes that travel on them have to lie."""

    by_ends: dict[tuple[int, int], Link]
    wire: torch.device

    @staticmethod
    def connect(
        store: Store,
        ends: Iterable[tuple[int, int]],
        rank: int,
        global_ranks: Sequence[int],
        device: torch.device,
        timeout_s: float,
    ) -> Links:
        """Connect all pairs; every rank gets the same ones and meets its peers in the same order."""
        uses_nccl = device.type == "cuda" and "nccl" in dist.get_backend_config()
        own = [pair for pair in sorted(set(ends)) if rank in pair]
        if not uses_nccl:
            return Links(_by_gloo(store, own, rank, global_ranks, timeout_s), torch.device("cpu"))
        found: dict[tuple[int, int], Link] = {}
        for source, target in own:
            try:
                found[source, target] = _by_nccl(PrefixStore(f"{source}-{target}", store), rank == source, device)
            except RuntimeError as error:
                peer = global_ranks[target if rank == source else source]
                raise PipelineError(f"rank {global_ranks[rank]} cannot connect to rank {peer}: {error}") from error
        return Links(found, device)

    def abort(self) -> None:
        for link in self.by_ends.values():
            link.abort()

    def close(self) -> None:
        """Give connections back that nobody waits on."""
        for link in self.by_ends.values():
            if link.backend.name() != "gloo":
                link.backend.shutdown()
        self.by_ends.clear()


def _by_gloo(
    store: Store, own: Sequence[tuple[int, int]], rank: int, global_ranks: Sequence[int], timeout_s: float
) -> dict[tuple[int, int], Link]:
    """One group for all ranks."""
    if len(global_ranks) == 1:
        return {}
    try:
        backend = dist.ProcessGroupGloo(store, rank, len(global_ranks), timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise PipelineError(f"rank {global_ranks[rank]} cannot connect to the other ranks: {error}") from error
    return {pair: Link(backend, pair[1] if pair[0] == rank else pair[0]) for pair in own}


def _by_nccl(store: Store, is_sender: bool, device: torch.device) -> Link:
    """Make one end, and send a byte along: NCCL connects with the first message, and waits for the peer to do so."""
    kind: Any = dist.ProcessGroupNCCL  # pyright: ignore[reportPrivateImportUsage]
    link = Link(kind(store, 0 if is_sender else 1, 2, kind.Options()), 1 if is_sender else 0)
    byte = torch.zeros(1, dtype=torch.uint8, device=device)
    (link.send if is_sender else link.receive)(byte).wait()
    return link
