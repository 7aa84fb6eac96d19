"""A plan in the making: the graph as far as it has been rewritten, and what has been decided so far."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from wholestep.comm.plan import DataParallelPlan
from wholestep.compiler.hardware import Hardware
from wholestep.compiler.made_for import MadeFor
from wholestep.compiler.options import StepOptions
from wholestep.compiler.plan import Choice, named
from wholestep.graph import StepGraph
from wholestep.passes import Pass, Pipeline, run_passes
from wholestep.remat import RematPlan, Survey

logger = logging.getLogger(__name__)


@dataclass
class Draft:
    """What stages decide from, and where they leave what they have decided.

    `graph` is rewritten as decisions fall, so that each stage sees what those before it have made. `looks` says that
    the step looks at values it computes, and may take another course for them.
    """

    graph: StepGraph
    options: StepOptions
    hardware: Hardware
    made_for: MadeFor
    name: str = "the step"
    looks: bool = False
    num_checkpoint_regions: int = 0
    dump_dir: Path | None = None
    is_lowered: bool = False
    rewrites: list[Choice] = field(default_factory=list[Choice])
    loop: list[Choice] = field(default_factory=list[Choice])
    communication: DataParallelPlan | None = None
    group: str = ""
    memory: RematPlan | None = None
    survey: Survey | None = None

    @property
    def is_on_cuda(self) -> bool:
        values = [node.meta["val"] for node in self.graph.placeholders().values()]
        return any(isinstance(value, torch.Tensor) and value.device.type == "cuda" for value in values)

    @property
    def is_planned(self) -> bool:
        """Whether there is something to decide about memory."""
        return self.options.memory_budget is not None or self.num_checkpoint_regions > 0

    def copy(self) -> Draft:
        """The same draft for somebody else to go on with."""
        return replace(self, graph=self.graph.copy(), rewrites=[*self.rewrites], loop=[*self.loop])

    def rewrite(self, stage: str, passes: Iterable[Pass], reason: str) -> None:
        """Rewrite the step, as a stage has decided."""
        choice = Choice(stage, Pipeline(tuple(passes)), reason)
        if choice.passes.passes:
            self.graph = run_passes(self.graph, named(self.group, choice.passes), dump_dir=self.dump_dir)
        self.rewrites.append(choice)

    def finish(self, stage: str, passes: Iterable[Pass], reason: str) -> None:
        """Note passes for each graph of the loop."""
        self.loop.append(Choice(stage, Pipeline(tuple(passes)), reason))

    def run_in_place(self, graph: StepGraph) -> StepGraph:
        """A graph as it runs on one rank, for whoever wants to know what it needs; the graph is rewritten."""
        return run_passes(graph, in_place_passes(self.options.pipeline))


def rewriting_passes(pipeline: Pipeline) -> Pipeline:
    """Those passes of a pipeline that rewrite the step as a function."""
    return Pipeline(pipeline.passes[: _border(pipeline)])


def in_place_passes(pipeline: Pipeline) -> Pipeline:
    """Those that make it run in place: from `reinplace` on."""
    return Pipeline(pipeline.passes[_border(pipeline) :])


def _border(pipeline: Pipeline) -> int:
    names = [item.name for item in pipeline]
    return names.index("reinplace") if "reinplace" in names else len(names)
