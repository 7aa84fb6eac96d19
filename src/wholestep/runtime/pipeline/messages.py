"""Which values go from rank to rank, in which order, and when: derived from a cut and a schedule, the same everywhere.

*Messages.* What one action makes and another rank reads goes there once, as soon as the action is done. Small values of
an action travel together, because a message costs more than they do. Messages are numbered so that all from one rank to
another have rising numbers in the order in which they are sent, and the receiver asks for them in that order: then no
message needs a name on its way.

*Receives* are posted `look_ahead` actions before their first reader, so that values travel while the rank computes, and
not earlier, because a posted receive holds memory. A receive is also posted early if one is that comes after it.

*Sends* keep their memory until they have arrived, and nobody can be asked whether they have. But a rank learns it: with
every message that it reads, it knows what the sender had done by then, and what the sender knew. So each rank has a
clock that counts, for every rank, the actions that are known to be over (a vector clock); once the first reader of a
message is among them, the message has arrived.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from wholestep.pipe.cut import CutGraph
from wholestep.pipe.schedule import Action, Kind, Schedule
from wholestep.pipe.validate import checked_order

LOOK_AHEAD = 3
"""Enough to hide a message behind a forward and the two halves of a backward."""
SMALL_BYTES = 2**16
"""Up to here copying a value costs less than a message of its own."""


@dataclass(frozen=True)
class Message:
    """Values of one micro-batch that an action of `source` makes, on their way to `target`."""

    source: int
    target: int
    micro_batch: int
    stage: int
    names: tuple[str, ...]


@dataclass(frozen=True)
class RankMessages:
    """Numbers of the messages that concern a rank, by the position of its actions.

    Before an action, receives of `posts` are posted, then messages of `needs` are waited for; by then those of
    `settled` have certainly reached others. After it, `sends` leave.
    """

    posts: tuple[tuple[int, ...], ...]
    needs: tuple[tuple[int, ...], ...]
    settled: tuple[tuple[int, ...], ...]
    sends: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Traffic:
    """All messages of a step, by number, and what each rank does with them."""

    messages: tuple[Message, ...]
    ranks: tuple[RankMessages, ...]


@dataclass(frozen=True)
class ShareMessage:
    """A stage's shares of the gradients of parameters that another rank has too."""

    source: int
    target: int
    stage: int
    slots: tuple[str, ...]


def messages(cut: CutGraph, schedule: Schedule, look_ahead: int = LOOK_AHEAD) -> Traffic:
    """What the ranks send each other in a step. Raises `ScheduleError` if the schedule cannot run."""
    order = checked_order(schedule)
    first_reads = [_first_reads(cut, schedule, rank) for rank in range(schedule.num_ranks)]
    found: list[Message] = []
    readers: list[int] = []  # of each message: the position of the first action that reads it
    sends: list[list[tuple[int, ...]]] = []
    for rank, row in enumerate(schedule.actions):
        sends.append([])
        for action in row:
            begin = len(found)
            for target, names in _leaving(cut, schedule, rank, action, first_reads):
                reads = first_reads[target]
                found.append(Message(rank, target, action.micro_batch, action.stage, names))
                readers.append(min(reads[action.micro_batch, name] for name in names))
            sends[rank].append(tuple(range(begin, len(found))))
    needs = [_no_numbers(len(row)) for row in schedule.actions]
    for number, message in enumerate(found):
        needs[message.target][readers[number]].append(number)
    settled = _settled(schedule, order, found, readers, needs, sends)
    ranks = [
        RankMessages(
            _frozen(_posts(found, readers, rank, len(row), look_ahead)),
            _frozen(needs[rank]),
            _frozen(settled[rank]),
            tuple(sends[rank]),
        )
        for rank, row in enumerate(schedule.actions)
    ]
    return Traffic(tuple(found), tuple(ranks))


def share_messages(cut: CutGraph, schedule: Schedule) -> tuple[ShareMessage, ...]:
    """Who sends which share of a gradient to whom, in an order that is the same on all ranks."""
    if schedule.is_forward_only:
        return ()
    shared: dict[tuple[int, int], list[str]] = defaultdict(list)
    for slot, stages in cut.holders.items():
        ranks = {schedule.stage_ranks[stage] for stage in stages}
        for stage in stages:
            if slot in cut.stages[stage].gradients:
                for target in sorted(ranks - {schedule.stage_ranks[stage]}):
                    shared[stage, target].append(slot)
    found: list[ShareMessage] = []
    for (stage, target), slots in sorted(shared.items()):
        for group in _bundles(slots, {slot: num_bytes(share_fake(cut, stage, slot)) for slot in slots}):
            found.append(ShareMessage(schedule.stage_ranks[stage], target, stage, group))
    return tuple(found)


