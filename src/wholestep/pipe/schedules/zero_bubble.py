"""Zero-bubble schedules: backwards in two parts, of which the second fills the gaps.

The gradients of a stage's inputs (I) are what other stages wait for; those of its weights (W) can be computed at any
time after. With p ranks, v stages per rank, m micro-batches and F = I = W = 1 for each stage, no schedule is faster
than

    3 v m + p - 1

because the last rank gets its first input after p - 1 slots and then has 3 v m slots of work. The greedy run of
`greedy.py` with its default policy gets there for all of the following, for every m >= p, as the property tests check
for up to 8 ranks; what differs is what a rank may hold:

    schedule         placement   cap, in stages                 bubble
    ZB-H1            loop, v=1   p: what 1F1B holds             (p-1)/(3m+p-1), a third of 1F1B's idle time
    ZB-H2            loop, v=1   2p-1: twice that               the same, but no gap on any rank
    interleaved ZB   loop, v     vp+p-1: as interleaved 1F1B    (p-1)/(3vm+p-1)
    ZBV              V, v=2      2p: what 1F1B holds            (p-1)/(6m+p-1)

With ZB-H2 ranks begin and end one slot after each other, so that steps which follow each other without a barrier leave
no bubble at all (from m = 2p-1 on). With fewer micro-batches than ranks the way of a micro-batch there and back is the
bound.
"""

from __future__ import annotations

from wholestep.pipe.schedule import Schedule, loop_placement, v_placement
from wholestep.pipe.schedules.greedy import Policy, Problem, greedy_schedule
from wholestep.pipe.schedules.shape import check_shape


def zb_h1(num_ranks: int, num_micro_batches: int) -> Schedule:
    """One stage per rank, the memory of 1F1B's first rank on every rank, a third of its bubble."""
    return _capped("zb-h1", num_ranks, num_micro_batches, 1, num_ranks)


def zb_h2(num_ranks: int, num_micro_batches: int) -> Schedule:
    """One stage per rank, twice the memory of 1F1B's first rank, no gap between a rank's first and last action."""
    return _capped("zb-h2", num_ranks, num_micro_batches, 1, 2 * num_ranks - 1)


def interleaved_zero_bubble(num_ranks: int, num_micro_batches: int, stages_per_rank: int = 2) -> Schedule:
    """Several stages per rank, dealt out in turn, within the memory of interleaved 1F1B."""
    cap = (stages_per_rank + 1) * num_ranks - 1
    return _capped("interleaved-zb", num_ranks, num_micro_batches, stages_per_rank, cap)


def zbv(num_ranks: int, num_micro_batches: int) -> Schedule:
    """Two stages per rank, down and up again, within the memory of 1F1B; every rank holds equally much."""
    return _capped("zbv", num_ranks, num_micro_batches, 2, 2 * num_ranks, is_v=True)


def _capped(
    name: str, num_ranks: int, num_micro_batches: int, stages_per_rank: int, cap: int, *, is_v: bool = False
) -> Schedule:
    """The greedy schedule for equal stages of which each rank may hold `cap`."""
    check_shape(name, num_ranks, num_micro_batches, stages_per_rank)
    stage_ranks = v_placement(num_ranks) if is_v else loop_placement(num_ranks, stages_per_rank)
    problem = Problem.of_equals(stage_ranks, num_micro_batches, cap)
    return Schedule(name, greedy_schedule(problem, Policy()).actions, stage_ranks, num_micro_batches)
