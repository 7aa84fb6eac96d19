"""A schedule built by running it: whenever a rank is free, it takes the best action that it can start.

Ranks, stages and micro-batches as in `schedule.py`; each stage takes its micro-batches in order. Time runs from event
to event. A rank that is free at time t looks at its stages' next actions:

    F(s, i)   can start when the values it reads have arrived, and if the rank may hold its activations
    I(s, i)   can start when F(s, i) is done and the gradients it reads have arrived
    W(s, i)   can start when I(s, i) is done

Memory. Let u(s) be what a stage holds for a micro-batch, cap(r) what rank r may hold, free(r) what is left of it.
Taking F whenever it fits can end in a standstill: rank 0 fills up with micro-batches of its first stage, and the oldest
of them cannot enter its last stage and come back. So F(s, i) is taken only if all micro-batches that have begun could
still be finished one after the other, the oldest first:

    for each micro-batch j in flight:   need(r, j) <= free(r) + sum over k < j of held(r, k)

where need is what the stages of r that j has not entered yet will hold, and held what j holds on r now (`_is_safe`).
The oldest micro-batch can then always go on, on every rank, so the run comes to its end, and no rank ever holds more
than its cap. That takes cap(r) >= sum of u(s) over the stages of r; where stages form a chain no schedule can do with
less, because the first backward of a micro-batch on a rank comes after its last forward there. need(r, j) grows only
where j reaches the number of micro-batches that some stage has taken, so only those j are looked at.

What is best is a `Policy`, and none wins everywhere. With equal costs the default one reaches the fill bound (see
`zero_bubble.py`); with others `planned.py` tries several.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from wholestep.pipe.schedule import Action, Kind
from wholestep.pipe.simulate import StageCosts, arrivals
from wholestep.pipe.validate import Edge

_NEVER = float("inf")
# Sums of shares of sizes are not exact.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Problem:
    """What is to be scheduled: stages with their places, costs and sizes, and what each rank may hold.

    `input_share` of a stage's activations is free after I. With `is_forward_only` there is no backward and nothing
    held.
    """

    stage_ranks: tuple[int, ...]
    num_micro_batches: int
    costs: Sequence[StageCosts]
    caps: Sequence[float]
    activations: Sequence[float]
    transfers: Mapping[Edge, float] | None = None
    input_share: float = 0.0
    is_forward_only: bool = False

    @staticmethod
    def of_equals(
        stage_ranks: tuple[int, ...], num_micro_batches: int, cap: float, *, is_forward_only: bool = False
    ) -> Problem:
        """Every action takes one slot, every stage holds one unit, every rank may hold the same."""
        num_stages, num_ranks = len(stage_ranks), max(stage_ranks) + 1
        costs, sizes = [StageCosts()] * num_stages, [1.0] * num_stages
        return Problem(stage_ranks, num_micro_batches, costs, [cap] * num_ranks, sizes, is_forward_only=is_forward_only)


@dataclass(frozen=True)
class Policy:
    """Which of several actions that could start is taken.

    `first`: of a forward and an input gradient, always the one, always the other, or the one that was not taken last.
    `late_forwards`, `late_inputs`: of several stages of a rank, take the later one's first. `weights_make_room`: if a
    forward waits only for memory, a weight gradient goes before an input gradient. `patience`: a weight gradient is not
    begun if something better arrives within this share of its time. `reserve`: room for this many micro-batches of each
    later stage of the rank stays free. Otherwise weight gradients fill what would be a gap.
    """

    first: Literal["input", "forward", "other"] = "other"
    late_forwards: bool = True
    late_inputs: bool = False
    weights_make_room: bool = True
    patience: float = 0.0
    reserve: float = 0.0


@dataclass(frozen=True)
class Solution:
    """The order of each rank's actions, and when the last of them ends."""

    actions: tuple[tuple[Action, ...], ...]
    makespan: float


def greedy_schedule(problem: Problem, policy: Policy) -> Solution:
    """Run the problem by the policy; each rank's cap must hold all its stages for one micro-batch."""
    return _Run(problem, policy).to_the_end()


