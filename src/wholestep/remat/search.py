"""The peak-aware planner: which values to keep so that the peak fits a budget and the least is computed again.

    1. free and cheap wins: minimum cuts, with ops allowed to run again from cheap to dear    (`_portfolio`)
    2. chains of blocks: patterns per kind of block, dynamic programming along the chain      (`_from_chains`)
    3. the best that fits is mended: values added back while there is room, useless ones dropped (`_polished`)

Every candidate is judged by simulating the whole program; nothing is promised that was not simulated.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property

from wholestep.remat.blocks import Chain, find_chains
from wholestep.remat.chain import Option, solve_chain
from wholestep.remat.exact import solve_exactly
from wholestep.remat.knapsack import Item, choose_items
from wholestep.remat.mincut import min_cut
from wholestep.remat.patterns import PatternBook
from wholestep.remat.problem import Decision, Problem
from wholestep.remat.simulate import Outcome, Simulator

logger = logging.getLogger(__name__)

_MERGED_BLOCKS = (2, 3, 4, 6, 8)
_MAX_TRIES = 8
_SAME_PEAK = 1.01
# Nobody wants to pay more forwards than this for the last bytes.
_MAX_FORWARDS = 8
# Simulations for mending cost their number times the length of the program.
_POLISH_WORK = 60_000
# Beyond this the chains do well, and minimum cuts of the whole take their time.
_MAX_KNAPSACK_OPS = 3000
_NEARLY = 0.9
_NUM_PRICES = 4
_A_HAIR = 0.0005
# What blocks cost one by one is not quite what they cost together: a plan for less memory may turn out cheaper.
_LOWER = (0.95, 0.9, 0.85, 0.8)


@dataclass(frozen=True)
class Choice:
    """A decision and what it leads to. `is_proven` if it is known that none is cheaper with these segments."""

    decision: Decision
    outcome: Outcome
    is_proven: bool = False


class Planner:
    """Plans for one program, for any number of budgets. Budgets are bytes without the resident ones."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.chains = find_chains(problem)
        self.simulator = Simulator(problem)
        self._starts = frozenset[int]().union(*(chain.starts for chain in self.chains))
        self._known: dict[Decision, Choice] = {}

    @cached_property
    def everything(self) -> Choice:
        """Keep all there is: nothing runs again but what must."""
        return self.judge(Decision(frozenset(self.problem.choices), self._starts))

    @cached_property
    def cheapest(self) -> Choice:
        """The least cost, whatever the peak: keeping everything, unless that has a price of its own."""
        if not self.problem.is_fused:
            return self.everything
        return self.plan(round(_SAME_PEAK * self.everything.outcome.peak_bytes)) or self.everything

    @cached_property
    def smallest(self) -> Choice:
        """The lowest peak that is found, give or take a hundredth: the last bytes are the dearest."""
        best = min(filter(self._is_affordable, [self.everything, *self._portfolio]), key=_by_peak)
        low, high = 0, best.outcome.peak_bytes
        for _ in range(14):
            middle = (low + high) // 2
            decision = self._solve_chains(middle)
            found = None if decision is None else self.judge(decision)
            if found is None or not self._is_affordable(found):
                low = middle
                continue
            best = min(best, found, key=_by_peak)
            high = middle
            if high - low < 0.004 * high:
                break
        enough_bytes = round(_SAME_PEAK * best.outcome.peak_bytes)
        return self._polished(min(self._fitting(enough_bytes), key=_by_cost), enough_bytes)

    def plan(self, budget_bytes: int) -> Choice | None:
        """The cheapest choice found whose peak is at most the budget; None if there is none."""
        if not self.problem.is_fused and self.everything.outcome.fits(budget_bytes):
            return self.everything
        fitting = self._fitting(budget_bytes)
        if not fitting and self.smallest.outcome.fits(budget_bytes):
            return self.smallest
        best = min(fitting, key=_by_cost, default=None)
        return None if best is None else self._polished(best, budget_bytes)

    def exactly(self, budget_bytes: int) -> Choice | None:
        """As `plan`, and CP-SAT looks for what is cheaper still: with the plan's segments, one for each block, and one.

        `is_proven` if it came to an end with all of them.
        """
        best = self.plan(budget_bytes)
        max_cost = self._max_cost if best is None else best.outcome.cost
        divisions = [self._starts, frozenset[int]()]
        if best is not None:
            divisions.insert(0, best.decision.starts)
        is_proven = True
        for starts in dict.fromkeys(divisions):
            known = None if best is None else best.decision
            answer = solve_exactly(self.problem, budget_bytes, starts=starts, max_cost=max_cost, known=known)
            is_proven = is_proven and answer is not None and answer.is_proven
            if answer is None or answer.decision is None:
                continue
            choice = self.judge(answer.decision)
            best = choice if best is None else min(best, choice, key=_by_cost)
            max_cost = best.outcome.cost
        return None if best is None else replace(best, is_proven=is_proven)

    def _fitting(self, budget_bytes: int) -> list[Choice]:
        """All choices known that fit, after asking everyone."""
        self._from_chains(budget_bytes)
        for share in _LOWER:
            decision = self._solve_chains(round(share * budget_bytes))
            if decision is not None:
                self.judge(decision)
        choices = [*self._known.values(), *self._portfolio]
        if len(self.problem.ops) <= _MAX_KNAPSACK_OPS:
            by_worth = self.by_knapsack(budget_bytes, "greedy")
            choices += [] if by_worth is None else [by_worth]
            if budget_bytes >= _NEARLY * self.without_flops.outcome.peak_bytes:
                choices += self._single_drops
        return [choice for choice in choices if choice.outcome.fits(budget_bytes) and self._is_affordable(choice)]

    def _is_affordable(self, choice: Choice) -> bool:
        return choice.outcome.cost <= self._max_cost

    @property
    def _max_cost(self) -> float:
        return max(_MAX_FORWARDS * self.problem.forward_cost, self.everything.outcome.cost)

    def judge(self, decision: Decision) -> Choice:
        """Simulate a decision."""
        if decision not in self._known:
            self._known[decision] = Choice(decision, self.simulator.outcome(decision))
        return self._known[decision]

    @cached_property
    def without_flops(self) -> Choice:
        """The fewest bytes to keep if no matrix product, convolution or attention runs again."""
        return self.fewest_bytes(self.dear)

    @cached_property
    def dear(self) -> frozenset[int]:
        """Ops with flops: matrix products, convolutions, attention."""
        return frozenset(index for index, op in enumerate(self.problem.ops) if op.flops)

    def fewest_bytes(self, banned: Collection[int]) -> Choice:
        """The fewest bytes to keep if no op of `banned` runs again."""
        kept = min_cut(self.problem, lambda op: op not in banned or op in self.problem.forced)
        return self.judge(Decision(kept, self._starts))

    def by_knapsack(self, budget_bytes: int, method: str, banned: Collection[int] = ()) -> Choice | None:
        """Keep the results of dear ops by what they are worth per byte, as many as fit, and a minimum cut of the rest.

        How many bytes of dear results fit is found by halving: their sum is not the peak, that is simulated. Ops of
        `banned` do not run again.
        """
        problem = self.problem
        dear = [value for value in problem.choices if problem.ops[problem.values[value].maker].flops]
        items = [Item(problem.values[v].num_bytes, problem.ops[problem.values[v].maker].cost) for v in dear]
        low, high = 0, sum(item.num_bytes for item in items)
        best: Choice | None = None
        for _ in range(_MAX_TRIES):
            middle = (low + high + 1) // 2
            kept_ops = {problem.values[dear[index]].maker for index in choose_items(items, middle, method)}
            once = kept_ops.union(banned)
            kept = min_cut(problem, lambda op: op not in once or op in problem.forced)  # noqa: B023
            choice = self.judge(Decision(kept, self._starts))
            if choice.outcome.fits(budget_bytes):
                best = min(choice, best or choice, key=_by_cost)
                low = middle
            else:
                high = middle
        return best

    @cached_property
    def _single_drops(self) -> list[Choice]:
        """From what is kept if nothing dear runs again, one dear result is dropped: often enough for a few bytes."""
        problem = self.problem
        makers = {problem.values[value].maker for value in self.without_flops.decision.kept}
        found: list[Choice] = []
        for dropped in sorted(maker for maker in makers if problem.ops[maker].flops):
            kept = min_cut(
                problem,
                lambda op, dropped=dropped: problem.ops[op].flops == 0 or op == dropped or op in problem.forced,
            )
            found.append(self.judge(Decision(kept, self._starts)))
        return found

    def smallest_without_flops(self) -> Choice:
        """The lowest peak that is found if no matrix product, convolution or attention runs again."""
        problem = self.problem
        fixed = [replace(op, unrepeatable="it has flops") if op.flops else op for op in problem.ops]
        restricted = Planner(replace(problem, ops=tuple(fixed))).smallest.decision
        dear = {value for value in problem.choices if problem.ops[problem.values[value].maker].flops}
        return self.judge(replace(restricted, kept=restricted.kept | dear))

    @cached_property
    def _portfolio(self) -> list[Choice]:
        """Minimum cuts of the whole program, for several sets of ops that may run again."""
        problem = self.problem
        prices = {
            op: problem.ops[op].cost / max(1, problem.num_bytes(problem.ops[op].makes)) for op in problem.forward_ops
        }
        ordered = sorted({prices[problem.values[value].maker] for value in problem.choices})
        limits = ordered[:: max(1, len(ordered) // _NUM_PRICES)]
        cuts = [
            min_cut(problem, lambda op, limit=limit: prices[op] <= limit or op in problem.forced) for limit in limits
        ]
        cuts.append(self.without_flops.decision.kept)
        divisions = (self._starts, frozenset[int]())
        return [self.judge(Decision(cut, starts)) for cut in dict.fromkeys(cuts) for starts in divisions]

    def _from_chains(self, budget_bytes: int) -> list[Choice]:
        """Solve the chains for a limit, lowered or raised by what the simulation of the result says."""
        found: list[Choice] = []
        low, high, limit = 0, 2 * budget_bytes, budget_bytes
        for num_tries in range(1, _MAX_TRIES + 1):
            decision = self._solve_chains(limit)
            if decision is None:
                low = limit
            else:
                choice = self.judge(decision)
                if choice.outcome.fits(budget_bytes):
                    found.append(choice)
                    low = limit
                    slack = budget_bytes - choice.outcome.peak_bytes
                    if slack <= 0.01 * budget_bytes:
                        break
                    if limit + slack < high:
                        limit += slack
                        continue
                else:
                    high = limit
                    # A little more each time: chains count in quanta, and could miss by a hair for ever.
                    excess = choice.outcome.peak_bytes - budget_bytes + round(num_tries * _A_HAIR * budget_bytes)
                    if limit - excess > low:
                        limit -= excess
                        continue
            if high - low <= 0.002 * budget_bytes:
                break
            limit = (low + high) // 2
        return found

    def _solve_chains(self, limit_bytes: int) -> Decision | None:
        kept: set[int] = set()
        starts: set[int] = set()
        for chain, options in zip(self.chains, self._options):
            solved = solve_chain(options, limit_bytes)
            if solved is None:
                return None
            kept |= solved.kept | chain.context
            starts |= solved.starts
        return Decision(frozenset(value for value in kept if self.problem.droppable[value]), frozenset(starts))

    @cached_property
    def _options(self) -> list[list[list[Option]]]:
        return [self._options_of(chain) for chain in self.chains]

    def _options_of(self, chain: Chain) -> list[list[Option]]:
        book = PatternBook(self.problem, chain.blocks, chain.context)
        options: list[list[Option]] = []
        for start in range(len(chain.blocks)):
            here = [Option(pattern) for pattern in book.patterns(start)]
            for length in _MERGED_BLOCKS:
                if start + length <= len(chain.blocks):
                    here += [Option(pattern, length) for pattern in book.patterns(start, length)]
            options.append(here)
        return options

    def _polished(self, choice: Choice, budget_bytes: int) -> Choice:
        """Add back what saves the most per byte while it fits; a bounded number of simulations."""
        problem = self.problem
        num_tries = _POLISH_WORK // len(problem.ops)
        dropped = [value for value in problem.choices if value not in choice.decision.kept]
        worth = {value: problem.ops[problem.values[value].maker].cost for value in dropped}
        dropped = [value for value in dropped if problem.values[value].num_bytes > 0]
        dropped.sort(key=lambda value: (-worth[value] / problem.values[value].num_bytes, value))
        for value in dropped[:num_tries]:
            tried = self.judge(replace(choice.decision, kept=choice.decision.kept | {value}))
            if tried.outcome.fits(budget_bytes) and tried.outcome.cost < choice.outcome.cost:
                choice = tried
        return choice


def _by_cost(choice: Choice) -> tuple[float, int, list[int]]:
    return choice.outcome.cost, choice.outcome.peak_bytes, sorted(choice.decision.kept)


def _by_peak(choice: Choice) -> tuple[int, float, list[int]]:
    return choice.outcome.peak_bytes, choice.outcome.cost, sorted(choice.decision.kept)
