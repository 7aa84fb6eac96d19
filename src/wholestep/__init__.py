"""Wholestep compiles a whole PyTorch training step: forward, loss, backward and optimizer as one graph."""

from wholestep._version import __version__
from wholestep.api import DataParallel, compile
from wholestep.errors import (
    CaptureError,
    GraphError,
    GuardError,
    PassError,
    RankError,
    SettingsError,
    VerificationError,
    WholestepError,
)

__all__ = [
    "CaptureError",
    "DataParallel",
    "GraphError",
    "GuardError",
    "PassError",
    "RankError",
    "SettingsError",
    "VerificationError",
    "WholestepError",
    "__version__",
    "compile",
]
