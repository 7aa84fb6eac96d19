"""The cheapest choice whose peak is within a limit, by CP-SAT: for small programs, or parts of large ones.

The simulation is written down as formulas (`wholestep.remat.exact_model`): costs, and bytes alive at events. There are
too many events to write all of them down, and few matter. They are left out at first; those that the simulation of a
solution finds above the limit come in before the next solution is sought. Leaving constraints out never excludes a
choice, so the first solution that simulates well is the cheapest there is. What formulas do not say exactly they say
too kindly; if an event is above the limit for all its constraint, that one choice is excluded.

One worker, a fixed seed and a limit on deterministic time: every rank and every run comes to the same answer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from wholestep.remat.exact_model import ExactModel, Limits, moments_of
from wholestep.remat.problem import Decision, Problem
from wholestep.remat.simulate import Outcome, Simulator

_MAX_ROUNDS = 60
# Events that come in after one solution: the highest ones.
_NEW_EVENTS = 8


@dataclass(frozen=True)
class Answer:
    """The cheapest choice that was found, and whether it is the cheapest there is.

    Without a decision it is proven that none keeps to the limits.
    """

    decision: Decision | None
    outcome: Outcome | None
    is_proven: bool


def solve_exactly(
    problem: Problem,
    peak_bytes: int,
    *,
    starts: frozenset[int] = frozenset(),
    kept_bytes: int | None = None,
    max_cost: float = math.inf,
    known: Decision | None = None,
    effort: float = 10.0,
) -> Answer | None:
    """The cheapest decision with these segments whose simulated peak is at most `peak_bytes`.

    `kept_bytes` is a limit on kept bytes, and what costs more than `max_cost` is not looked for. `known` is a decision
    to start from. `effort` bounds the work, in CP-SAT's deterministic seconds. Returns None if nothing was found and
    nothing proven by then.
    """
    return _Search(problem, starts, Limits(peak_bytes, kept_bytes), max_cost, known).run(effort)


class _Search:
    """Solve, simulate, add what was missing, as often as it takes."""

    def __init__(
        self, problem: Problem, starts: frozenset[int], limits: Limits, max_cost: float, known: Decision | None
    ) -> None:
        self.simulator = Simulator(problem)
        self.starts = starts
        self.limits = limits
        self.model = ExactModel(problem, self.simulator, starts, limits)
        self.best: tuple[Decision, Outcome] | None = None
        if known is not None:
            self.model.try_first(known.kept)
            self._consider(Decision(known.kept, starts))
        if self.best is not None:
            max_cost = min(max_cost, self.best[1].cost)
        if max_cost < math.inf:
            self.model.limit_cost(max_cost)

    def run(self, effort: float) -> Answer | None:
        for _ in range(_MAX_ROUNDS):
            solution = self.model.solve(effort)
            effort -= solution.work
            if solution.kept is None:
                return self._answer(is_proven=solution.is_final)
            decision = Decision(solution.kept, self.starts)
            fits = self._consider(decision)
            if fits or not solution.is_final or effort <= 0:
                return self._answer(is_proven=fits and solution.is_final)
            self._add_what_was_missing(decision)
        return self._answer(is_proven=False)

    def _answer(self, *, is_proven: bool) -> Answer | None:
        if self.best is not None:
            return Answer(*self.best, is_proven)
        return Answer(None, None, is_proven=True) if is_proven else None

    def _consider(self, decision: Decision) -> bool:
        """Whether a decision keeps to the limits; the cheapest that does is remembered."""
        outcome = self.simulator.outcome(decision)
        fits = self.limits.hold_for(outcome)
        if fits and (self.best is None or outcome.cost < self.best[1].cost):
            self.best = (decision, outcome)
        return fits

    def _add_what_was_missing(self, decision: Decision) -> None:
        moments = moments_of(self.simulator.events(decision))
        live = self.simulator.timeline(decision)
        highest_first = sorted(range(len(live)), key=lambda index: -live[index])
        high = [moments[index] for index in highest_first if live[index] > self.limits.peak_bytes]
        missing = [moment for moment in high if not self.model.knows(moment)]
        for moment in missing[:_NEW_EVENTS]:
            self.model.add_event(moment)
        if not missing:
            self.model.exclude(decision.kept)
