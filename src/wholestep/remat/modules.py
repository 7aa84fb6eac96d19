"""Budgets of modules: what each may keep for the backward, decided before anyone plans for the whole step.

For a module M with values V (made in it; those of modules inside it that have a budget of their own are not M's):

    held(M)   = values of V that stay in any case: they cannot be computed again, are returned, or are borders
    limit(M)  = bytes as written, or share * bytes that M keeps if nothing is dropped
    choose K of V minus held, sum of bytes(K) <= limit - held, so that second runs cost the least      (`best_within`)
    K is kept, the rest of V is dropped, whatever the budget of the whole step

Second runs cost what the ops cost that have to run for what late ops miss. With a price r per byte kept, the least of
r * bytes(K) + cost(K) is a minimum cut; r rises until K fits. Values weigh a little more the earlier they are made
(`_TILT`), so that equal layers give way one after the other, not all at once; early ones first, because their second
runs come late, when little else is alive. What room is left goes to values that save something by themselves.

A *border* is what one bounded module hands to another in the forward. Dropped, it would have the second run of the one
module start in the other, and so on back to the first. As between two checkpoint regions, it is kept if it is needed.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from torch import fx

from wholestep.errors import BudgetError, WholestepError
from wholestep.remat.budget import Budget, ModuleBudget, readable
from wholestep.remat.knapsack import Item, choose_items
from wholestep.remat.mincut import min_cut
from wholestep.remat.plan import ModuleUse, describe_uses, values_read
from wholestep.remat.problem import Decision, Problem
from wholestep.remat.search import Choice, Planner
from wholestep.remat.simulate import Simulator

logger = logging.getLogger(__name__)

_TILT = 0.02
_NUM_PRICES = 24
# Costs and prices are whole numbers in a cut: the cost of a module's ops is this many units.
_UNITS = 2**40
# Simulations for mending cost their number times the length of the part they look at.
_POLISH_WORK = 60_000
_WILD = re.compile(r"[*?\[]")
_NUM_NAMED = 3


@dataclass(frozen=True)
class BoundedModule:
    """One module and the budget it is under."""

    name: str
    budget: Budget

    @property
    def is_limited(self) -> bool:
        return self.budget.share != 1


@dataclass(frozen=True)
class FixedModules:
    """What module budgets have decided.

    `problem` is the one they are about, with what they keep and drop fixed in it; `kept` is the former by itself. By
    bounded module, `values_of` has what it makes and `unlimited` the bytes it keeps if nothing is dropped.
    """

    problem: Problem
    kept: frozenset[int]
    values_of: Mapping[BoundedModule, tuple[int, ...]]
    unlimited: Mapping[BoundedModule, int]

    def settled(self, choice: Choice) -> Choice:
        """A choice as one for the problem without module budgets: it names what they keep."""
        return replace(choice, decision=replace(choice.decision, kept=choice.decision.kept | self.kept))

    def reasons(self) -> dict[int, str]:
        """Why values are kept, by value: for those that a module budget keeps."""
        return {
            value: f"within the budget of '{module.name}' ({module.budget})"
            for module, values in self.values_of.items()
            for value in values
            if value in self.kept
        }

    def uses(self, choice: Choice) -> tuple[ModuleUse, ...]:
        """What each bounded module keeps under a choice, in the order of the forward."""
        if not self.values_of:
            return ()
        read = values_read(self.problem, choice.decision)
        return tuple(
            ModuleUse(
                module.name,
                str(module.budget),
                self.problem.num_bytes(read.intersection(values)),
                self.unlimited[module],
            )
            for module, values in self.values_of.items()
        )

    def held(self, choice: Choice) -> str:
        """What bounded modules keep, as the end of a sentence about a budget that cannot be kept."""
        uses = self.uses(choice)
        if not uses:
            return ""
        held_bytes = sum(use.kept_bytes for use in uses)
        return f", and {readable(held_bytes)} are kept because module budgets say so{describe_uses(uses)}"


def fix_modules(planner: Planner, budgets: Sequence[ModuleBudget], *, is_whole: bool = True) -> FixedModules:
    """Decide what bounded modules keep, given a planner for the problem without their budgets.

    Raises `WholestepError` for a name that is not there (unless the graph is not the whole program) and `BudgetError`
    for bytes that do not hold what cannot be computed again. `torch.utils.checkpoint` has been heard before: what a
    policy saves or a region drops is not decided here.
    """
    problem = planner.problem
    if not budgets:
        return FixedModules(problem, frozenset(), {}, {})
    governing = governed({op.module for op in problem.ops if not op.is_late}, budgets, is_whole=is_whole)
    reference = planner.cheapest.decision
    read = values_read(problem, reference)
    values_of = _values_by_module(problem, governing)
    owner = {value: module for module, values in values_of.items() for value in values}
    limited = {value: module for value, module in owner.items() if module.is_limited}
    standing = _standing(problem, limited)
    kept: set[int] = set()
    dropped: set[int] = set()
    for module, values in values_of.items():
        choices = [value for value in problem.choices if owner.get(value) == module]
        wanted = reference.kept.intersection(choices)
        if not module.is_limited:
            kept |= wanted
            continue
        held = standing.intersection(values)
        room = _room(module, problem, held, problem.num_bytes(read.intersection(values)))
        free = [value for value in choices if value not in held]
        chosen = wanted.difference(held)
        if problem.num_bytes(chosen) > room:
            chosen = _choose(problem, values, held, free, room)
        kept |= chosen | held.intersection(choices)
        dropped |= set(free) - chosen
    return FixedModules(
        replace(problem, must_keep=problem.must_keep | kept, must_drop=problem.must_drop | dropped),
        frozenset(kept),
        values_of,
        {module: problem.num_bytes(read.intersection(values)) for module, values in values_of.items()},
    )


def governed(
    names: Iterable[str], budgets: Sequence[ModuleBudget], *, is_whole: bool = True
) -> dict[str, BoundedModule]:
    """By name of a module with ops: the bounded module it belongs to, itself or one around it.

    The innermost one wins; of several keys for one module that with the most letters that are no wildcard. Raises
    `WholestepError` for a key that names no module, if `is_whole`.
    """
    paths = {name: _around(name) for name in names if name}
    known = sorted({around for path in paths.values() for around in path})
    owners: dict[str, ModuleBudget] = {}
    for item in sorted(budgets, key=lambda item: (len(_WILD.sub("", item.key)), len(item.key), item.key)):
        matching = [name for name in known if _matches(name, item.key)]
        if not matching:
            _refuse_unknown(item.key, known, is_whole)
        owners |= dict.fromkeys(matching, item)
    found: dict[str, BoundedModule] = {}
    for name, path in paths.items():
        innermost = next((around for around in reversed(path) if around in owners), None)
        if innermost is not None:
            found[name] = BoundedModule(innermost, owners[innermost].budget)
    return found


def _around(name: str) -> list[str]:
    """The modules a module is in, outermost first, and itself."""
    parts = name.split(".")
    return [".".join(parts[: length + 1]) for length in range(len(parts))]


def _matches(name: str, key: str) -> bool:
    """A wildcard stands for (part of) one component of a name, as in paths of files."""
    parts, patterns = name.split("."), key.split(".")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def _refuse_unknown(key: str, known: Sequence[str], is_whole: bool) -> None:
    """Raise, or only warn if the module may be in another graph."""
    near = difflib.get_close_matches(key, known, n=_NUM_NAMED, cutoff=0.5)
    near = near or [name for name in known if "." not in name][:_NUM_NAMED]
    names = ", ".join(f"'{name}'" for name in near)
    there = f"the closest names are {names}" if near else "nothing here runs in a module"
    if is_whole:
        raise WholestepError(f"memory_budget names a module '{key}', and nothing here runs in one; {there}")
    logger.warning("the memory budget of '%s' does nothing in this graph: %s", key, there)


def _values_by_module(problem: Problem, governing: Mapping[str, BoundedModule]) -> dict[BoundedModule, tuple[int, ...]]:
    found: dict[BoundedModule, list[int]] = defaultdict(list)
    for index in problem.forward_ops:
        op = problem.ops[index]
        if op.runs and op.module in governing:
            found[governing[op.module]] += op.makes
    return {module: tuple(values) for module, values in found.items()}


def _standing(problem: Problem, limited: Mapping[int, BoundedModule]) -> set[int]:
    """Values of limited modules that stay if they are needed: unrepeatable, saved by a policy, returned, or borders."""
    choices, asked = set(problem.choices), set(problem.asked_for())
    standing: set[int] = set()
    for op in problem.ops:
        module = None if op.is_late or not op.makes else limited.get(op.makes[0])
        is_asking = op.is_late or not asked.isdisjoint(op.makes)
        for value in op.reads:
            if value not in limited or value in problem.must_drop:
                continue
            is_border = module not in (None, limited[value]) and value in choices
            is_fixed = not problem.droppable[value] or value in problem.returned
            if is_border or (is_asking and is_fixed):
                standing.add(value)
    return standing


def _room(module: BoundedModule, problem: Problem, held: set[int], unlimited_bytes: int) -> int:
    """Bytes a module may keep beside what it holds in any case; a share never refuses, bytes are a promise."""
    held_bytes = problem.num_bytes(held)
    budget = module.budget
    if budget.num_bytes is None:
        assert budget.share is not None
        return max(0, int(budget.share * unlimited_bytes) - held_bytes)
    if held_bytes > budget.num_bytes:
        raise BudgetError(
            f"memory_budget={budget} of module '{module.name}' cannot be kept: {readable(held_bytes)} ({held_bytes} "
            f"bytes) of what it makes cannot be computed again or goes to another module with a budget",
            held_bytes,
        )
    return budget.num_bytes - held_bytes


def _choose(
    problem: Problem, values: Sequence[int], held: set[int], free: Sequence[int], room_bytes: int
) -> frozenset[int]:
    """Which of a module's free values to keep in so many bytes, for second runs that cost the least."""
    part, number, _ = problem.part(_ops_of_interest(problem, values))
    part = replace(part, must_keep=part.must_keep | {number[value] for value in held if value in number})
    mine = {number[value]: value for value in free if value in number}
    # What other modules make and drop is theirs to decide: here it is as good as kept.
    chosen = {mine[value] for value in best_within(part, frozenset(mine), room_bytes)}
    asked = {mine[value] for value in part.choices if value in mine}
    # Nobody needs these as things stand; they serve whoever drops what is made from them.
    others = [value for value in free if value not in asked]
    items = [Item(problem.values[v].num_bytes, problem.ops[problem.values[v].maker].cost) for v in others]
    chosen |= {others[index] for index in choose_items(items, room_bytes - problem.num_bytes(chosen), "greedy")}
    return frozenset(chosen)


