"""A cut model as a job: messages, gradients and memory are those of the runtime, times are given."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from wholestep.pipe.cut import CutGraph
from wholestep.pipe.schedule import Schedule
from wholestep.pipe.simulate import StageCosts
from wholestep.pipe.validate import Edge
from wholestep.runtime.pipeline.messages import LOOK_AHEAD, num_bytes
from wholestep.sim.jobs import Crossing, PipelineJob, StageLoad
from wholestep.sim.stage_memory import pipeline_peaks


def cut_job(
    name: str,
    cut: CutGraph,
    schedule: Schedule,
    costs: Sequence[StageCosts],
    *,
    update_us: Sequence[float] | None = None,
    held_bytes: Sequence[int] | None = None,
) -> PipelineJob:
    """The job of a cut graph of one micro-batch; `held_bytes` is what ranks hold all the time, parameters first of all.

    Shares of gradients that several stages have of one parameter are not sent in the simulation.
    """
    updates = [0.0] * len(cut.stages) if update_us is None else list(update_us)
    stages = [
        StageLoad(cost, (sum(num_bytes(stage.fakes[value]) for value in set(stage.gradients.values())),), update)
        for stage, cost, update in zip(cut.stages, costs, updates, strict=True)
    ]
    peaks = pipeline_peaks(cut, schedule, held_bytes)
    return PipelineJob(name, schedule, tuple(stages), crossings_of(cut), True, LOOK_AHEAD, peaks)


def crossings_of(cut: CutGraph) -> dict[Edge, Crossing]:
    """What travels between which stages for one micro-batch; between neighbours at least nothing."""
    forward: dict[Edge, int] = defaultdict(int)
    backward: dict[Edge, int] = defaultdict(int)
    for value, readers in cut.readers.items():
        source = cut.source[value]
        size = num_bytes(cut.stages[source].fakes[value])
        for reader in readers:
            if reader > source:
                forward[source, reader] += size
            else:
                backward[reader, source] += size
    chain = {(stage, stage + 1) for stage in range(len(cut.stages) - 1)}
    edges = sorted(chain | forward.keys() | backward.keys())
    return {edge: Crossing(forward.get(edge, 0), backward.get(edge, 0)) for edge in edges}
