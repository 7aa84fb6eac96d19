"""What a report says about the memory budget: the peak with and without it, what is kept and what runs again where.

The pictures of it are figures of the page and can be written as files.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from wholestep.errors import WholestepError
from wholestep.remat import MemoryStudy, RematPlan
from wholestep.report.document import Cell, Figure, Prose, Section, Table
from wholestep.report.memory_pictures import plan_pictures
from wholestep.report.png import check_matplotlib
from wholestep.report.scene import check_format, page_svg, save_scene
from wholestep.report.summary import format_bytes
from wholestep.runtime import StepRunner

_MAX_MODULES = 60


def memory_sections(step: StepRunner, *, pictures: bool) -> tuple[Section, ...]:
    """The memory plan, if there is one. Pictures show other plans, too, and those have to be made first."""
    plan = step.plan.memory
    if plan is None:
        return ()
    study = step.memory_study if pictures else None
    figures = () if study is None else (*_figures(study), *_on_top(plan, study))
    return (
        Section("Memory budget", (Prose(f"{str(plan)[0].upper()}{str(plan)[1:]}."), *figures, _module_table(plan))),
    )


def write_memory_pictures(step: StepRunner, folder: Path, format: str) -> tuple[Path, ...]:
    """Write the pictures of a step's memory plan into a folder; raises `WholestepError` if there is no plan."""
    check_format(format)
    if format == "png":
        check_matplotlib()  # before other plans are made for nothing
    study = step.memory_study
    if study is None:
        raise WholestepError(
            "there is no memory plan to draw: compile the step with a memory_budget (1.0 drops nothing)"
        )
    return tuple(save_scene(scene, folder / f"{name}.{format}") for name, scene in plan_pictures(study).items())


def _figures(study: MemoryStudy) -> tuple[Figure, ...]:
    scenes = plan_pictures(study).values()
    return tuple(Figure(page_svg(scene), f"{scene.title}. {scene.description}") for scene in scenes)


def _on_top(plan: RematPlan, study: MemoryStudy) -> tuple[Prose, ...]:
    """What the graph that runs needs beyond what was planned."""
    extra_bytes = plan.peak_bytes - study.plan.peak_bytes
    if extra_bytes <= 0:
        return ()
    text = f"Gradient buckets and pending updates come on top of what is drawn: {format_bytes(extra_bytes)}."
    return (Prose(text),)


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
