"""Optimizer state that a step makes itself, in a later call: such a course is taken once, and needs no graph."""

from __future__ import annotations

from wholestep.capture import Capture
from wholestep.capture.binding import StateOf
from wholestep.capture.record import OnlyInEager


def refuse_state_made_once(captured: Capture) -> None:
    """Let the call run as it is if it makes entries of state: the next one that goes this way finds them there."""
    for slot_id in captured.graph.results:
        where = captured.bindings.get(slot_id)
        if isinstance(where, StateOf) and where.key not in where.optimizer.state.get(where.parameter, {}):
            raise OnlyInEager(
                f"the step makes '{where.key}' in the state of {type(where.optimizer).__name__}, which it does once",
                advice="Call the step itself once",
            )
