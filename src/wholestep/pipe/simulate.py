"""What a schedule takes: when each action runs, how long ranks stand idle, and how many activations they hold.

    start(a) = max(end of the action before it on its rank, end(b) + transfer(b, a) for each b that a reads from)
    end(a)   = start(a) + cost(a)

Transfers need a link, not a rank, and links do not fill up: a value travels while both ranks compute. Between two
stages of one rank nothing travels. Activations of a stage are held from the start of its forward to the end of what
frees them: B, or W; with `input_share` the end of I frees that share already. In a schedule for evaluation nothing is
held.

All times are in one unit of the caller's choice: slots, in which a forward takes 1, or measured microseconds.

Three figures tell how good a schedule is:

    makespan   first start to last end
    bubble     share of the makespan in which ranks stand idle, on average
    gaps       the same between the first and the last action of each rank: what is left when steps follow each other
               without a barrier, and one rank begins the next while another ends this one
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from wholestep.errors import ScheduleError
from wholestep.pipe.schedule import Action, Kind, Schedule
from wholestep.pipe.validate import Edge, Neighbours, checked_order


@dataclass(frozen=True)
class StageCosts:
    """How long the actions of one stage take; a whole backward takes both its parts unless `whole` says otherwise."""

    forward: float = 1.0
    input: float = 1.0
    weight: float = 1.0
    whole: float | None = None

    def __post_init__(self) -> None:
        for value in (self.forward, self.input, self.weight, self.of(Kind.BACKWARD)):
            if not 0 <= value < float("inf"):
                raise ScheduleError(f"a cost of {value} is no time; give a finite number, 0 or more")

    def of(self, kind: Kind) -> float:
        """The time of one kind of action."""
        if kind is Kind.FORWARD:
            return self.forward
        if kind is Kind.INPUT:
            return self.input
        if kind is Kind.WEIGHT:
            return self.weight
        return self.input + self.weight if self.whole is None else self.whole


@dataclass(frozen=True, slots=True)
class Span:
    """An action and when it ran."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """What each rank does when: predicted by `simulate`, or measured.

    `peaks` are the most activations that each rank holds at once, in the unit of `activations` of `simulate`; empty if
    not known.
    """

    name: str
    spans: tuple[tuple[Span, ...], ...]
    peaks: tuple[float, ...] = ()
    unit: str = "slots"

    @staticmethod
    def measured(name: str, spans: Iterable[Iterable[tuple[Action, float, float]]], *, unit: str = "us") -> Timeline:
        """A timeline of measured starts and ends, by rank, all by one clock; it begins at 0 whatever the clock says."""
        rows = [sorted(row, key=lambda span: span[1:]) for row in spans]
        origin = min((start for row in rows for _, start, _ in row), default=0.0)
        for rank, row in enumerate(rows):
            for action, start, end in row:
                if not start <= end < float("inf"):
                    raise ScheduleError(f"rank {rank}: {action} runs from {start} to {end}, which is no span of time")
        moved = (tuple(Span(action, start - origin, end - origin) for action, start, end in row) for row in rows)
        return Timeline(name, tuple(moved), unit=unit)

    @property
    def num_ranks(self) -> int:
        return len(self.spans)

    @cached_property
    def makespan(self) -> float:
        ends = [max(span.end for span in row) for row in self.spans if row]
        return max(ends, default=0.0) - min((row[0].start for row in self.spans if row), default=0.0)

    def busy(self, rank: int) -> float:
        """How long a rank computes."""
        return sum(span.end - span.start for span in self.spans[rank])

    def rank_bubble(self, rank: int) -> float:
        """The share of the makespan in which a rank stands idle."""
        return 1 - self.busy(rank) / self.makespan if self.makespan else 0.0

    @cached_property
    def bubble(self) -> float:
        """The share of the makespan in which ranks stand idle, on average over ranks."""
        return sum(self.rank_bubble(rank) for rank in range(self.num_ranks)) / max(self.num_ranks, 1)

    def costs(self) -> list[StageCosts]:
        """How long the actions of each stage take, in the middle; those that it does not do take no time."""
        found: dict[int, dict[Kind, list[float]]] = {}
        for span in (span for row in self.spans for span in row):
            times = found.setdefault(span.action.stage, {})
            times.setdefault(span.action.kind, []).append(span.end - span.start)
        middle = {
            stage: {kind: statistics.median(times) for kind, times in by_kind.items()}
            for stage, by_kind in found.items()
        }
        order = (Kind.FORWARD, Kind.INPUT, Kind.WEIGHT, Kind.BACKWARD)
        return [StageCosts(*(middle[stage].get(kind, 0.0) for kind in order)) for stage in sorted(middle)]

    def gaps(self, rank: int) -> float:
        """How long a rank stands idle between its own first and last action."""
        row = self.spans[rank]
        return row[-1].end - row[0].start - self.busy(rank) if row else 0.0


def simulate(
    schedule: Schedule,
    costs: Sequence[StageCosts] | StageCosts,
    *,
    transfers: Mapping[Edge, float] | None = None,
    activations: Sequence[float] | None = None,
    input_share: float = 0.0,
    unit: str = "slots",
) -> Timeline:
    """When everything runs if every rank does its actions as early as it can; raises what `validate` raises.

    `costs` are those of each stage, or of every stage. `transfers` maps each edge, a pair of stages between which a
    value travels, to how long it and its gradient take on their way; None is the chain of stages, with no time at all.
    `activations` is how much each stage holds for one micro-batch (1 by default: stages count), of which I frees
    `input_share`.
    """
    per_stage = [costs] * schedule.num_stages if isinstance(costs, StageCosts) else list(costs)
    held = list(activations) if activations is not None else [1.0] * schedule.num_stages
    for name, given in (("costs", per_stage), ("activations", held)):
        if len(given) != schedule.num_stages:
            raise ScheduleError(f"there are {len(given)} {name} for {schedule.num_stages} stages; give one for each")
    order = checked_order(schedule, transfers)
    spans = _run(schedule, order, per_stage, transfers)
    peaks = tuple(_peak(row, held, input_share) for row in schedule.actions)
    return Timeline(schedule.name, spans, (0.0,) * len(peaks) if schedule.is_forward_only else peaks, unit)


def _run(
    schedule: Schedule,
    order: Iterable[tuple[int, Action]],
    costs: Sequence[StageCosts],
    transfers: Mapping[Edge, float] | None,
) -> tuple[tuple[Span, ...], ...]:
    """Go through the actions in an order in which all can run; each starts when its rank and its inputs are there."""
    takes = [{kind: cost.of(kind) for kind in Kind} for cost in costs]
    forward_from, backward_from = arrivals(schedule.stage_ranks, transfers)
    forward_ends: dict[tuple[int, int], float] = {}
    backward_ends: dict[tuple[int, int], float] = {}
    free = [0.0] * schedule.num_ranks
    spans: list[list[Span]] = [[] for _ in range(schedule.num_ranks)]
    for rank, action in order:
        kind, stage, micro_batch = action.kind, action.stage, action.micro_batch
        start = free[rank]
        end = start + takes[stage][kind]
        if kind is not Kind.WEIGHT:
            is_forward = kind is Kind.FORWARD
            ends = forward_ends if is_forward else backward_ends
            for other, transfer in (forward_from if is_forward else backward_from)[stage]:
                start = max(start, ends[other, micro_batch] + transfer)
            end = start + takes[stage][kind]
            ends[stage, micro_batch] = end
        free[rank] = end
        spans[rank].append(Span(action, start, end))
    return tuple(map(tuple, spans))


Arrivals = list[list[tuple[int, float]]]


def arrivals(stage_ranks: Sequence[int], transfers: Mapping[Edge, float] | None) -> tuple[Arrivals, Arrivals]:
    """For each stage, where its values come from and how long they travel; the same for its gradients."""
    neighbours = Neighbours.of(len(stage_ranks), transfers)

    times = transfers or {}

    def time(source: int, target: int) -> float:
        return 0.0 if stage_ranks[source] == stage_ranks[target] else times.get((source, target), 0.0)

    for edge, travel in times.items():
        if not 0 <= travel < float("inf"):
            raise ScheduleError(
                f"the transfer from stage {edge[0]} to {edge[1]} takes {travel}; give a time, 0 or more"
            )
    forward = [[(source, time(source, stage)) for source in found] for stage, found in enumerate(neighbours.sources)]
    backward = [[(target, time(stage, target)) for target in found] for stage, found in enumerate(neighbours.targets)]
    return forward, backward


def _peak(row: Iterable[Action], held: Sequence[float], input_share: float) -> float:
    """The most a rank holds: its actions run one after the other, so times do not matter."""
    now = peak = 0.0
    for action in row:
        size = held[action.stage]
        if action.kind is Kind.FORWARD:
            now += size
            peak = max(peak, now)
        elif action.kind is Kind.BACKWARD:
            now -= size
        else:
            now -= size * (input_share if action.kind is Kind.INPUT else 1 - input_share)
    return peak


def transfer_times(num_bytes: Mapping[Edge, float], latency: float, bytes_per_time: float) -> dict[Edge, float]:
    """How long each edge's bytes travel: a latency, and bytes over bandwidth."""
    if not (latency >= 0 and bytes_per_time > 0):
        raise ScheduleError(f"no link has a latency of {latency} and carries {bytes_per_time} bytes per unit of time")
    return {edge: latency + size / bytes_per_time for edge, size in num_bytes.items()}


