"""A pipelined step as tasks: actions on computing lanes, values on connections, gradients on one channel per column.

    start(a)   after the action before it on its rank and the arrival of all that it reads
    message    leaves when the action that makes it is done and its receive is posted
    gradients  after the rank's last action, or after the last backward of their stage; the update comes after them

A rank ends a step when everything that it sent has arrived; the next step begins there, without a barrier.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from wholestep.pipe.schedule import Action, Kind
from wholestep.pipe.validate import Edge, checked_order
from wholestep.sim.jobs import Crossing, PipelineJob
from wholestep.sim.world import World

Flow = tuple[bool, int, int]
"""What an action hands on: whether it is a forward, its stage, its micro-batch."""


def add_iterations(world: World, job: PipelineJob, num_iterations: int) -> list[list[list[int]]]:
    """Add so many steps; for each iteration, kind and place the task that ends it."""
    order = checked_order(job.schedule, job.edges)
    steps = [_Step(world, job, kind) for kind in range(len(world.kinds))]
    ends: list[list[list[int]]] = []
    for _ in range(num_iterations):
        for step in steps:
            step.add(order)
        if not job.schedule.is_forward_only:
            _add_reductions(world, job, steps)
        ends.append([[world.last(kind, place) for place in range(job.num_ranks)] for kind in range(len(steps))])
    return ends


class _Step:
    """One replica's steps while they are added."""

    def __init__(self, world: World, job: PipelineJob, kind: int) -> None:
        self.world = world
        self.job = job
        self.kind = kind
        # The stages that each stage sends to, and those it gets something from, in a forward; with what travels.
        self.targets, self.sources = _neighbours(job.edges, len(job.stages))
        self.stage_ends: dict[int, int] = {}
        self.done: dict[Flow, int] = {}
        self.rows: list[list[int]] = []
        self.sent: list[list[int]] = []

    def add(self, order: Iterable[tuple[int, Action]]) -> None:
        """Add all actions and messages of one step."""
        num_ranks = self.job.num_ranks
        self.done = {}
        self.rows = [[] for _ in range(num_ranks)]
        self.sent = [[] for _ in range(num_ranks)]
        for place, action in order:
            self._add_action(place, action)
        for place in range(num_ranks):
            self.world.compute(self.kind, place, "end of step", 0.0, self.sent[place])

    def _add_action(self, place: int, action: Action) -> None:
        kind, stage = action.kind, action.stage
        arrived, receive_us = self._add_arrivals(place, action)
        work_us = self.job.stages[stage].costs.of(kind) + receive_us + self._send_us(place, action)
        task = self.world.compute(self.kind, place, str(action), work_us, arrived)
        self.rows[place].append(task)
        if kind is not Kind.WEIGHT:
            self.done[kind is Kind.FORWARD, stage, action.micro_batch] = task
        if kind in (Kind.BACKWARD, Kind.WEIGHT):
            self.stage_ends[stage] = task

    def _add_arrivals(self, place: int, action: Action) -> tuple[list[int], float]:
        """Tasks by which all that an action reads is there, and what receiving it takes of the rank.

        Messages are added here and not with their sender: only now it is known when their receive is posted.
        """
        if action.kind is Kind.WEIGHT:
            return [], 0.0
        is_forward = action.kind is Kind.FORWARD
        arrived: list[int] = []
        receive_us = 0.0
        for other, crossing in (self.sources if is_forward else self.targets)[action.stage]:
            source = self.job.schedule.stage_ranks[other]
            flow = is_forward, other, action.micro_batch
            if source == place:
                arrived.append(self.done[flow])
                continue
            num_bytes = crossing.forward_bytes if is_forward else crossing.backward_bytes
            arrived.append(self._add_message(source, place, flow, action.stage, num_bytes))
            receive_us += self.world.wire(self.kind, source, place).issue_us
        return arrived, receive_us

    def _add_message(self, source: int, place: int, flow: Flow, stage: int, num_bytes: int) -> int:
        after = [self.done[flow]]
        look_ahead = self.job.look_ahead
        row = self.rows[place]
        if look_ahead is not None and len(row) > look_ahead:
            after.append(row[len(row) - look_ahead - 1])
        name = f"{flow[1]}{'F' if flow[0] else 'B'}{flow[2]} to {stage}"
        message = self.world.send(self.kind, source, place, name, num_bytes, after)
        self.sent[source].append(message)
        return message

    def _send_us(self, place: int, action: Action) -> float:
        """What sending the results of an action takes of the rank itself."""
        if action.kind is Kind.WEIGHT:
            return 0.0
        readers = (self.targets if action.kind is Kind.FORWARD else self.sources)[action.stage]
        owners = [self.job.schedule.stage_ranks[other] for other, _ in readers]
        return sum(self.world.wire(self.kind, place, owner).issue_us for owner in owners if owner != place)


def _neighbours(
    edges: Mapping[Edge, Crossing], num_stages: int
) -> tuple[list[list[tuple[int, Crossing]]], list[list[tuple[int, Crossing]]]]:
    targets: list[list[tuple[int, Crossing]]] = [[] for _ in range(num_stages)]
    sources: list[list[tuple[int, Crossing]]] = [[] for _ in range(num_stages)]
    for (source, target), crossing in edges.items():
        targets[source].append((target, crossing))
        sources[target].append((source, crossing))
    return targets, sources


def _add_reductions(world: World, job: PipelineJob, steps: Sequence[_Step]) -> None:
    """Average gradients over each column, and update."""
    for place in range(job.num_ranks):
        stages = job.schedule.stages_of(place)
        reductions: list[int] = []
        if world.num_replicas > 1:
            # Every rank of a column issues in the same order: by when stages are done, which the schedule decides.
            for stage in sorted(stages, key=lambda stage: steps[0].stage_ends[stage]):
                for number, num_bytes in enumerate(job.stages[stage].gradient_bytes):
                    ready = [step.stage_ends[stage] if job.overlaps else world.last(step.kind, place) for step in steps]
                    name = f"gradients of stage {stage}, {number}"
                    reductions.append(world.all_reduce(place, name, num_bytes, [*ready, *reductions[-1:]]))
        update_us = sum(job.stages[stage].update_us for stage in stages)
        issue_us = len(reductions) * world.issue_us(place)
        for step in steps:
            world.compute(step.kind, place, "update", update_us + issue_us, reductions)
