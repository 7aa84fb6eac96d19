"""What a compiler that fuses ops makes of a program: which values never reach memory, and what is left to pay for.

Inductor puts pointwise ops and the reductions behind them into one kernel. A pointwise result is not written if all who
read it are such ops and no kernel of another kind (a matrix product, attention) stands between. It is then computed in
the registers of its readers, from what it is made of. So the time of pointwise work is that of the bytes it moves:
reading what goes into a kernel, writing what comes out. A pointwise kernel writes its result where an argument of that
size was, if nobody needs that any more.

    cost of a second run      nothing for a fused value; bytes read and written otherwise, but for what a kernel of the
                              backward close by reads anyway; at least its flops
    cost of keeping           writing a value that would not have been written

A constant that is kept is an input instead of a number in the code, and enough inputs make Inductor write a value out
that it would have inlined (seen: the one-hot gradient of a loss, six gigabytes). So constants are never kept.

This is a model: Inductor decides on more grounds than these.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from wholestep import _torch
from wholestep.cost import DeviceModel, node_flops
from wholestep.graph import ops
from wholestep.remat.build import Program
from wholestep.remat.classes import ALSO_POINTWISE, REDUCTIONS
from wholestep.remat.problem import INPUT, Op, Problem, Value

_FUSING = ("pointwise", "reduction")
# So many products may stand between two kernels that become one: the two that take a gradient apart.
_CLOSE = 2


def fused(program: Program, device: DeviceModel) -> Problem:
    """The program's problem as a fusing compiler would run it on a device; values and ops keep their numbers."""
    problem = program.problem
    kinds = [_kind(node) for node in program.nodes]
    borders = _num_externs_before(kinds)
    values = [_fused_value(problem, value, kinds, borders, device) for value in range(len(problem.values))]
    through = replace(problem, values=tuple(values), must_drop=problem.must_drop | _constants(problem))
    passing = _late_kernels(through, kinds, borders)
    priced = [_priced(through, index, borders, passing, device) for index in range(len(through.ops))]
    return replace(
        through, ops=tuple(replace(op, in_place=kind == "pointwise") for op, kind in zip(priced, kinds, strict=True))
    )


def _constants(problem: Problem) -> frozenset[int]:
    """Values made from nothing: inside a kernel they are numbers, kept they would be one more thing to read."""
    return frozenset(
        value
        for op in problem.ops
        if not (op.is_late or op.reads or op.unrepeatable or op.is_random)
        for value in op.makes
    )


def _kind(node: fx.Node | None) -> str:
    if node is None or not ops.is_op(node):
        return "free"
    name = _torch.packet_name(node.target)
    if torch.Tag.pointwise in _torch.tags(node.target) or name in ALSO_POINTWISE:
        return "pointwise"
    return "reduction" if name in REDUCTIONS and not node_flops(node) else "extern"


def _num_externs_before(kinds: list[str]) -> list[int]:
    counts: list[int] = []
    count = 0
    for kind in kinds:
        counts.append(count)
        count += kind == "extern"
    return counts


def _fused_value(problem: Problem, value: int, kinds: list[str], borders: list[int], device: DeviceModel) -> Value:
    item = problem.values[value]
    if item.maker == INPUT or kinds[item.maker] != "pointwise" or value in problem.returned:
        return item
    readers = problem.readers[value]
    is_late = problem.ops[item.maker].is_late
    early = [reader for reader in readers if problem.ops[reader].is_late == is_late and problem.ops[reader].runs]
    late = [reader for reader in readers if problem.ops[reader].is_late]
    own = _is_near(item.maker, early, kinds, borders)
    again = (
        all(kinds[reader] in _FUSING for reader in readers)
        and (own or not problem.ops[item.maker].runs)
        and (not late or _is_near(late[0], late, kinds, borders))
    )
    return replace(item, fused_own=own, fused_again=again, keep_cost=_writing_us(item, device) if own else 0.0)


def _is_near(start: int, readers: list[int], kinds: list[str], borders: list[int]) -> bool:
    """Whether all readers can be in one kernel with (or right behind) the op at `start`."""
    return all(kinds[reader] in _FUSING for reader in readers) and (
        not readers or borders[readers[-1]] == borders[start]
    )


def _writing_us(value: Value, device: DeviceModel) -> float:
    return value.num_bytes / device.bytes_per_us


def _late_kernels(problem: Problem, kinds: list[str], borders: list[int]) -> dict[int, list[int]]:
    """By value: where late kernels that others fuse into read it, themselves or by way of what they compute again."""
    sources: dict[int, tuple[int, ...]] = {}
    kernels: dict[int, list[int]] = {}
    for index, op in enumerate(problem.ops):
        reads = tuple(dict.fromkeys(item for value in op.reads for item in sources.get(value, (value,))))
        if not op.is_late:
            sources |= {value: reads for value in op.makes if problem.values[value].fused_again}
        elif kinds[index] in _FUSING:
            for value in reads:
                kernels.setdefault(value, []).append(borders[index])
    return kernels


def _priced(problem: Problem, index: int, borders: list[int], kernels: dict[int, list[int]], device: DeviceModel) -> Op:
    """An op with the cost of a second run. What a late kernel close by reads anyway is there for nothing."""
    op = problem.ops[index]
    if op.is_late:
        return op
    if all(problem.values[value].fused_again for value in op.makes):
        return replace(op, cost=0.0)
    needed = [borders[reader] for value in op.makes for reader in problem.readers[value] if problem.ops[reader].is_late]
    at_hand = {
        value
        for value in problem.own_reads[index]
        if not op.flops and any(abs(kernel - place) <= _CLOSE for kernel in kernels.get(value, ()) for place in needed)
    }
    moved = problem.num_bytes(set(problem.own_reads[index]) - at_hand) + problem.num_bytes(op.makes)
    return replace(op, cost=max(op.flops / device.flops_per_us, moved / device.bytes_per_us))


def without_replay(problem: Problem) -> Problem:
    """The same with random ops that never run again: inside a kernel no state of a generator can be set."""
    drawn = {index for index, op in enumerate(problem.ops) if op.is_random and not op.is_late}
    ops = [replace(op, unrepeatable="it is random") if index in drawn else op for index, op in enumerate(problem.ops)]
    must_drop = frozenset(value for value in problem.must_drop if problem.values[value].maker not in drawn)
    return replace(problem, ops=tuple(ops), must_drop=must_drop)