def fill_bound(
    stage_ranks: Sequence[int],
    num_micro_batches: int,
    costs: Sequence[StageCosts],
    transfers: Mapping[Edge, float] | None = None,
) -> float:
    """A makespan that no schedule can beat: what a rank cannot begin before t, it still has to do after t.

        max over ranks r and times t of   t + work of r that cannot begin before t

    At t = the first input's way to the rank this is the time to fill the pipe plus all of the rank's work. What cannot
    begin earlier is computed as if every stage had a rank of its own. Not always within reach.
    """
    early = _earliest(stage_ranks, num_micro_batches, costs, transfers)
    bound = 0.0
    for rank in set(stage_ranks):
        work = 0.0
        for begin, length in sorted((job for stage in _owned(stage_ranks, rank) for job in early[stage]), reverse=True):
            work += length
            bound = max(bound, begin + work)
    return bound


def _owned(stage_ranks: Sequence[int], rank: int) -> list[int]:
    return [stage for stage, owner in enumerate(stage_ranks) if owner == rank]


def _earliest(
    stage_ranks: Sequence[int],
    num_micro_batches: int,
    costs: Sequence[StageCosts],
    transfers: Mapping[Edge, float] | None,
) -> list[list[tuple[float, float]]]:
    """For each stage, when its forwards and backwards can begin at the earliest, and how long they take."""
    forward_from, backward_from = arrivals(stage_ranks, transfers)
    forward_ends, gradient_ends = ([[0.0] * num_micro_batches for _ in costs] for _ in range(2))
    jobs: list[list[tuple[float, float]]] = [[] for _ in costs]
    for stage, sources in enumerate(forward_from):
        free = 0.0
        for index in range(num_micro_batches):
            begin = max([free, *(forward_ends[source][index] + travel for source, travel in sources)])
            forward_ends[stage][index] = free = begin + costs[stage].forward
            jobs[stage].append((begin, costs[stage].forward))
    for stage in reversed(range(len(costs))):
        free = 0.0
        whole, gradient = _backward_time(costs[stage]), min(costs[stage].input, costs[stage].of(Kind.BACKWARD))
        for index in range(num_micro_batches):
            arrived = (gradient_ends[target][index] + travel for target, travel in backward_from[stage])
            begin = max([free, forward_ends[stage][index], *arrived])
            gradient_ends[stage][index] = free = begin + gradient
            jobs[stage] += [(begin, gradient), (begin + gradient, whole - gradient)]
    return jobs


def _backward_time(costs: StageCosts) -> float:
    """The least a backward takes, whole or in parts."""
    return min(costs.input + costs.weight, costs.of(Kind.BACKWARD))
