"""The best patterns for a chain of blocks under a limit: dynamic programming along the forward.

    P(k)     bytes that blocks before k keep
    feasible P(k) + peak(pattern of k) <= limit       while block k runs, forward or late, the blocks before it are kept
    best(k, P) = least cost of blocks before k that keep P bytes
    best(k + n, P + kept(pattern)) = min over patterns of n blocks from k of best(k, P) + cost(pattern)

P is counted in `_NUM_QUANTA` parts of the limit, rounded to the nearest: whoever asks checks the result by simulation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wholestep.remat.patterns import Pattern
from wholestep.remat.problem import Decision

_NUM_QUANTA = 4096


@dataclass(frozen=True)
class Option:
    """A pattern for `num_blocks` blocks in a row."""

    pattern: Pattern
    num_blocks: int = 1


def solve_chain(options: Sequence[Sequence[Option]], limit_bytes: int) -> Decision | None:
    """Values to keep at least cost, `options[k]` being those that start at block k; None if nothing fits."""
    if limit_bytes <= 0:
        return None
    quantum = limit_bytes / _NUM_QUANTA
    num_blocks = len(options)
    best = np.full((num_blocks + 1, _NUM_QUANTA + 1), np.inf)
    chosen = np.full((num_blocks + 1, _NUM_QUANTA + 1), -1, dtype=np.int32)
    best[0, 0] = 0.0
    for block in range(num_blocks):
        for number, option in enumerate(options[block]):
            pattern = option.pattern
            room = int((limit_bytes - pattern.peak_bytes) / quantum) if limit_bytes >= pattern.peak_bytes else -1
            shift = round(pattern.kept_bytes / quantum)
            length = min(room + 1, _NUM_QUANTA + 1 - shift)
            if length <= 0:
                continue
            costs = best[block, :length] + pattern.cost
            target = slice(shift, shift + length)
            row = best[block + option.num_blocks]
            better = costs < row[target]
            row[target] = np.where(better, costs, row[target])
            numbers = chosen[block + option.num_blocks]
            numbers[target] = np.where(better, number * num_blocks + block, numbers[target])
    if not np.isfinite(best[num_blocks]).any():
        return None
    return _traced_back(options, best, chosen, quantum)


def _traced_back(options: Sequence[Sequence[Option]], best: np.ndarray, chosen: np.ndarray, quantum: float) -> Decision:
    num_blocks = len(options)
    block, state = num_blocks, int(np.argmin(best[num_blocks]))
    kept: set[int] = set()
    starts: set[int] = set()
    while block > 0:
        number, start = divmod(int(chosen[block, state]), num_blocks)
        pattern = options[start][number].pattern
        kept |= pattern.kept
        starts |= pattern.starts
        block, state = start, state - round(pattern.kept_bytes / quantum)
    return Decision(frozenset(kept), frozenset(starts))
