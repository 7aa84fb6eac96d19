"""What a report says about the memory budget: the peak with and without it, what is kept and what runs again where."""

from __future__ import annotations

from collections import defaultdict

from wholestep.remat import RematPlan
from wholestep.report.document import Cell, Prose, Section, Table
from wholestep.report.summary import format_bytes
from wholestep.runtime import StepRunner

_MAX_MODULES = 60


def memory_sections(step: StepRunner) -> tuple[Section, ...]:
    """The memory plan, if there is one."""
    plan = step.memory_plan
    if plan is None:
        return ()
    return (Section("Memory budget", (Prose(f"{str(plan)[0].upper()}{str(plan)[1:]}."), _module_table(plan))),)


def _module_table(plan: RematPlan) -> Table:
    """A row per module: bytes kept, ops that run again, their flops and bytes moved."""
    kept_bytes: dict[str, int] = defaultdict(int)
    runs: dict[str, int] = defaultdict(int)
    flops: dict[str, int] = defaultdict(int)
    moved: dict[str, int] = defaultdict(int)
    for value in plan.kept:
        kept_bytes[value.module] += value.num_bytes
    for op in plan.repeated:
        runs[op.module] += op.times
        flops[op.module] += op.times * op.flops
        moved[op.module] += op.times * op.moved_bytes
    modules = list(dict.fromkeys([*(value.module for value in plan.kept), *(op.module for op in plan.repeated)]))
    rows: list[tuple[Cell, ...]] = [
        (
            module or "(outside modules)",
            format_bytes(kept_bytes[module]),
            str(runs[module]),
            f"{flops[module]:,}",
            format_bytes(moved[module]),
        )
        for module in modules[:_MAX_MODULES]
    ]
    left_out = len(modules) - len(rows)
    return Table(
        ("module", "kept", "ops run again", "their flops", "bytes they move"),
        tuple(rows),
        caption=f"{left_out} more modules are not shown." if left_out > 0 else "",
    )
