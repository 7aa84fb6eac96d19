"""Which values to keep if so many bytes may be kept: the 0/1 knapsack, three ways.

    maximise   sum of worth(i)   over chosen i
    so that    sum of bytes(i) <= capacity

`greedy` takes the worthiest per byte first, and the single worthiest item if that is better: at least half the best.
`dp` is best(c) = max(best(c), best(c - bytes(i)) + worth(i)) over capacities in up to `_MAX_STEPS` steps; sizes are
rounded up, so that the capacity holds, and where they are multiples of a step the answer is exact. `ilp` hands the same
to CP-SAT with exact sizes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wholestep.errors import WholestepError

METHODS = ("greedy", "dp", "ilp")
_MAX_STEPS = 20_000
# CP-SAT takes integers.
_WORTH_SCALE = 10**9
_ILP_SECONDS = 10.0


@dataclass(frozen=True)
class Item:
    """Something that may be kept."""

    num_bytes: int
    worth: float


def choose_items(items: Sequence[Item], capacity_bytes: int, method: str = "dp") -> frozenset[int]:
    """Positions of the items to keep. Items that weigh nothing are kept, those worth nothing are not."""
    if method not in METHODS:
        raise WholestepError(f"there is no knapsack '{method}'; choose from {', '.join(METHODS)}")
    free = {index for index, item in enumerate(items) if item.num_bytes == 0 and item.worth > 0}
    open_items = [index for index, item in enumerate(items) if item.worth > 0 and 0 < item.num_bytes <= capacity_bytes]
    if sum(items[index].num_bytes for index in open_items) <= capacity_bytes:
        return frozenset(free | set(open_items))
    solve = {"greedy": _greedy, "dp": _dp, "ilp": _ilp}[method]
    return frozenset(free | solve(items, open_items, capacity_bytes))


def _greedy(items: Sequence[Item], candidates: list[int], capacity: int) -> set[int]:
    chosen: set[int] = set()
    room = capacity
    for index in sorted(candidates, key=lambda index: (-items[index].worth / items[index].num_bytes, index)):
        if items[index].num_bytes <= room:
            chosen.add(index)
            room -= items[index].num_bytes
    best_single = max(candidates, key=lambda index: (items[index].worth, -index))
    if items[best_single].worth > sum(items[index].worth for index in chosen):
        return {best_single}
    return chosen


def _dp(items: Sequence[Item], candidates: list[int], capacity: int) -> set[int]:
    step = math.gcd(capacity, *(items[index].num_bytes for index in candidates))
    if capacity // step > _MAX_STEPS:
        step = math.ceil(capacity / _MAX_STEPS)
    num_steps = capacity // step
    best = np.zeros(num_steps + 1)
    taken = np.zeros((len(candidates), num_steps + 1), dtype=bool)
    for row, index in enumerate(candidates):
        size = math.ceil(items[index].num_bytes / step)
        if size > num_steps:
            continue
        with_item = best[: num_steps + 1 - size] + items[index].worth
        taken[row, size:] = with_item > best[size:]
        best[size:] = np.where(taken[row, size:], with_item, best[size:])
    chosen: set[int] = set()
    left = num_steps
    for row in range(len(candidates) - 1, -1, -1):
        if taken[row, left]:
            chosen.add(candidates[row])
            left -= math.ceil(items[candidates[row]].num_bytes / step)
    return chosen


def _ilp(items: Sequence[Item], candidates: list[int], capacity: int) -> set[int]:
    from ortools.sat.python import cp_model  # heavy, and only here

    model = cp_model.CpModel()
    take = {index: model.new_bool_var(str(index)) for index in candidates}
    model.add(sum(items[index].num_bytes * take[index] for index in candidates) <= capacity)
    scale = _WORTH_SCALE / max(items[index].worth for index in candidates)
    model.maximize(sum(round(items[index].worth * scale) * take[index] for index in candidates))
    solver = cp_model.CpSolver()
    # One worker: the same answer every time, on every rank.
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.max_deterministic_time = _ILP_SECONDS
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return _greedy(items, candidates, capacity)
    return {index for index in candidates if solver.boolean_value(take[index])}
