"""Every error a user can meet. Each message is one sentence that names the place and says what to do next."""

from __future__ import annotations


class WholestepError(ValueError):
    """Base of all errors Wholestep raises on purpose."""


class CaptureError(WholestepError):
    """The train step cannot be captured as one graph; model, optimizer and RNG are as they were before the call.

    `location` is the user's own `file:line`, `library` the line of somebody else's code that it has led to, if any.
    """

    def __init__(self, message: str, *, location: str | None = None, advice: str | None = None) -> None:
        super().__init__()
        self.message = message
        self.advice = advice
        self.locate(location)

    def locate(self, location: str | None) -> None:
        """Say where it was, for those that are told too late to know."""
        self.location = location
        self.library: str | None = getattr(location, "library", None)
        text = self.message if self.location is None else f"{self.location}: {self.message}"
        text = text if self.library is None else f"{text} (in {self.library})"
        self.args = (text if self.advice is None else f"{text}. {self.advice}",)


class GuardError(WholestepError):
    """Something was asked of a compiled step that exists only after its first call."""


class GraphError(WholestepError):
    """A step graph breaks one of its invariants: a rewrite was wrong, the graph was not run."""


class PassError(WholestepError):
    """A pass or pipeline is unknown, misspelt, out of order or given a bad option."""


class VerificationError(WholestepError):
    """`verify=N` found a step whose result differs from eager; `differences` maps names to the largest difference."""

    def __init__(self, message: str, differences: dict[str, float]) -> None:
        super().__init__(message)
        self.differences = differences


class SettingsError(WholestepError):
    """A `WHOLESTEP_*` environment variable has a value that is not allowed."""


class RankError(WholestepError):
    """Ranks disagree about the step, or one of them failed: every rank raises, no gradient has been communicated.

    Or a peer was lost while gradients were on their way: each read of what they would have changed raises.
    """


class ScheduleError(WholestepError):
    """A pipeline schedule cannot be read, built or run; the message names the rank and the action."""


class PipelineError(WholestepError):
    """A pipeline cannot be made of this model and batch, or a rank of it failed; every rank raises and shows why."""


class SplitError(WholestepError):
    """A model cannot be cut into pipeline stages as asked; the message names the module, mark or tensor."""


class StageFileError(WholestepError):
    """A pipeline stage cannot be written to a file, or a file is no stage; nothing in it has been run."""


class SimulationError(WholestepError):
    """A cluster or cost model cannot be read, or a job does not fit the cluster; nothing in a file has been run."""


class PlanFileError(WholestepError):
    """A plan cannot be written to a file, or a file is no plan; nothing in it has been run."""


class PlanError(WholestepError):
    """A plan does not fit the step, the ranks or the version that it is to run with; nothing has run."""


class ScriptError(WholestepError):
    """A file given on the command line cannot be loaded, or the function in it fails or returns no step."""


class UsageError(WholestepError):
    """Something that was asked for is not there, or a file cannot be written where it was asked for."""


class CheckpointError(WholestepError):
    """A checkpoint cannot be written, is damaged, or does not fit; nothing in it has been run, nothing was changed."""


class BudgetError(WholestepError):
    """A memory budget cannot be kept; `smallest_bytes` is the least that is known to be enough."""

    def __init__(self, message: str, smallest_bytes: int) -> None:
        super().__init__(message)
        self.smallest_bytes = smallest_bytes
