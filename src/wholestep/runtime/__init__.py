"""The runtime: guards, specialisations, and the callable that joins capture, passes and execution."""

from wholestep.runtime.data_parallel import DataParallel
from wholestep.runtime.options import StepOptions
from wholestep.runtime.runner import StepRunner

__all__ = ["DataParallel", "StepOptions", "StepRunner"]