def share_fake(cut: CutGraph, stage: int, slot: str) -> torch.Tensor:
    """What a stage's share of a gradient looks like, but for its strides: shares are contiguous."""
    return cut.stages[stage].fakes[cut.stages[stage].gradients[slot]]


def num_bytes(fake: torch.Tensor) -> int:
    return math.prod(map(int, fake.shape)) * fake.dtype.itemsize


def _first_reads(cut: CutGraph, schedule: Schedule, rank: int) -> dict[tuple[int, str], int]:
    """By micro-batch and value of another rank: the position of the rank's first action that reads it."""

    @cache
    def foreign(stage: int, kind: Kind) -> tuple[str, ...]:
        values = cut.stages[stage].program(kind).values
        return tuple(name for name in values if schedule.stage_ranks[cut.source[name]] != rank)

    found: dict[tuple[int, str], int] = {}
    for position, action in enumerate(schedule.actions[rank]):
        for name in foreign(action.stage, action.kind):
            found.setdefault((action.micro_batch, name), position)
    return found


def _leaving(
    cut: CutGraph, schedule: Schedule, rank: int, action: Action, first_reads: Sequence[Mapping[tuple[int, str], int]]
) -> Iterable[tuple[int, tuple[str, ...]]]:
    """Messages of an action: where to, and with what."""
    stage = cut.stages[action.stage]
    by_target: dict[int, list[str]] = defaultdict(list)
    for name in stage.program(action.kind).outputs:
        for target in {schedule.stage_ranks[reader] for reader in cut.readers.get(name, ())} - {rank}:
            if (action.micro_batch, name) in first_reads[target]:
                by_target[target].append(name)
    for target, names in sorted(by_target.items()):
        for group in _bundles(names, {name: num_bytes(stage.fakes[name]) for name in names}):
            yield target, group


def _bundles(names: Sequence[str], sizes: Mapping[str, int]) -> list[tuple[str, ...]]:
    """Large ones each alone, and all small ones together."""
    small = tuple(name for name in names if sizes[name] <= SMALL_BYTES)
    return [(name,) for name in names if sizes[name] > SMALL_BYTES] + ([small] if small else [])


def _posts(
    found: Sequence[Message], readers: Sequence[int], rank: int, num_actions: int, look_ahead: int
) -> list[list[int]]:
    """Receives in the order of each sender, as late as `look_ahead` and those behind them allow."""
    posts = _no_numbers(num_actions)
    latest: dict[int, int] = {}
    for number in reversed(range(len(found))):
        message = found[number]
        if message.target == rank:
            latest[message.source] = min(latest.get(message.source, num_actions), max(0, readers[number] - look_ahead))
            posts[latest[message.source]].append(number)
    for numbers in posts:
        numbers.reverse()
    return posts


def _settled(
    schedule: Schedule,
    order: Sequence[tuple[int, Action]],
    found: Sequence[Message],
    readers: Sequence[int],
    needs: Sequence[Sequence[Sequence[int]]],
    sends: Sequence[Sequence[Sequence[int]]],
) -> list[list[list[int]]]:
    """By rank and position: messages of this rank that have arrived, by all that it knows once it has what it needs."""
    num_ranks = schedule.num_ranks
    settled = [_no_numbers(len(row)) for row in schedule.actions]
    clocks = [[0] * num_ranks for _ in range(num_ranks)]
    sent_at: list[list[int]] = [[] for _ in found]  # the sender's clock
    # By rank and target: messages on their way, as the position of their first reader and their number.
    travelling: list[dict[int, list[tuple[int, int]]]] = [defaultdict(list) for _ in range(num_ranks)]
    positions = [0] * num_ranks
    for rank, _ in order:
        position, clock = positions[rank], clocks[rank]
        for number in needs[rank][position]:
            clock[:] = map(max, clock, sent_at[number])
        for target, heap in travelling[rank].items():
            while heap and heap[0][0] < clock[target]:
                settled[rank][position].append(heapq.heappop(heap)[1])
        positions[rank] = clock[rank] = position + 1
        now = list(clock)
        for number in sends[rank][position]:
            sent_at[number] = now
            heapq.heappush(travelling[rank][found[number].target], (readers[number], number))
    return settled


def _no_numbers(num_actions: int) -> list[list[int]]:
    return [[] for _ in range(num_actions)]


def _frozen(numbers: Iterable[Iterable[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(one) for one in numbers)