class _Run:
    """The state of all ranks; counters per stage say how many micro-batches it has taken, in order."""

    def __init__(self, problem: Problem, policy: Policy) -> None:
        self._problem, self._policy = problem, policy
        num_stages, num_ranks = len(problem.stage_ranks), len(problem.caps)
        self._stages = [[s for s, owner in enumerate(problem.stage_ranks) if owner == r] for r in range(num_ranks)]
        self._num_forward, self._num_input, self._num_weight = ([0] * num_stages for _ in range(3))
        forward_from, backward_from = arrivals(problem.stage_ranks, problem.transfers)
        self._forward_to, self._backward_to = _reversed(forward_from), _reversed(backward_from)
        self._forwards = _Inbox([len(found) for found in forward_from], problem.num_micro_batches)
        # A backward waits for its own forward as well.
        self._backwards = _Inbox([len(found) + 1 for found in backward_from], problem.num_micro_batches)
        self._reserves = _reserves(self._stages, problem.activations, policy.reserve)
        self._free_memory = list(problem.caps)
        self._free_at = [0.0] * num_ranks
        self._took_forward = [False] * num_ranks
        self._actions: list[list[Action]] = [[] for _ in range(num_ranks)]
        self._events = [(0.0, rank) for rank in range(num_ranks)]

    def to_the_end(self) -> Solution:
        while self._events:
            now, rank = heapq.heappop(self._events)
            if now < self._free_at[rank]:
                continue
            chosen, later = self._choose(rank, now)
            if chosen is not None:
                self._start(rank, now, *chosen)
            elif now < later < _NEVER:
                heapq.heappush(self._events, (later, rank))
        kinds = 1 if self._problem.is_forward_only else 3
        todo = kinds * len(self._problem.stage_ranks) * self._problem.num_micro_batches
        assert sum(map(len, self._actions)) == todo, "the run has come to a standstill"
        return Solution(tuple(map(tuple, self._actions)), max(self._free_at))

    def _choose(self, rank: int, now: float) -> tuple[tuple[Kind, int] | None, float]:
        """The action to take, as kind and stage, or none; and when the next one arrives as far as is known."""
        policy, stages = self._policy, self._stages[rank]
        forward = backward = weight = None
        later, is_blocked = _NEVER, False
        for stage in stages:
            if self._num_weight[stage] < self._num_input[stage] and (
                weight is None or self._num_weight[stage] <= self._num_weight[weight]
            ):
                weight = stage
            if self._num_input[stage] < self._num_forward[stage]:
                ready = self._backwards.ready[stage][self._num_input[stage]]
                if ready > now:
                    later = min(later, ready)
                elif backward is None or policy.late_inputs:
                    backward = stage
            if self._num_forward[stage] == self._problem.num_micro_batches:
                continue
            ready = self._forwards.ready[stage][self._num_forward[stage]]
            if ready > now and ready >= later:
                continue
            if not self._is_safe(rank, stage):
                is_blocked = is_blocked or ready <= now
            elif ready > now:
                later = ready
            elif forward is None or policy.late_forwards:
                forward = stage
        return self._best(rank, now, forward, backward, weight, is_blocked, later), later

    def _best(
        self,
        rank: int,
        now: float,
        forward: int | None,
        backward: int | None,
        weight: int | None,
        is_blocked: bool,
        later: float,
    ) -> tuple[Kind, int] | None:
        """One of the stages that could start a forward, an input gradient, a weight gradient; or wait."""
        first = self._policy.first
        prefers_forward = first == "forward" or (first == "other" and not self._took_forward[rank])
        if forward is not None and (backward is None or prefers_forward):
            return Kind.FORWARD, forward
        if backward is not None:
            makes_room = weight is not None and is_blocked and self._policy.weights_make_room
            return (Kind.WEIGHT, weight) if makes_room and weight is not None else (Kind.INPUT, backward)
        if weight is None:
            return None
        patience = self._policy.patience * self._problem.costs[weight].weight
        return None if later < now + patience else (Kind.WEIGHT, weight)

    def _is_safe(self, rank: int, stage: int) -> bool:
        """Whether the rank may take the stage's next forward: all in flight can still be finished, the oldest first."""
        problem, stages = self._problem, self._stages[rank]
        if problem.is_forward_only:
            return True
        sizes = problem.activations
        free = self._free_memory[rank] - sizes[stage]
        if free < -_ROUNDING * problem.caps[rank]:
            return False
        if len(stages) == 1:
            return True
        is_oldest = self._num_forward[stage] <= min(self._num_weight[s] for s in stages)
        # What is kept back for others must not stop the oldest: all wait for it.
        if free < self._reserves[stage] and not is_oldest:
            return False
        taken = [self._num_forward[s] + (s == stage) for s in stages]
        newest = max(taken)
        for limit in set(taken):
            if limit == newest:
                continue
            need, room = 0.0, free
            for s, count in zip(stages, taken):
                if count <= limit:
                    need += sizes[s]
                reached = min(limit, count)
                room += sizes[s] * max(0, reached - self._num_weight[s])
                room -= sizes[s] * problem.input_share * max(0, min(reached, self._num_input[s]) - self._num_weight[s])
            if need > room + _ROUNDING * problem.caps[rank]:
                return False
        return True

    def _start(self, rank: int, now: float, kind: Kind, stage: int) -> None:
        problem = self._problem
        end = now + problem.costs[stage].of(kind)
        size = problem.activations[stage]
        if kind is Kind.FORWARD:
            micro_batch = self._num_forward[stage]
            self._num_forward[stage] += 1
            self._took_forward[rank] = True
            self._forward_done(stage, micro_batch, end)
            self._free_memory[rank] -= 0.0 if problem.is_forward_only else size
        elif kind is Kind.INPUT:
            micro_batch = self._num_input[stage]
            self._num_input[stage] += 1
            self._took_forward[rank] = False
            self._free_memory[rank] += size * problem.input_share
            for target, travel in self._backward_to[stage]:
                self._arrives(self._backwards, target, micro_batch, end + travel)
        else:
            micro_batch = self._num_weight[stage]
            self._num_weight[stage] += 1
            self._free_memory[rank] += size * (1 - problem.input_share)
        self._actions[rank].append(Action(kind, stage, micro_batch))
        self._free_at[rank] = end
        heapq.heappush(self._events, (end, rank))

    def _forward_done(self, stage: int, micro_batch: int, end: float) -> None:
        for target, travel in self._forward_to[stage]:
            self._arrives(self._forwards, target, micro_batch, end + travel)
        if not self._problem.is_forward_only:
            self._arrives(self._backwards, stage, micro_batch, end)

    def _arrives(self, inbox: _Inbox, stage: int, micro_batch: int, time: float) -> None:
        if inbox.arrives(stage, micro_batch, time):
            heapq.heappush(self._events, (inbox.ready[stage][micro_batch], self._problem.stage_ranks[stage]))


