"""Schedules with whole backwards: GPipe, 1F1B, interleaved 1F1B, looped BFS; and forwards alone, for evaluation.

With p ranks, v stages per rank, m micro-batches, equal stages and a backward twice as long as a forward:

    schedule           bubble               most activations on a rank, in micro-batches of all its stages
    GPipe              (p-1)/(m+p-1)        m
    1F1B               (p-1)/(m+p-1)        min(p, m) on rank 0, one less on each further rank
    interleaved 1F1B   (p-1)/(vm+p-1)       p (1 + (p-1)/(pv)) if p divides m; m >= p
    looped BFS         (p-1)/(vm+p-1)       m; m >= p

With fewer micro-batches than ranks the looping ones wait for each micro-batch to come round: their bubble is larger,
1F1B's is not.
"""

from __future__ import annotations

from itertools import chain, pairwise, zip_longest

from wholestep.errors import ScheduleError
from wholestep.pipe.schedule import Action, Kind, Schedule, loop_placement
from wholestep.pipe.schedules.greedy import Policy, Problem, greedy_schedule
from wholestep.pipe.schedules.shape import check_shape


def gpipe(num_ranks: int, num_micro_batches: int) -> Schedule:
    """All forwards, then all backwards; one stage per rank. Holds every micro-batch."""
    return _all_then_all("gpipe", num_ranks, num_micro_batches, 1)


def looped_bfs(num_ranks: int, num_micro_batches: int, stages_per_rank: int = 2) -> Schedule:
    """GPipe over several stages per rank: all micro-batches pass one before any enters the next. Holds everything."""
    return _all_then_all("looped-bfs", num_ranks, num_micro_batches, stages_per_rank)


def one_f_one_b(num_ranks: int, num_micro_batches: int) -> Schedule:
    """One stage per rank; as many forwards as there are ranks from here on, then backward and forward in turn."""
    check_shape("1f1b", num_ranks, num_micro_batches, 1)
    rows: list[tuple[Action, ...]] = []
    for rank in range(num_ranks):
        forwards = [Action(Kind.FORWARD, rank, index) for index in range(num_micro_batches)]
        backwards = [Action(Kind.BACKWARD, rank, index) for index in range(num_micro_batches)]
        rows.append(_in_turn(forwards, backwards, num_ranks - 1 - rank))
    return Schedule("1f1b", tuple(rows), loop_placement(num_ranks, 1), num_micro_batches)


def interleaved_1f1b(num_ranks: int, num_micro_batches: int, stages_per_rank: int = 2) -> Schedule:
    """1F1B over several stages per rank: micro-batches in groups, each of which passes a rank's stages one by one.

    A group has as many micro-batches as there are ranks, so that the first comes round just when the last has left. If
    the number of micro-batches is no multiple of that, groups are a little larger, never smaller (fewer micro-batches
    than ranks are one group): the bubble stays the same, and up to twice as much is held.
    """
    check_shape("interleaved-1f1b", num_ranks, num_micro_batches, stages_per_rank)
    groups = _groups(num_micro_batches, max(1, num_micro_batches // num_ranks))
    rows: list[tuple[Action, ...]] = []
    for rank in range(num_ranks):
        stages = [rank + num_ranks * index for index in range(stages_per_rank)]
        forwards = [Action(Kind.FORWARD, s, i) for group in groups for s in stages for i in group]
        backwards = [Action(Kind.BACKWARD, s, i) for group in groups for s in reversed(stages) for i in group]
        # The first group's way to the last stage, and a step for each rank after this one, there and back.
        loops = (stages_per_rank - 1) * len(groups[0])
        steps = (num_ranks - 1 - rank) * (2 if stages_per_rank > 1 else 1)
        rows.append(_in_turn(forwards, backwards, loops + steps))
    placement = loop_placement(num_ranks, stages_per_rank)
    return Schedule("interleaved-1f1b", tuple(rows), placement, num_micro_batches)


def forward_only(
    num_ranks: int, num_micro_batches: int, stages_per_rank: int = 1, *, stage_ranks: tuple[int, ...] | None = None
) -> Schedule:
    """Forwards alone, for evaluation: a rank's later stage first, or its earlier one, whichever is over sooner.

    `stage_ranks` says where the stages are, if they are there already for training; by default they are dealt out in
    turn.
    """
    check_shape("forward", num_ranks, num_micro_batches, stages_per_rank)
    placement = loop_placement(num_ranks, stages_per_rank) if stage_ranks is None else stage_ranks
    if sorted(set(placement)) != list(range(num_ranks)):
        raise ScheduleError(f"schedule 'forward' has stages on ranks {sorted(set(placement))}, not on all {num_ranks}")
    problem = Problem.of_equals(placement, num_micro_batches, 0.0, is_forward_only=True)
    solutions = [greedy_schedule(problem, Policy(late_forwards=is_late)) for is_late in (True, False)]
    fastest = min(solutions, key=lambda solution: solution.makespan)
    return Schedule("forward", fastest.actions, placement, num_micro_batches)


def _all_then_all(name: str, num_ranks: int, num_micro_batches: int, stages_per_rank: int) -> Schedule:
    check_shape(name, num_ranks, num_micro_batches, stages_per_rank)
    placement = loop_placement(num_ranks, stages_per_rank)
    rows: list[tuple[Action, ...]] = []
    for rank in range(num_ranks):
        stages = [rank + num_ranks * index for index in range(stages_per_rank)]
        forwards = [Action(Kind.FORWARD, s, i) for s in stages for i in range(num_micro_batches)]
        backwards = [Action(Kind.BACKWARD, s, i) for s in reversed(stages) for i in range(num_micro_batches)]
        rows.append((*forwards, *backwards))
    return Schedule(name, tuple(rows), placement, num_micro_batches)


def _in_turn(forwards: list[Action], backwards: list[Action], num_ahead: int) -> tuple[Action, ...]:
    """So many forwards ahead, then a forward and a backward in turn, then what is left of the backwards."""
    turns = chain.from_iterable(zip_longest(forwards[num_ahead:], backwards))
    return (*forwards[:num_ahead], *(action for action in turns if action is not None))


def _groups(num_micro_batches: int, num_groups: int) -> list[range]:
    """Micro-batches in order, in groups of equal size or one more, the larger ones first."""
    size, num_larger = divmod(num_micro_batches, num_groups)
    starts = [index * size + min(index, num_larger) for index in range(num_groups + 1)]
    return [range(start, end) for start, end in pairwise(starts)]
