"""Wholestep compiles a whole PyTorch training step: forward, loss, backward and optimizer as one graph."""

from wholestep._version import __version__
from wholestep.api import BanRules, DataParallel, compile, inductor, lower, partition, pipeline
from wholestep.compiler import Plan
from wholestep.errors import (
    BudgetError,
    CaptureError,
    CheckpointError,
    GraphError,
    GuardError,
    PassError,
    PipelineError,
    PlanError,
    PlanFileError,
    RankError,
    ScheduleError,
    ScriptError,
    SettingsError,
    SimulationError,
    SplitError,
    StageFileError,
    UsageError,
    VerificationError,
    WholestepError,
)
from wholestep.pipe import Schedule, SplitPoint, pipe_split
from wholestep.runtime.checkpoint import Checkpoints, load_checkpoint

__all__ = [
    "BanRules",
    "BudgetError",
    "CaptureError",
    "CheckpointError",
    "Checkpoints",
    "DataParallel",
    "GraphError",
    "GuardError",
    "PassError",
    "PipelineError",
    "Plan",
    "PlanError",
    "PlanFileError",
    "RankError",
    "Schedule",
    "ScheduleError",
    "ScriptError",
    "SettingsError",
    "SimulationError",
    "SplitError",
    "SplitPoint",
    "StageFileError",
    "UsageError",
    "VerificationError",
    "WholestepError",
    "__version__",
    "compile",
    "inductor",
    "load_checkpoint",
    "lower",
    "partition",
    "pipe_split",
    "pipeline",
]
