"""Errors that are there only because the step is traced: a step that handles one goes on otherwise than in eager."""

from __future__ import annotations

from wholestep.capture import source
from wholestep.capture.record.again import AsksBefore, DrawsWhole, Missed, Unsymbolic
from wholestep.capture.record.imports import Unimported
from wholestep.capture.record.net import Unseen
from wholestep.errors import CaptureError

_OF_THE_TRACE = (CaptureError, Missed, Unsymbolic, AsksBefore, DrawsWhole, Unseen, Unimported)


class Caught:
    """The first of them that has reached a handler of the step, be it `except`, `finally` or `with`."""

    def __init__(self) -> None:
        self._first: BaseException | None = None

    def note(self, error: BaseException) -> None:
        if self._first is None and _is_of_the_trace(error):
            self._first = error

    def require_none(self) -> None:
        """Raise what the step has handled, as if it had not."""
        first, self._first = self._first, None
        if first is None:
            return
        if not isinstance(first, Exception) or isinstance(first, CaptureError):
            raise first
        raise CaptureError(
            f"the step goes on after an error of torch ({source.kind_of(first)}: {source.first_line(first)}), which "
            "may be another one, or none, when it is not captured",
            location=source.raising_line(first),
            advice="Let the error pass, or ask for what it depends on (shapes, dtypes) before",
        ) from first


def _is_of_the_trace(error: BaseException) -> bool:
    """Whether an error is one of the trace's own, or has come out of an operator, all of which are stood in for."""
    if isinstance(error, _OF_THE_TRACE):
        return True
    return isinstance(error, Exception) and source.has_passed_through(error, "interpose.py")
