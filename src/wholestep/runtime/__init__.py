"""The runtime: guards, specialisations, and the callable that joins capture, passes and execution."""

from wholestep.runtime.compiled_step import CompiledStep, StepOptions

__all__ = ["CompiledStep", "StepOptions"]
