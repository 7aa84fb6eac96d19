"""Rules of thumb about second runs: ops that a minimum cut had better not repeat, each rule a switch of its own.

A minimum cut counts bytes. On its own it takes the second run of any cheap op for free, which it is only if a compiler
fuses it into a kernel that runs anyway. These rules name the cases where that is not so, or where it does not pay. In
all of them f and b are ops of the forward and of the backward, `→` reads, and an edge is *fusible* if both its ops are.

    not_in_allow_list         f is not known to be cheap                              (`_not_in_allow_list`)
    materialized_in_backward  f → b, not fusible: b has to find f's result in memory  (`_materialized_in_backward`)
    reductions                f makes little out of much: cheap to keep               (`_reductions`)
    used_far_apart            v → f with an op that depends on v and is not fusible
                              with it in between: v would be needed at two moments    (`_used_far_apart`)
    long_fusible_chains       f ends a path of too many fusible edges                 (`_long_fusible_chains`)

Matrix products, convolutions and attention are not the rules' business: solvers decide about those. Neither is what the
user has decided (checkpoints), nor what has to run in the backward anyway. Results are the same whatever the rules.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cached_property

from wholestep.errors import WholestepError
from wholestep.remat.build import Program
from wholestep.remat.classes import OpClass, classify
from wholestep.remat.problem import INPUT


@dataclass(frozen=True)
class BanRules:
    """Which rules about second runs hold; `BanRules()` is all of them, `BanRules.none()` (aggressive) lifts them all.

    used_far_apart: an op that reads a value again, behind a kernel of another kind that depends on it, is not repeated.
    long_fusible_chains: of a chain of more than `max_chain` fusible ops, one is not repeated.
    materialized_in_backward: what a matrix product or the like reads in the backward is not repeated.
    not_in_allow_list: only pointwise ops, reductions, indexing and constants are repeated. Without the rule everything
        is but matrix products, convolutions and attention; random ops then draw the same numbers again.
    reductions: a reduction to a `min_reduction`-th of the bytes it reads, or less, is not repeated.
    """

    used_far_apart: bool = True
    long_fusible_chains: bool = True
    materialized_in_backward: bool = True
    not_in_allow_list: bool = True
    reductions: bool = True
    max_chain: int = 100
    min_reduction: float = 4.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(field.default, bool) and not isinstance(value, bool):
                raise WholestepError(f"{field.name} is a switch, True or False, not {value!r}")
        for name in ("max_chain", "min_reduction"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 1:
                raise WholestepError(f"{name} is a number, 1 or more, not {value!r}")

    @classmethod
    def none(cls) -> BanRules:
        """All rules lifted: whatever has no flops may run again."""
        return cls(
            used_far_apart=False,
            long_fusible_chains=False,
            materialized_in_backward=False,
            not_in_allow_list=False,
            reductions=False,
        )


def banned_ops(program: Program, rules: BanRules) -> dict[int, str]:
    """Ops of a program that must not run again, each with the first rule that says so and why: `rule: reason`."""
    return _Judge(program, rules).verdict()


class _Judge:
    """The rules, applied one after the other; the last one looks at what the others have banned."""

    def __init__(self, program: Program, rules: BanRules) -> None:
        self.problem, self.rules, self._program = program.problem, rules, program
        self._banned: dict[int, str] = {}

    def verdict(self) -> dict[int, str]:
        for rule in (
            self._not_in_allow_list,
            self._materialized_in_backward,
            self._reductions,
            self._used_far_apart,
            self._long_fusible_chains,
        ):
            name = rule.__name__.removeprefix("_")
            if not getattr(self.rules, name):
                continue
            for op, reason in rule():
                self._banned.setdefault(op, f"{name}: {reason}")
        return {op: self._banned[op] for op in sorted(self._banned)}

    @cached_property
    def _classes(self) -> list[OpClass]:
        return [OpClass() if node is None else classify(node) for node in self._program.nodes]

    @cached_property
    def _candidates(self) -> list[int]:
        """Ops that could run again and that nobody else decides about."""
        return [
            index
            for index in self.problem.forward_ops
            if index not in self.problem.forced
            and not self.problem.ops[index].unrepeatable
            and not self.problem.ops[index].flops
            and self.problem.ops[index].makes
        ]

    def _fuses(self, op: int, reader: int) -> bool:
        return self._classes[op].fusible and self._classes[reader].fusible

    def _runs_in_forward(self, op: int) -> bool:
        return self.problem.ops[op].runs and not self.problem.ops[op].is_late

    def _not_in_allow_list(self) -> Iterator[tuple[int, str]]:
        for op in self._candidates:
            if not self._classes[op].recomputable:
                yield op, f"{self.problem.ops[op].kind} is not on it"

    def _materialized_in_backward(self) -> Iterator[tuple[int, str]]:
        for op in self._candidates:
            for value in self.problem.ops[op].makes:
                for reader in self.problem.readers[value]:
                    if not self._runs_in_forward(reader) and not self._fuses(op, reader):
                        yield op, f"{self.problem.ops[reader].name} reads it from memory"

    def _reductions(self) -> Iterator[tuple[int, str]]:
        for op in self._candidates:
            read = self.problem.num_bytes(self.problem.ops[op].reads)
            made = self.problem.num_bytes(self.problem.ops[op].makes)
            if self._classes[op].reduction and read >= self.rules.min_reduction * made:
                yield op, f"{made} bytes made of {read}"

    def _used_far_apart(self) -> Iterator[tuple[int, str]]:
        candidates = set(self._candidates)
        for index, value in enumerate(self.problem.values):
            if value.maker == INPUT or not self._runs_in_forward(value.maker):
                continue
            readers = [op for op in self.problem.readers[index] if op in candidates and self._fuses(value.maker, op)]
            border = self._first_border(index, readers[-1]) if readers else None
            for reader in readers:
                if border is not None and reader > border:
                    yield reader, f"it reads {value.name} again behind {self.problem.ops[border].name}"

    def _first_border(self, value: int, last: int) -> int | None:
        """The first op before `last` that depends on a value and is not in one kernel with it, None if all are."""
        reached = {self.problem.values[value].maker}
        heap: list[tuple[int, bool]] = []
        self._push_readers(heap, value, last)
        while heap:
            op, is_fused = heapq.heappop(heap)
            if not is_fused:
                return op
            if op not in reached:
                reached.add(op)
                for made in self.problem.ops[op].makes:
                    self._push_readers(heap, made, last)
        return None

    def _push_readers(self, heap: list[tuple[int, bool]], value: int, last: int) -> None:
        maker = self.problem.values[value].maker
        for reader in self.problem.readers[value]:
            if reader < last and self._runs_in_forward(reader):
                heapq.heappush(heap, (reader, self._fuses(maker, reader)))

    def _long_fusible_chains(self) -> Iterator[tuple[int, str]]:
        candidates = set(self._candidates)
        lengths: dict[int, int] = {}
        for op in self.problem.forward_ops:
            if op in self._banned or not (self._classes[op].fusible and self._runs_in_forward(op)):
                continue
            makers = (self.problem.values[value].maker for value in self.problem.ops[op].reads)
            lengths[op] = 1 + max((lengths.get(maker, 0) for maker in makers), default=0)
            if lengths[op] > self.rules.max_chain and op in candidates:
                del lengths[op]
                yield op, f"it comes behind {self.rules.max_chain} fusible ops in a row"
