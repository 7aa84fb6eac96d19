"""One-way connections between the ranks of a pipeline.

Each pair of ranks has a connection of its own for each direction in which values travel, because NCCL does what one
connection is asked for strictly in order, on both sides alike: a rank that has posted a receive could not send before
it is served. They are made apart from the job's process groups, so that closing them, which is how a rank that failed
wakes its neighbours, hurts nobody else.
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
_SOURCE, _TARGET = 0, 1


@dataclass(frozen=True)
class Link:
    """One end of a connection; the messages that are sent into it come out in the same order."""

    backend: Any
    is_sender: bool

    def send(self, data: torch.Tensor) -> Any:
        """Start to send; `wait` of what is returned comes back when the memory may be used again."""
        return self.backend.send([data], _TARGET, 0)

    def receive(self, buffer: torch.Tensor) -> Any:
        """Post a receive; `wait` of what is returned comes back when the buffer is full."""
        return self.backend.recv([buffer], _SOURCE, 0)

    def abort(self) -> None:
        """Close the connection now; whoever waits at one of its ends is woken with an error."""
        with contextlib.suppress(RuntimeError):
            if self.backend.name() != "gloo":
                self.backend.abort()
                return
            # Gloo closes a connection, and only then, when somebody has waited for too long.
            peer = _TARGET if self.is_sender else _SOURCE
            nothing = torch.empty(1, dtype=torch.uint8)
            self.backend.recv([nothing], peer, _UNUSED_TAG).wait(timedelta(milliseconds=1))


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
        wire = device if uses_nccl else torch.device("cpu")
        found: dict[tuple[int, int], Link] = {}
        for source, target in sorted(set(ends)):
            if rank not in (source, target):
                continue
            prefixed = PrefixStore(f"{source}-{target}", store)
            try:
                found[source, target] = _link(prefixed, rank == source, wire, timeout_s)
            except RuntimeError as error:
                peer = global_ranks[target if rank == source else source]
                raise PipelineError(f"rank {global_ranks[rank]} cannot connect to rank {peer}: {error}") from error
        return Links(found, wire)

    def abort(self) -> None:
        for link in self.by_ends.values():
            link.abort()

    def close(self) -> None:
        """Give connections back that nobody waits on."""
        for link in self.by_ends.values():
            if link.backend.name() != "gloo":
                link.backend.shutdown()
        self.by_ends.clear()


def _link(store: Store, is_sender: bool, wire: torch.device, timeout_s: float) -> Link:
    """Make one end, and send a byte along: NCCL connects with the first message, and waits for the peer to do so."""
    place = _SOURCE if is_sender else _TARGET
    if wire.type == "cuda":
        kind: Any = dist.ProcessGroupNCCL  # pyright: ignore[reportPrivateImportUsage]
        backend = kind(store, place, 2, kind.Options())
    else:
        backend = dist.ProcessGroupGloo(store, place, 2, timedelta(seconds=timeout_s))
    link = Link(backend, is_sender)
    byte = torch.zeros(1, dtype=torch.uint8, device=wire)
    (link.send if is_sender else link.receive)(byte).wait()
    return link
