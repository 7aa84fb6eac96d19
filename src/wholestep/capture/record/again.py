"""Why a trace begins again from its start, with more that is known."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from wholestep.errors import CaptureError


class Unsymbolic(BaseException):
    """Torch needs the value of a number that was to stay symbolic: traced again with it as it is."""

    def __init__(self, paths: frozenset[tuple[Any, ...]]) -> None:
        super().__init__(len(paths))
        self.paths = paths


class Moves(BaseException):
    """The step moves numbers on that it reads, a counter say: traced again with them as inputs."""

    def __init__(self, paths: tuple[tuple[Any, ...], ...]) -> None:
        super().__init__(len(paths))
        self.paths = paths


class LooksAtState(BaseException):
    """The step looks at the state of optimizers that have none so far: traced again without what they begin with."""

    def __init__(self, optimizers: frozenset[int]) -> None:
        super().__init__(len(optimizers))
        self.optimizers = optimizers


class Raises(CaptureError):
    """The step raises in this very call, because of a value that it has looked at: there is nothing to capture."""


def raises_of_a_value(location: str | None = None) -> Raises:
    """What only a caller sees who has asked for a memory budget: without one, the call runs as it is."""
    what = "the step raises an error, because of a value that it has computed"
    return Raises(what, location=location, advice="Call the step itself, without memory_budget=, to see that error")


class OnlyInEager(Raises):
    """This very call takes a course that a graph cannot be made of: it is to run as it is."""


class Missed(BaseException):
    """The step uses a model or optimizer that nobody has found: it is traced again with that one among its inputs."""

    def __init__(self, owner: nn.Module | Optimizer) -> None:
        super().__init__(type(owner).__name__)
        self.owner = owner


class DrawsWhole(BaseException):
    """A function computes with what it has drawn: traced again with its calls as one draw each."""

    def __init__(self, drawer: tuple[Any, ...]) -> None:
        super().__init__(drawer[-1])
        self.drawer = drawer


class CallsLater(BaseException):
    """A function looks at values that only the graph decides: traced again with its calls made after that, as one."""

    def __init__(self, function: tuple[Any, ...]) -> None:
        super().__init__(function[-1])
        self.function = function


class NotWhole(CallsLater):
    """A function that was to be called like that cannot be."""


class AsksBefore(BaseException):
    """The step branches on a value, or makes text of it: traced again, with rates and state known before it runs."""


class HasSizes(BaseException):
    """The step makes tensors whose size depends on values: traced again, with symbols for such sizes.

    With `pretends`, no row and one are traced as some. Without, as they are: the step takes another course for them.
    """

    def __init__(self, *, pretends: bool) -> None:
        super().__init__(pretends)
        self.pretends = pretends
