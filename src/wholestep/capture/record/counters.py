"""Numbers that the step moves on itself: a call after this one is certain to find other ones there.

    self.num_updates += 1               read as 4, and 5 when the trace ends
    self.mean = 0.9 * self.mean + 0.1 * loss.item()

The second call would be captured again for them, as for any number that changes. So they are known for what they are
once the first trace has ended, and it is traced again with them as inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from wholestep.capture.record.again import Moves
from wholestep.capture.record.numbers import is_number
from wholestep.capture.record.places import Expectation, Place, Step, same, take
from wholestep.capture.record.state import Kept

if TYPE_CHECKING:
    from wholestep.capture.record.recorder import Recorder

_STANDING = (Step.ITEM, Step.ATTRIBUTE, Step.CLASS, Step.CELL)


def require_none_moved(recorder: Recorder, known: frozenset[tuple[Any, ...]]) -> None:
    """Raise `Moves` if the step has moved numbers on that are not known for it."""
    moved = tuple(path for path in dict.fromkeys(_moved_numbers(recorder)) if path not in known)
    if moved:
        raise Moves(moved)


def _moved_numbers(recorder: Recorder) -> Iterator[tuple[Any, ...]]:
    """Paths of the numbers that were read as they are, and stand otherwise now; before anything is put back."""
    for kept in recorder.kept.values():
        above = recorder.place_of(kept.owner)
        for place in above.children.values() if above is not None else ():
            if place.expectation is Expectation.VALUE and type(place.value) in (int, float) and _is_moved(kept, place):
                yield place.path


def _is_moved(kept: Kept, place: Place) -> bool:
    if place.step is Step.LENGTH:
        return isinstance(kept.owner, list) and kept.has_steady_length and len(kept.owner) != place.value
    now = take(kept.owner, place.step, place.key) if place.step in _STANDING else place.value
    return is_number(now) or (type(now) is type(place.value) and not same(now, place.value))
