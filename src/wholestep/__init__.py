"""Wholestep compiles a whole PyTorch training step: forward, loss, backward and optimizer as one graph."""

from wholestep._version import __version__
from wholestep.api import BanRules, DataParallel, compile, inductor, lower, partition, pipeline
from wholestep.errors import (
    BudgetError,
    CaptureError,
    GraphError,
    GuardError,
    PassError,
    PipelineError,
    RankError,
    ScheduleError,
    SettingsError,
    SplitError,
    StageFileError,
    VerificationError,
    WholestepError,
)
from wholestep.pipe import Schedule, SplitPoint, pipe_split

__all__ = [
    "BanRules",
    "BudgetError",
    "CaptureError",
    "DataParallel",
    "GraphError",
    "GuardError",
    "PassError",
    "PipelineError",
    "RankError",
    "Schedule",
    "ScheduleError",
    "SettingsError",
    "SplitError",
    "SplitPoint",
    "StageFileError",
    "VerificationError",
    "WholestepError",
    "__version__",
    "compile",
    "inductor",
    "lower",
    "partition",
    "pipe_split",
    "pipeline",
]
