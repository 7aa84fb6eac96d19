"""What is left of a recording when the trace is over: guards, numbers, effects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from wholestep.capture.record.effects import Effects
from wholestep.capture.record.late import Late, Requirement
from wholestep.capture.record.places import Place
from wholestep.capture.record.program import Program


@dataclass
class Current:
    """The call that is running: tensors in the objects it was given are found there. None between calls."""

    call: Any = None


@dataclass(frozen=True)
class Recording:
    """The Python around a captured graph.

    `roots` are the places it has read from; `program` computes the numbers that change, `effects` are done behind the
    graph, `late` are the numbers that the graph computes, `requirements` what it looks at itself. `symbolic` are the
    paths of numbers that may change; `numbers` holds those of the `current` call.
    """

    roots: tuple[Place, ...]
    program: Program
    effects: Effects
    symbolic: tuple[tuple[Any, ...], ...]
    numbers: dict[str, Any]
    current: Current
    late: Late
    requirements: tuple[Requirement, ...]
    states_read: frozenset[int] = frozenset()
    """Ids of the optimizers at whose state the step may look by itself."""
