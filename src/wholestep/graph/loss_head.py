"""A note on values that are logits of a loss head, so that whoever looks at memory can name them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LossHead:
    """The linear layer in front of a cross entropy: its node, where it stands in the user's code, and its chunks.

    `num_chunks` is how many chunks its rows are computed in. With `useful_chunks` of them the logits of one are no more
    than what the head needs besides, whatever the rest of the step needs: more chunks gain little.
    """

    name: str
    source: str
    num_chunks: int
    useful_chunks: int
