"""The runtime: guards, specialisations, and the callable that joins capture, passes and execution."""

from wholestep.runtime.runner import StepRunner

__all__ = ["StepRunner"]