class _Inbox:
    """When all that a stage reads for a micro-batch has arrived: `ready[stage][micro_batch]`, at first never."""

    def __init__(self, num_inputs: Sequence[int], num_micro_batches: int) -> None:
        self.ready = [[_NEVER if num else 0.0] * num_micro_batches for num in num_inputs]
        self._latest = [[0.0] * num_micro_batches for _ in num_inputs]
        self._num_missing = [[num] * num_micro_batches for num in num_inputs]

    def arrives(self, stage: int, micro_batch: int, time: float) -> bool:
        """One more input will be there at this time; true if none is missing any more."""
        latest = max(self._latest[stage][micro_batch], time)
        self._latest[stage][micro_batch] = latest
        self._num_missing[stage][micro_batch] -= 1
        if self._num_missing[stage][micro_batch]:
            return False
        self.ready[stage][micro_batch] = latest
        return True


def _reserves(stages: list[list[int]], sizes: Sequence[float], share: float) -> dict[int, float]:
    """For each stage, what has to stay free for the later stages of its rank."""
    return {
        stage: share * sum(sizes[later] for later in own[index + 1 :])
        for own in stages
        for index, stage in enumerate(own)
    }


def _reversed(found: list[list[tuple[int, float]]]) -> list[list[tuple[int, float]]]:
    """Who sends to whom, from who receives from whom."""
    turned: list[list[tuple[int, float]]] = [[] for _ in found]
    for stage, others in enumerate(found):
        for other, travel in others:
            turned[other].append((stage, travel))
    return turned
