"""Calls that differ from all that were captured in nothing but what Python draws: which of them get a graph.

if random.random() < 0.5: ...       two ways, a graph for each, captured as soon as it is taken
size = random.choice([6, 8, 10])    where torch needs the number itself: a graph for each, when it is drawn again
x[:, :, left:right]                 of draws that never come again: such a call runs as it is
"""

from __future__ import annotations

from wholestep.capture.record import Difference, OnlyInEager
from wholestep.compiler import StepOptions
from wholestep.runtime.specialization import Specialization

MAX_OUTCOMES = 8
"""So many graphs of one step may differ in nothing but the values that it looks at, or in what it draws."""
Tried = list[tuple[Specialization, Difference]]
"""Graphs that a call does not fit, and why not."""
_MAX_SEEN = 1000


def require_worth(tried: Tried, options: StepOptions, num_graphs: int) -> None:
    """Raise `OnlyInEager` if a call, for which no graph of some fits, should not be captured for what it has drawn."""
    if options.memory_budget is not None or options.data_parallel is not None:  # there is no eager call
        return
    beside = [(one, difference.outcome) for one, difference in tried if difference.outcome is not None]
    if not beside:
        return
    # A branch has two ways, a value may never come again.
    values = [(one, outcome) for one, outcome in beside if len(outcome) > 1]
    is_known = not values or any(outcome in one.outcomes_seen for one, outcome in values)
    for one, outcome in values:
        if len(one.outcomes_seen) < _MAX_SEEN:
            one.outcomes_seen.add(outcome)
    if not is_known or num_graphs >= options.cache_size or len(beside) >= MAX_OUTCOMES:
        raise OnlyInEager("what the step draws leads to a course that it has no graph of")
