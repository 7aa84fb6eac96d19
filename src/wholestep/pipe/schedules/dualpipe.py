"""DualPipeV: two stages per rank, down and up again, in which a forward and a whole backward mostly go side by side.

On real devices the point of the pairing is that one of the two computes while the other communicates. Here, where
actions run one after the other, it is the order alone. Let q = p - 1 - r be the ranks below rank r, a its earlier
stage, b its later one. Rank r runs, with each kind's micro-batches in order,

    2q x  Fa                            the way down fills
    r+1 x Fa Fb
    q x   Ib Wb Fb                      the first ones come back; weight gradients at once
    m - 2p + r + 1 x   Fa Bb  Fb Ba     the body: forward and backward in pairs
    q x   Bb  Fb Ba
    r+1 x Bb Ba                         the second half of it in parts: Ib, Ia, their W left for later
    q x   W Ia                          gaps filled by what was left
    r+1 x W

It takes m >= 2p; for fewer micro-batches the schedule for 2p is built and the others are left out. That is always
right: no action needs one of another micro-batch, so what is left can only start earlier.

Reached with F = I = W = 1 and m >= 2p: the bubble of ZBV, (p-1)/(6m+p-1), with at most 2p + 1 stages held, one more
than ZBV, and with whole backwards in the body.
"""

from __future__ import annotations

from collections import deque

from wholestep.pipe.schedule import Action, Kind, Schedule, v_placement
from wholestep.pipe.schedules.shape import check_shape


def dualpipe_v(num_ranks: int, num_micro_batches: int) -> Schedule:
    """Two stages per rank, down and up again; forward and backward in pairs."""
    check_shape("dualpipe-v", num_ranks, num_micro_batches, 2)
    num_built = max(num_micro_batches, 2 * num_ranks)
    rows = (_Row(rank, num_ranks).build(num_built) for rank in range(num_ranks))
    kept = (tuple(action for action in row if action.micro_batch < num_micro_batches) for row in rows)
    return Schedule("dualpipe-v", tuple(kept), v_placement(num_ranks), num_micro_batches)


class _Row:
    """The actions of one rank as they are built: every kind of a stage takes its micro-batches in order."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self._rank, self._num_ranks = rank, num_ranks
        self._early, self._late = rank, 2 * num_ranks - 1 - rank
        self._num_forward = {self._early: 0, self._late: 0}
        self._num_backward = {self._early: 0, self._late: 0}
        self._left: deque[Action] = deque()
        self._actions: list[Action] = []

    def build(self, num_micro_batches: int) -> list[Action]:
        early, late, own = self._early, self._late, self._rank + 1
        below = self._num_ranks - own
        for _ in range(2 * below):
            self._forward(early)
        for _ in range(own):
            self._forward(early)
            self._forward(late)
        for _ in range(below):
            self._backward(late, in_parts=True)
            self._weight()
            self._forward(late)
        for _ in range(num_micro_batches - 2 * self._num_ranks + own):
            self._forward(early)
            self._backward(late)
            self._forward(late)
            self._backward(early)
        for _ in range(below):
            self._backward(late)
            self._forward(late)
            self._backward(early)
        # The later half of these 2 * own backwards is in parts, begun with either stage.
        for index in range(2 * own):
            self._backward(early if index % 2 else late, in_parts=index >= own)
        for _ in range(below):
            self._weight()
            self._backward(early, in_parts=True)
        while self._left:
            self._weight()
        return self._actions

    def _forward(self, stage: int) -> None:
        self._actions.append(Action(Kind.FORWARD, stage, self._num_forward[stage]))
        self._num_forward[stage] += 1

    def _backward(self, stage: int, *, in_parts: bool = False) -> None:
        micro_batch = self._num_backward[stage]
        self._num_backward[stage] += 1
        self._actions.append(Action(Kind.INPUT if in_parts else Kind.BACKWARD, stage, micro_batch))
        if in_parts:
            self._left.append(Action(Kind.WEIGHT, stage, micro_batch))

    def _weight(self) -> None:
        if self._left:
            self._actions.append(self._left.popleft())
