"""Formulas over bits for CP-SAT: constants are folded, equal formulas become one bit.

A literal is a number: a bit's, or minus that for its opposite. `TRUE` and `FALSE` are literals, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

TRUE, FALSE = 1, -1
Conjunction = frozenset[int]


class Formula:
    """Bits, clauses and sums that CP-SAT is to satisfy. May be added to after it has been solved."""

    def __init__(self) -> None:
        from ortools.sat.python import cp_model  # heavy, and only here

        self._cp: Any = cp_model
        self.model: Any = cp_model.CpModel()
        self._bits: list[Any] = [None, self.model.new_constant(1)]
        self._conjunctions: dict[Conjunction, int] = {}
        self._upper: dict[frozenset[Conjunction], int] = {}

    def new_bit(self) -> int:
        self._bits.append(self.model.new_bool_var(""))
        return len(self._bits) - 1

    def both(self, *literals: int) -> int:
        """A bit that is set if all of these are, and only then."""
        wanted = _folded(literals)
        if wanted is None:
            return FALSE
        if len(wanted) <= 1:
            return next(iter(wanted), TRUE)
        if wanted not in self._conjunctions:
            bit = self._conjunctions[wanted] = self.new_bit()
            parts = sorted(wanted)
            for literal in parts:
                self.add_clause([-bit, literal])
            self.add_clause([bit, *(-literal for literal in parts)])
        return self._conjunctions[wanted]

    def either(self, *literals: int) -> int:
        """A bit that is set if one of these is, and only then."""
        return -self.both(*(-literal for literal in literals))

    def at_least(self, conjunctions: Iterable[Iterable[int]]) -> int:
        """A bit that is set if all of some conjunction is. It may be set without need: for what is better not set."""
        folded = {item for item in map(_folded, conjunctions) if item is not None}
        if frozenset[int]() in folded:
            return TRUE
        if not folded:
            return FALSE
        if len(folded) == 1 and len(min(folded)) == 1:
            return next(iter(min(folded)))
        key = frozenset(folded)
        if key not in self._upper:
            bit = self._upper[key] = self.new_bit()
            for conjunction in sorted(map(sorted, folded)):
                self.add_clause([bit, *(-literal for literal in conjunction)])
        return self._upper[key]

    def add_clause(self, literals: Sequence[int]) -> None:
        """One of these has to be set."""
        if TRUE not in literals:
            self.model.add_bool_or([self._of(literal) for literal in literals if literal != FALSE])

    def add_limit(self, terms: Sequence[tuple[int, int]], limit: int, only_if: Sequence[int] = ()) -> None:
        """The sum of factors of literals that are set is at most a limit, if all of `only_if` are set."""
        if FALSE in only_if:
            return
        constraint = self.model.add(self._sum(terms) <= limit)
        conditions = [self._of(literal) for literal in only_if if literal != TRUE]
        if conditions:
            constraint.only_enforce_if(*conditions)

    def minimize(self, terms: Sequence[tuple[int, int]]) -> None:
        self.model.minimize(self._sum(terms))

    def hint(self, literals: Iterable[tuple[int, bool]]) -> None:
        """Values to try first."""
        self.model.clear_hints()
        for literal, value in literals:
            self.model.add_hint(self._bits[literal], int(value))

    def solve(self, literals: Iterable[int], effort: float, gap: float) -> tuple[list[bool] | None, bool, float]:
        """Values of literals (None without a solution), whether that is final, and deterministic seconds spent."""
        solver = self._cp.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = 0
        # All clauses go into the linear relaxation as well: proofs come from there, in a hundredth of the time.
        solver.parameters.linearization_level = 2
        solver.parameters.max_deterministic_time = max(effort, 1e-3)
        solver.parameters.relative_gap_limit = gap
        status = solver.solve(self.model)
        is_final = status in (self._cp.OPTIMAL, self._cp.INFEASIBLE)
        work = float(solver.response_proto.deterministic_time)
        if status not in (self._cp.OPTIMAL, self._cp.FEASIBLE):
            return None, is_final, work
        return [bool(solver.boolean_value(self._of(literal))) for literal in literals], is_final, work

    def _of(self, literal: int) -> Any:
        return self._bits[literal] if literal > 0 else ~self._bits[-literal]

    def _sum(self, terms: Sequence[tuple[int, int]]) -> Any:
        constant = sum(factor for factor, literal in terms if literal == TRUE)
        open_terms = [term for term in terms if term[1] not in (TRUE, FALSE)]
        literals = [self._of(literal) for _, literal in open_terms]
        return self._cp.LinearExpr.weighted_sum(literals, [factor for factor, _ in open_terms]) + constant


def _folded(literals: Iterable[int]) -> Conjunction | None:
    """A conjunction without what is true anyway; None if it can never be."""
    wanted = frozenset(literals) - {TRUE}
    return None if FALSE in wanted or any(-literal in wanted for literal in wanted) else wanted
