"""The parts of a training step that a node can belong to."""

from __future__ import annotations

from enum import StrEnum


class Phase(StrEnum):
    """When in the step a node runs: what the user's code was doing when it was traced."""

    FORWARD = "forward"
    BACKWARD = "backward"
    COMM = "comm"
    OPTIMIZER = "optimizer"
