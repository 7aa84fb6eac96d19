"""Pipeline parallelism: schedules as data, the proof that they run, and what they will take."""

from wholestep.pipe.schedule import Action, Kind, Schedule
from wholestep.pipe.schedules import FAMILIES, build_schedule
from wholestep.pipe.simulate import Span, StageCosts, Timeline, simulate
from wholestep.pipe.validate import validate

__all__ = [
    "FAMILIES",
    "Action",
    "Kind",
    "Schedule",
    "Span",
    "StageCosts",
    "Timeline",
    "build_schedule",
    "simulate",
    "validate",
]
