"""When the logits of a loss head are what the peak consists of, and how many chunks would change that."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from wholestep.cost.memory import MemoryProfile
from wholestep.graph import LossHead


@dataclass(frozen=True)
class LogitsAtPeak:
    """Bytes of a head's logits at the peak, and of all that is alive there apart from slots."""

    head: LossHead
    num_bytes: int
    total_bytes: int

    @property
    def chunks(self) -> int:
        """The fewest chunks with which logits would be no more than half of the peak, as far as chunks are useful."""
        others = max(self.total_bytes - self.num_bytes, 1)
        return min(-(-self.num_bytes * self.head.num_chunks // others), self.head.useful_chunks)

    def __str__(self) -> str:
        place = ", ".join(part for part in (self.head.name, self.head.source) if part)
        remaining = self.num_bytes * self.head.num_chunks // self.chunks
        return (
            f"{self.num_bytes} of {self.total_bytes} bytes at the peak, slots aside, are logits of the loss head "
            f"({place}); chunk_loss={self.chunks} would bring that to {remaining}"
        )


def dominant_logits(profile: MemoryProfile) -> LogitsAtPeak | None:
    """The head whose logits are more than half of the peak and would not be in more chunks, if there is one.

    Slots do not count: parameters, optimizer state and the batch are there whatever the step does.
    """
    transient = [value for value in profile.at_peak if value.slot is None]
    by_head: dict[LossHead, int] = defaultdict(int)
    for value in transient:
        if value.head is not None:
            by_head[value.head] += value.num_bytes
    if not by_head:
        return None
    head = max(by_head, key=by_head.__getitem__)
    found = LogitsAtPeak(head, by_head[head], sum(value.num_bytes for value in transient))
    return found if 2 * found.num_bytes > found.total_bytes and found.chunks > head.num_chunks else None
