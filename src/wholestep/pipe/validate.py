"""Proof that a schedule can run: everything once, in the right place, in an order that never waits forever.

A rank runs its actions one after the other; before each it blocks until the values that the action reads have arrived.
Sends do not block. Let `a < b` when a rank runs `a` before `b`, or when `b` reads what `a` makes:

    F of stage t        reads  F of each stage s with an edge s -> t
    I or B of stage s   reads  own F, and I or B of each stage t with an edge s -> t
    W of stage s        reads  own I

The schedule runs to its end if and only if `<` has no cycle: without one some first action can always start, with one
its members wait for each other. Which message arrives first plays no part: each receive waits for one certain value,
and a value that comes early lies and waits. So one order in which all actions can run, found by `checked_order`, proves
it for all of them; if there is none, following who waits for whom leads into a cycle, which the error names.

Edges default to the chain 0 -> 1 -> 2 ...; a schedule that is right for the chain is right for any edges, because every
edge goes from an earlier stage to a later one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from wholestep.errors import ScheduleError
from wholestep.pipe.schedule import Action, Kind, Schedule

Edge = tuple[int, int]
# A finished piece of work that others wait for: whether it is a forward, the stage, the micro-batch.
_Need = tuple[bool, int, int]


def validate(schedule: Schedule, edges: Iterable[Edge] | None = None) -> None:
    """Raise `ScheduleError`, naming rank and action, unless the schedule does all work once and never waits forever.

    `edges` are the pairs of stages between which values travel, the earlier one first; None is the chain.
    """
    checked_order(schedule, edges)


def checked_order(schedule: Schedule, edges: Iterable[Edge] | None = None) -> list[tuple[int, Action]]:
    """All actions with their ranks in an order in which they can run; raises what `validate` raises."""
    neighbours = Neighbours.of(schedule.num_stages, edges)
    _check_shape(schedule)
    _check_actions(schedule)
    return _Progress(schedule, neighbours).run()


class Neighbours:
    """Which stages a stage reads from, and which read from it."""

    def __init__(self, sources: list[list[int]], targets: list[list[int]]) -> None:
        self.sources = sources
        self.targets = targets

    @staticmethod
    def of(num_stages: int, edges: Iterable[Edge] | None) -> Neighbours:
        """Of these edges, each from an earlier to a later stage; None is the chain."""
        sources: list[list[int]] = [[] for _ in range(num_stages)]
        targets: list[list[int]] = [[] for _ in range(num_stages)]
        chain = ((stage, stage + 1) for stage in range(num_stages - 1))
        for source, target in dict.fromkeys(chain if edges is None else edges):
            if not 0 <= source < target < num_stages:
                raise ScheduleError(
                    f"edge {source} -> {target} does not go from an earlier to a later one of {num_stages} stages"
                )
            sources[target].append(source)
            targets[source].append(target)
        return Neighbours(sources, targets)


def _check_shape(schedule: Schedule) -> None:
    if schedule.num_micro_batches < 1:
        raise ScheduleError(f"{_name(schedule)} has {schedule.num_micro_batches} micro-batches; it takes at least one")
    for stage, rank in enumerate(schedule.stage_ranks):
        if not 0 <= rank < schedule.num_ranks:
            raise ScheduleError(f"{_name(schedule)} puts stage {stage} on rank {rank}, of {schedule.num_ranks} ranks")
    idle = set(range(schedule.num_ranks)).difference(schedule.stage_ranks)
    if idle or not schedule.num_ranks:
        raise ScheduleError(f"{_name(schedule)} gives rank {min(idle, default=0)} no stage; each rank has at least one")


def _check_actions(schedule: Schedule) -> None:
    """Every action once, on the rank of its stage, and after what the same rank must have done for it."""
    done: dict[Kind, set[tuple[int, int]]] = {kind: set() for kind in Kind}
    for rank, row in enumerate(schedule.actions):
        for action in row:
            _check_place(schedule, rank, action)
            piece = action.stage, action.micro_batch
            if piece in done[action.kind]:
                raise ScheduleError(f"{_name(schedule)} runs {action} twice on rank {rank}")
            _check_own_order(schedule, rank, action, done)
            done[action.kind].add(piece)
    _check_complete(schedule, done[Kind.FORWARD], Kind.FORWARD)
    if len(done[Kind.FORWARD]) == sum(map(len, schedule.actions)):
        return
    _check_complete(schedule, done[Kind.BACKWARD] | done[Kind.INPUT], Kind.BACKWARD)
    unfinished = done[Kind.INPUT] - done[Kind.WEIGHT]
    if unfinished:
        stage, micro_batch = min(unfinished)
        missing = Action(Kind.WEIGHT, stage, micro_batch)
        rank = schedule.stage_ranks[stage]
        raise ScheduleError(
            f"{_name(schedule)} never runs {missing} on rank {rank}, the other half of {stage}I{micro_batch}"
        )


def _check_place(schedule: Schedule, rank: int, action: Action) -> None:
    if not 0 <= action.stage < schedule.num_stages:
        raise ScheduleError(f"{_name(schedule)}, rank {rank}: {action} is of none of the {schedule.num_stages} stages")
    if not 0 <= action.micro_batch < schedule.num_micro_batches:
        raise ScheduleError(
            f"{_name(schedule)}, rank {rank}: {action} is of none of the {schedule.num_micro_batches} micro-batches"
        )
    owner = schedule.stage_ranks[action.stage]
    if owner != rank:
        raise ScheduleError(
            f"{_name(schedule)} runs {action} on rank {rank}, but stage {action.stage} is on rank {owner}"
        )


def _check_own_order(schedule: Schedule, rank: int, action: Action, done: dict[Kind, set[tuple[int, int]]]) -> None:
    if action.kind is Kind.FORWARD:
        return
    piece = action.stage, action.micro_batch
    needed = Kind.INPUT if action.kind is Kind.WEIGHT else Kind.FORWARD
    if piece not in done[needed]:
        raise ScheduleError(f"{_name(schedule)}, rank {rank}: {action} has no {Action(needed, *piece)} before it")
    other = Kind.INPUT if action.kind is Kind.BACKWARD else Kind.BACKWARD
    if piece in done[other]:
        raise ScheduleError(
            f"{_name(schedule)}, rank {rank}: {action} repeats {Action(other, *piece)}; a backward is B, or I and W"
        )


def _check_complete(schedule: Schedule, done: Collection[tuple[int, int]], kind: Kind) -> None:
    """Compare numbers first: a file may name a huge micro-batch and hold almost nothing."""
    if len(done) == schedule.num_stages * schedule.num_micro_batches:
        return
    by_stage = [set[int]() for _ in range(schedule.num_stages)]
    for stage, micro_batch in done:
        by_stage[stage].add(micro_batch)
    stage = next(stage for stage, found in enumerate(by_stage) if len(found) < schedule.num_micro_batches)
    micro_batch = next(index for index in range(schedule.num_micro_batches) if index not in by_stage[stage])
    missing = Action(kind, stage, micro_batch)
    rank = schedule.stage_ranks[stage]
    raise ScheduleError(
        f"{_name(schedule)} never runs {missing} on rank {rank}; it has {schedule.num_stages} stages and "
        f"{schedule.num_micro_batches} micro-batches"
    )


class _Progress:
    """All ranks at once, each as far as it can get without what others have not done yet."""

    def __init__(self, schedule: Schedule, neighbours: Neighbours) -> None:
        self._schedule = schedule
        self._neighbours = neighbours
        self._done: set[_Need] = set()
        self._positions = [0] * schedule.num_ranks
        self._waiting: dict[_Need, list[int]] = {}

    def run(self) -> list[tuple[int, Action]]:
        """Every action in a possible order; raises if some wait for each other."""
        order: list[tuple[int, Action]] = []
        runnable = list(reversed(range(self._schedule.num_ranks)))
        while runnable:
            self._advance(runnable.pop(), order, runnable)
        if len(order) < sum(map(len, self._schedule.actions)):
            raise ScheduleError(self._deadlock())
        return order

    def _advance(self, rank: int, order: list[tuple[int, Action]], runnable: list[int]) -> None:
        """Run a rank until it waits, and wake those who waited for what it did."""
        row = self._schedule.actions[rank]
        for position in range(self._positions[rank], len(row)):
            action = row[position]
            need = self._missing(action)
            if need is not None:
                self._positions[rank] = position
                self._waiting.setdefault(need, []).append(rank)
                return
            order.append((rank, action))
            if action.kind is not Kind.WEIGHT:
                made = action.kind is Kind.FORWARD, action.stage, action.micro_batch
                self._done.add(made)
                runnable.extend(self._waiting.pop(made, ()))
        self._positions[rank] = len(row)

    def _missing(self, action: Action) -> _Need | None:
        """The first thing that an action waits for. What its own rank does for it comes before it, as was checked."""
        if action.kind is Kind.WEIGHT:
            return None
        is_forward = action.kind is Kind.FORWARD
        stages = self._neighbours.sources if is_forward else self._neighbours.targets
        for stage in stages[action.stage]:
            need = is_forward, stage, action.micro_batch
            if need not in self._done:
                return need
        return None

    def _deadlock(self) -> str:
        """The ranks that wait for each other, in a circle."""
        stuck: dict[int, _Need] = {rank: need for need, ranks in self._waiting.items() for rank in ranks}
        rank, way = min(stuck), list[int]()
        while rank not in way:
            way.append(rank)
            rank = self._schedule.stage_ranks[stuck[rank][1]]
        circle = way[way.index(rank) :]
        steps = [self._wait(rank, stuck[rank]) for rank in circle[:4]]
        more = f", and so on over {len(circle)} ranks" if len(circle) > len(steps) else ""
        return f"{_name(self._schedule)} deadlocks: {'; '.join(steps)}{more}"

    def _wait(self, rank: int, need: _Need) -> str:
        is_forward, stage, micro_batch = need
        waiting = self._schedule.actions[rank][self._positions[rank]]
        missing = Action(Kind.FORWARD if is_forward else Kind.BACKWARD, stage, micro_batch)
        if not is_forward:
            split = Action(Kind.INPUT, stage, micro_batch)
            missing = split if split in self._schedule.actions[self._schedule.stage_ranks[stage]] else missing
        owner = self._schedule.stage_ranks[stage]
        return f"rank {rank} waits forever in {waiting} for {missing}, which rank {owner} has later"


def _name(schedule: Schedule) -> str:
    return f"schedule '{schedule.name}'"
