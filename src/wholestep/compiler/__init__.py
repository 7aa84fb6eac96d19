"""The compiler: from a captured step, options and hardware to a plan, and from a plan to the graphs that run."""

from wholestep.compiler.compile import begin, build, plan, plan_memory, settle, with_peak
from wholestep.compiler.draft import Draft
from wholestep.compiler.hardware import Hardware
from wholestep.compiler.imagined import imagined_communication
from wholestep.compiler.loop import LoopGraphs
from wholestep.compiler.options import DataParallel, StepOptions, names_or_choice, pipeline_of, plan_of
from wholestep.compiler.plan import Choice, Plan
from wholestep.compiler.stages import REWRITING_STAGES, STAGES, Stage, communication_passes, table

__all__ = [
    "REWRITING_STAGES",
    "STAGES",
    "Choice",
    "DataParallel",
    "Draft",
    "Hardware",
    "LoopGraphs",
    "Plan",
    "Stage",
    "StepOptions",
    "begin",
    "build",
    "communication_passes",
    "imagined_communication",
    "names_or_choice",
    "pipeline_of",
    "plan",
    "plan_memory",
    "plan_of",
    "settle",
    "table",
    "with_peak",
]
