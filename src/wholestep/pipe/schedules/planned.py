"""A schedule for measured costs: unequal stages, transfers that take time, and a limit on what each rank may hold.

    minimise   makespan(order)                     as `simulate` computes it
    subject to held(order, r) <= cap(r)            activations of rank r, at any time

over the orders of F, I and W on each rank. That is job-shop scheduling with memory, NP-hard, but with a bound that is
mostly within reach: `fill_bound`, the first input's way to a rank plus all of the rank's work. So (`planned`):

    1. refuse a cap below the sizes of a rank's own stages, which no schedule can do with (see `greedy.py`)
    2. build a schedule by each of several greedy policies, until one meets the bound; if none comes near it and memory
       is short, try the order for equal costs and blocks that repeat themselves (`repeated.py`) as well
    3. where whole backwards cost less than their parts, try a schedule that is made of them
    4. turn neighbours I and W of one micro-batch into one B where that does not take longer

With two stages per rank and no placement given, both placements are tried.

Reached with 8 ranks, 16 micro-batches and no cap: the bound itself for equal stages (F=1, I=1.3, W=0.7, two per rank: a
bubble of 0.068). For random unequal stages mostly within 3 % of the bound's bubble; up to a tenth more for some where
stages are dealt out in turn, and up to a third if transfers take half a forward besides. A cap of 1.5 times what 1F1B
holds is enough for that; with as much as 1F1B the bubble is 0.097, with two thirds of that 0.25.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from wholestep.errors import ScheduleError
from wholestep.pipe.schedule import Action, Kind, Schedule, loop_placement, v_placement
from wholestep.pipe.schedules.classic import interleaved_1f1b
from wholestep.pipe.schedules.dualpipe import dualpipe_v
from wholestep.pipe.schedules.greedy import Policy, Problem, greedy_schedule
from wholestep.pipe.schedules.repeated import Block, lay_block, repeat_block
from wholestep.pipe.schedules.shape import check_shape
from wholestep.pipe.simulate import StageCosts, Timeline, fill_bound, simulate
from wholestep.pipe.validate import Edge

# The best first: the search ends where the bound is met, or where a large problem has had its share of work. Chosen by
# how much each adds to those before it over random problems; all 144 combinations found next to nothing better.
_POLICIES = (
    Policy(late_inputs=True, patience=0.5),
    Policy(late_inputs=True, reserve=1),
    Policy(patience=1.0, reserve=2),
    Policy(patience=0.5),
    Policy(late_inputs=True, weights_make_room=False, patience=0.5),
    Policy("forward", late_inputs=True, weights_make_room=False, patience=0.5, reserve=1),
    Policy(late_inputs=True, patience=0.5, reserve=2),
    Policy("input", late_inputs=True, patience=0.5),
    Policy("input", late_forwards=False, late_inputs=True),
    Policy("forward"),
    Policy("forward", patience=1.0),
    Policy("input"),
    Policy(),
)
_MAX_WORK = 300_000
_MIN_TRIES = 2
_AT_BOUND = 1 + 1e-9
_NEAR_BOUND = 1.02
# Periods of repeating blocks over the work of the busiest rank: gaps that are too short for any action cost a little.
_PERIODS = (1.0, 1.02, 1.05, 1.1, 1.15, 1.2, 1.4, 2.0)
_STEPS = (1.0, 1.0, 1.2, 1.5, 2.0, 2.5)
_MAX_BLOCKS = 100


def planned(
    num_ranks: int,
    num_micro_batches: int,
    stages_per_rank: int = 1,
    *,
    costs: Sequence[StageCosts] | None = None,
    stage_ranks: tuple[int, ...] | None = None,
    transfers: Mapping[Edge, float] | None = None,
    memory_cap: float | Sequence[float] | None = None,
    activations: Sequence[float] | None = None,
    input_share: float = 0.0,
) -> Schedule:
    """The fastest schedule found for these costs of each stage (all one by default) within the memory cap.

    `memory_cap`, for every rank or for each, is in the unit of `activations`: what each stage holds for a micro-batch,
    in bytes or in anything else, 1 by default; I frees `input_share` of it. `transfers` as in `simulate`. `stage_ranks`
    says where the stages are if that is settled. Raises `ScheduleError`, with the smallest cap that works, if the cap
    cannot be kept.
    """
    check_shape("planned", num_ranks, num_micro_batches, stages_per_rank)
    placements = [loop_placement(num_ranks, stages_per_rank)] if stage_ranks is None else [stage_ranks]
    if stage_ranks is None and stages_per_rank == 2 and num_ranks > 1:
        placements.append(v_placement(num_ranks))
    best: tuple[float, Schedule, Problem] | None = None
    for placement in placements:
        problem = _problem(
            placement, num_ranks, num_micro_batches, costs, transfers, memory_cap, activations, input_share
        )
        makespan, schedule = _fastest(problem)
        if best is None or makespan < best[0]:
            best = makespan, schedule, problem
    assert best is not None, "there is a placement"
    return _with_whole_backwards(best[2], best[1])


def _problem(
    stage_ranks: tuple[int, ...],
    num_ranks: int,
    num_micro_batches: int,
    costs: Sequence[StageCosts] | None,
    transfers: Mapping[Edge, float] | None,
    memory_cap: float | Sequence[float] | None,
    activations: Sequence[float] | None,
    input_share: float,
) -> Problem:
    """The arguments of `planned` with their defaults filled in, checked."""
    num_stages = len(stage_ranks)
    if sorted(set(stage_ranks)) != list(range(num_ranks)):
        raise ScheduleError(
            f"schedule 'planned' has stages on ranks {sorted(set(stage_ranks))}, not on all {num_ranks}"
        )
    sizes = [1.0] * num_stages if activations is None else list(activations)
    stage_costs = [StageCosts()] * num_stages if costs is None else list(costs)
    caps = [float("inf")] if memory_cap is None else [memory_cap] if isinstance(memory_cap, int | float) else memory_cap
    caps = list(caps) * num_ranks if len(caps) == 1 else list(caps)
    expected = (
        ("activations", sizes, num_stages),
        ("costs", stage_costs, num_stages),
        ("memory caps", caps, num_ranks),
    )
    for what, given, num in expected:
        if len(given) != num:
            raise ScheduleError(
                f"schedule 'planned' has {num_stages} stages on {num_ranks} ranks and {len(given)} {what}"
            )
    if not (0 <= input_share <= 1 and all(0 <= size < float("inf") for size in sizes)):
        raise ScheduleError("activations are finite sizes, 0 or more, of which a share from 0 to 1 is free after I")
    _check_caps(stage_ranks, caps, sizes)
    return Problem(stage_ranks, num_micro_batches, stage_costs, caps, sizes, transfers, input_share)


def _check_caps(stage_ranks: tuple[int, ...], caps: Sequence[float], sizes: Sequence[float]) -> None:
    needs = [sum(size for size, owner in zip(sizes, stage_ranks) if owner == rank) for rank in range(len(caps))]
    for rank, (cap, need) in enumerate(zip(caps, needs)):
        if not cap >= need:
            smallest = f"{max(needs):g}" if len(set(caps)) == 1 else f"{need:g} for this rank"
            raise ScheduleError(
                f"schedule 'planned' cannot keep rank {rank} within {cap:g}: one micro-batch of its stages alone holds "
                f"{need:g}; the smallest memory cap that works is {smallest}"
            )


def _fastest(problem: Problem) -> tuple[float, Schedule]:
    """The best of all ways to build one, with its makespan."""
    bound = fill_bound(problem.stage_ranks, problem.num_micro_batches, problem.costs, problem.transfers)
    num_actions = 3 * len(problem.stage_ranks) * problem.num_micro_batches
    num_tries = max(_MIN_TRIES, _MAX_WORK // num_actions)
    best = Schedule("planned", (), problem.stage_ranks, problem.num_micro_batches)
    best_time = float("inf")
    for policy in _POLICIES[:num_tries]:
        solution = greedy_schedule(problem, policy)
        if solution.makespan < best_time:
            best_time, best = solution.makespan, replace(best, actions=solution.actions)
        if best_time <= bound * _AT_BOUND:
            return best_time, best
    others = _frugal(problem, num_tries) if best_time > bound * _NEAR_BOUND else ()
    for schedule in chain(_whole(problem), others):
        timeline = _simulate(problem, schedule)
        is_within = all(peak <= cap * _AT_BOUND for peak, cap in zip(timeline.peaks, problem.caps))
        if is_within and timeline.makespan < best_time:
            best_time, best = timeline.makespan, schedule
    return best_time, best


def _whole(problem: Problem) -> Iterator[Schedule]:
    """Schedules with whole backwards, where those take less time than their parts."""
    if not any(cost.of(Kind.BACKWARD) < cost.input + cost.weight for cost in problem.costs):
        return
    num_ranks, num_micro_batches = len(problem.caps), problem.num_micro_batches
    stages_per_rank = len(problem.stage_ranks) // num_ranks
    if problem.stage_ranks == loop_placement(num_ranks, stages_per_rank):
        yield replace(interleaved_1f1b(num_ranks, num_micro_batches, stages_per_rank), name="planned")
    elif problem.stage_ranks == v_placement(num_ranks):
        yield replace(dualpipe_v(num_ranks, num_micro_batches), name="planned")


def _frugal(problem: Problem, num_tries: int) -> Iterator[Schedule]:
    """Schedules for little memory: as if costs were equal, and repeating blocks, at first those that hold least.

    The steps of further blocks are drawn by lot. Some of them hold more than they may.
    """
    placement, num_ranks = problem.stage_ranks, len(problem.caps)
    if not any(cap < float("inf") for cap in problem.caps):
        return
    equal = [StageCosts()] * len(placement)
    actions = greedy_schedule(replace(problem, costs=equal, transfers=None), Policy()).actions
    yield Schedule("planned", actions, placement, problem.num_micro_batches)
    num_steps = 2 * -(-len(placement) // num_ranks)
    draw = random.Random(0)
    drawn = (tuple(draw.choice(_STEPS) for _ in range(num_steps)) for _ in range(min(num_tries, _MAX_BLOCKS)))
    shortest = (1.0,) * num_steps
    # Costs of one slot each make blocks without gaps, which may be worth more than the right lengths.
    first = [(equal, shortest), (problem.costs, shortest)]
    for costs, steps in chain(first, ((problem.costs, each) for each in drawn)):
        block = _shortest_block(problem, costs, steps)
        if block is not None:
            yield repeat_block("planned", block, placement, problem.num_micro_batches)


def _shortest_block(problem: Problem, costs: Sequence[StageCosts], steps: Sequence[float]) -> Block | None:
    """The block of these steps with the shortest period that leaves room for all actions."""
    work = [0.0] * len(problem.caps)
    for cost, rank in zip(costs, problem.stage_ranks):
        work[rank] += cost.forward + cost.input + cost.weight
    periods = [max(work) * factor for factor in _PERIODS if max(work) > 0]
    blocks = (lay_block(problem.stage_ranks, costs, problem.transfers, period, steps) for period in periods)
    return next((block for block in blocks if block is not None), None)


def _with_whole_backwards(problem: Problem, schedule: Schedule) -> Schedule:
    """The schedule with neighbours I and W made one B: all of them, those of stage 0 (nobody waits for it), or none."""
    variants = [schedule, _fused(schedule, last_stage=0), _fused(schedule, last_stage=schedule.num_stages - 1)]
    times = [_simulate(problem, variant).makespan for variant in variants]
    return next(v for time, v in reversed([*zip(times, variants)]) if time <= min(times) * _AT_BOUND)


def _fused(schedule: Schedule, *, last_stage: int) -> Schedule:
    """Each I that its own W follows at once becomes B, of the stages up to this one."""
    rows: list[tuple[Action, ...]] = []
    for row in schedule.actions:
        fused: list[Action] = []
        for action in row:
            half = Action(Kind.INPUT, action.stage, action.micro_batch)
            if action.kind is Kind.WEIGHT and action.stage <= last_stage and fused and fused[-1] == half:
                fused[-1] = replace(action, kind=Kind.BACKWARD)
            else:
                fused.append(action)
        rows.append(tuple(fused))
    return replace(schedule, actions=tuple(rows))


def _simulate(problem: Problem, schedule: Schedule) -> Timeline:
    return simulate(
        schedule,
        problem.costs,
        transfers=problem.transfers,
        activations=problem.activations,
        input_share=problem.input_share,
    )