def _ops_of_interest(problem: Problem, values: Sequence[int]) -> list[int]:
    """The ops that make values and those that ask for them: late ones, and whatever runs again in any case."""
    found = {problem.values[value].maker for value in values}
    stack = list(values)
    while stack:
        for reader in problem.readers[stack.pop()]:
            op = problem.ops[reader]
            if reader not in found and (op.is_late or reader in problem.forced):
                found.add(reader)
                stack += () if op.is_late else op.makes
    return sorted(found)


def best_within(part: Problem, free: frozenset[int], room_bytes: int) -> frozenset[int]:
    """Values of a problem to keep, of those that are free and in so many bytes, for second runs that cost the least."""
    return _Search(part, free, room_bytes).best()


class _Search:
    """Cuts at rising prices, and what is left of the room."""

    def __init__(self, part: Problem, free: frozenset[int], room_bytes: int) -> None:
        self.part = part
        self.room_bytes = room_bytes
        self.simulator = Simulator(part)
        self.free = [value for value in part.choices if value in free]
        self._units = _UNITS / max(part.forward_cost, 1e-9)

    def best(self) -> frozenset[int]:
        chosen = frozenset[int]()
        least = self._cost(chosen)
        sizes = [size for value in self.free if (size := self.part.values[value].num_bytes)]
        if not sizes or not self.room_bytes:
            return chosen
        low, high = 0.0, _UNITS / min(sizes)
        for _ in range(_NUM_PRICES):
            # Prices that matter may lie many orders of magnitude below the one at which nothing is kept.
            price = (low * high) ** 0.5 if low else high / 64
            kept = self._cut(price)
            if self.part.num_bytes(kept) > self.room_bytes:
                low = price
                continue
            high = price
            if (cost := self._cost(kept)) < least:
                chosen, least = kept, cost
        return self._polished(chosen, least)

    def _cost(self, kept: frozenset[int]) -> float:
        return self.simulator.outcome(Decision(kept)).cost

    def _cut(self, price: float) -> frozenset[int]:
        """The least of bytes at a price and costs of second runs."""
        part, count = self.part, len(self.part.values)

        def weight(value: int) -> int:
            item = part.values[value]
            tilted = item.num_bytes * (1 + _TILT * (count - value) / count)
            return min(2 * _UNITS, round(price * tilted + item.keep_cost * self._units))

        kept = min_cut(part, lambda _: True, weight, price=lambda op: round(part.ops[op].cost * self._units))
        return kept.intersection(self.free)

    def _polished(self, chosen: frozenset[int], least: float) -> frozenset[int]:
        """Add what saves something by itself, the dearest per byte first; a bounded number of tries."""
        part = self.part

        def worth(value: int) -> float:
            item = part.values[value]
            return part.ops[item.maker].cost / max(1, item.num_bytes)

        left = sorted((value for value in self.free if value not in chosen), key=lambda value: (-worth(value), value))
        for value in left[: _POLISH_WORK // len(part.ops)]:
            tried = chosen | {value}
            if part.num_bytes(tried) <= self.room_bytes and (cost := self._cost(tried)) < least:
                chosen, least = tried, cost
        return chosen


def name_modules(nodes: Iterable[fx.Node]) -> None:
    """Give the nodes of a joint graph the names of their modules, as `fqn`, from what `torch.compile` noted.

    Names are those of the model (`blocks.0.norm`); where several models run, their variable comes first
    (`encoder.blocks.0`).
    """
    paths: dict[fx.Node, tuple[str, str]] = {}
    for node in nodes:
        stack = node.meta.get("nn_module_stack")
        if stack:
            root, _, name = list(stack.values())[-1][0].partition(".")
            paths[node] = ".".join(re.findall(r"\w+", root)[1:]), name
    has_several = len({root for root, _ in paths.values()}) > 1
    for node, (root, name) in paths.items():
        node.meta["fqn"] = f"{root}.{name}".rstrip(".") if has_several else name
