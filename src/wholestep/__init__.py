"""Wholestep compiles a whole PyTorch training step: forward, loss, backward and optimizer as one graph."""

from wholestep._version import __version__
from wholestep.api import BanRules, DataParallel, compile, inductor, lower, partition
from wholestep.errors import (
    BudgetError,
    CaptureError,
    GraphError,
    GuardError,
    PassError,
    RankError,
    ScheduleError,
    SettingsError,
    VerificationError,
    WholestepError,
)

__all__ = [
    "BanRules",
    "BudgetError",
    "CaptureError",
    "DataParallel",
    "GraphError",
    "GuardError",
    "PassError",
    "RankError",
    "ScheduleError",
    "SettingsError",
    "VerificationError",
    "WholestepError",
    "__version__",
    "compile",
    "inductor",
    "lower",
    "partition",
]
