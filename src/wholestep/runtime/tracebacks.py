"""What a user sees of an error: the frames of their own code and of one function of ours.

An error that comes out of a compiled step has been through dozens of frames of ours and of what traces. They are taken
out of its traceback, and out of those of the errors that it stands on; `WHOLESTEP_DEBUG=1` leaves them in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

from wholestep.capture import source
from wholestep.capture.record import OtherOutcome, Raises
from wholestep.errors import CaptureError, GraphError

_OF_OURS = (OtherOutcome, Raises)
"""How parts of ours tell each other to go another way."""


def tell(error: BaseException, function: Callable[..., Any], *, is_debugging: bool) -> None:
    """Make an error that leaves a compiled step one that its user can read."""
    if isinstance(error, CaptureError):
        error.__class__ = CaptureError  # which kind it is matters only to those who might go another way
        if error.location is None:
            error.locate(source.raising_line(error, function))
    if type(error) is GraphError and not error.args[0].startswith(where := f"{source.location_of(function)}: "):
        error.args = (f"{where}{error}",)
    if not is_debugging:
        hide_frames(error)


def hide_frames(error: BaseException) -> None:
    """Take our frames out of the tracebacks of an error and of those that it stands on.

    Those of torch go, too, where it was traced; an error of the graph or of eager code keeps them.
    """
    is_of_capture = isinstance(error, CaptureError)
    for one in _chain(error):
        one.__traceback__ = _shown(one.__traceback__, is_of_capture=is_of_capture)
        while isinstance(one.__context__, _OF_OURS) and one.__cause__ is not one.__context__:
            one.__context__ = one.__context__.__context__


def _chain(error: BaseException) -> Iterator[BaseException]:
    pending, seen = [error], set[int]()
    while pending:
        one = pending.pop()
        if id(one) not in seen:
            seen.add(id(one))
            yield one
            pending += [other for other in (one.__cause__, one.__context__) if other is not None]


def _shown(traceback: TracebackType | None, *, is_of_capture: bool) -> TracebackType | None:
    kept: list[TracebackType] = []
    while traceback is not None:
        filename = traceback.tb_frame.f_code.co_filename
        if not source.is_own_file(filename) and (not is_of_capture or source.is_user_file(filename)):
            kept.append(traceback)
        traceback = traceback.tb_next
    made: TracebackType | None = None
    for one in reversed(kept):
        made = TracebackType(made, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return made
