"""Pipeline parallelism: where a model is cut, schedules as data, the proof that they run, what they will take."""

from wholestep.capture.trail import pipe_split
from wholestep.pipe.borders import Layer, SplitPoint
from wholestep.pipe.schedule import Action, Kind, Schedule
from wholestep.pipe.schedules import FAMILIES, build_schedule
from wholestep.pipe.simulate import Span, StageCosts, Timeline, simulate
from wholestep.pipe.split import PlannedStage, SplitPlan, plan_split
from wholestep.pipe.validate import validate

__all__ = [
    "FAMILIES",
    "Action",
    "Kind",
    "Layer",
    "PlannedStage",
    "Schedule",
    "Span",
    "SplitPlan",
    "SplitPoint",
    "StageCosts",
    "Timeline",
    "build_schedule",
    "pipe_split",
    "plan_split",
    "simulate",
    "validate",
]
