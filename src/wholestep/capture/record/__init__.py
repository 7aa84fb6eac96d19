"""What Python a step reads, writes and draws while it is traced: guards for later calls, and effects to do again."""

from wholestep.capture.record.again import (
    AsksBefore,
    CallsLater,
    DrawsWhole,
    HasSizes,
    LooksAtState,
    Missed,
    Moves,
    NotWhole,
    OnlyInEager,
    Raises,
    Unsymbolic,
    raises_of_a_value,
)
from wholestep.capture.record.arrays import LateArray
from wholestep.capture.record.counters import require_none_moved
from wholestep.capture.record.early_arrays import EarlyArray, index_of
from wholestep.capture.record.guard import Difference, ReadGuard
from wholestep.capture.record.imports import Unimported
from wholestep.capture.record.late import OtherOutcome
from wholestep.capture.record.listen import listening
from wholestep.capture.record.net import Unseen
from wholestep.capture.record.numbers import Number, is_number
from wholestep.capture.record.program import Broken, Outcome, Program
from wholestep.capture.record.recorder import Recorder
from wholestep.capture.record.recording import Current, Recording
from wholestep.capture.record.templates import Filling, Template
from wholestep.capture.record.watch import Contents, Watch
from wholestep.capture.record.whole_late import WholeCalls

__all__ = [
    "AsksBefore",
    "Broken",
    "CallsLater",
    "Contents",
    "Current",
    "Difference",
    "DrawsWhole",
    "EarlyArray",
    "Filling",
    "HasSizes",
    "LateArray",
    "LooksAtState",
    "Missed",
    "Moves",
    "NotWhole",
    "Number",
    "OnlyInEager",
    "OtherOutcome",
    "Outcome",
    "Program",
    "Raises",
    "ReadGuard",
    "Recorder",
    "Recording",
    "Template",
    "Unimported",
    "Unseen",
    "Unsymbolic",
    "Watch",
    "WholeCalls",
    "index_of",
    "is_number",
    "listening",
    "raises_of_a_value",
    "require_none_moved",
]
