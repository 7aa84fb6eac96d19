"""What a report says about a pipeline: its stages, and when each rank does what, as planned and as measured."""

from __future__ import annotations

import torch

from wholestep._version import __version__
from wholestep.pipe import SplitPlan, Timeline, simulate
from wholestep.report.document import Bar, Card, Cell, Figure, Prose, Report, Section, Table
from wholestep.report.scene import page_svg
from wholestep.report.schedule_picture import schedule_scene, schedule_text
from wholestep.report.summary import format_bytes, format_seconds, format_share
from wholestep.runtime.pipeline import Pipe


def pipe_report(pipe: Pipe) -> Report:
    """The report about the last step of a pipeline; to be called by all ranks of the job."""
    measured = pipe.measured()
    planned = simulate(pipe.schedule, measured.costs(), unit=measured.unit)
    schedule = pipe.schedule
    return Report(
        title=f"Pipeline of a {type(pipe.model).__name__}",
        subtitle=f"wholestep {__version__}, torch {torch.__version__}",
        cards=(
            Card("Stages", str(schedule.num_stages), f"on {schedule.num_ranks} ranks"),
            Card("Schedule", schedule.name, f"{schedule.num_micro_batches} micro-batches"),
            Card("Step", _time(measured.makespan), f"{_time(planned.makespan)} if messages took no time"),
            Card("Idle", f"{measured.bubble:.1%}", f"{planned.bubble:.1%} planned"),
        ),
        sections=(_schedule_section(planned, measured), _rank_section(planned, measured), _stage_section(pipe.plan)),
    )


def explain_pipe(pipe: Pipe) -> str:
    """The report as text, with the schedule drawn in letters; to be called by all ranks of the job."""
    return f"{pipe_report(pipe).to_text()}\n{schedule_text(pipe.measured())}"


def _schedule_section(planned: Timeline, measured: Timeline) -> Section:
    text = (
        "Planned is the schedule with actions as long as the measured ones are in the middle, and messages that take "
        "no time; what is measured beyond it is waiting for messages and for ranks that were late."
    )
    figure = Figure(page_svg(schedule_scene(planned, measured)), "Boxes are actions with their micro-batch")
    return Section("Schedule", (Prose(text), figure))


def _rank_section(planned: Timeline, measured: Timeline) -> Section:
    rows: list[tuple[Cell, ...]] = [
        (
            f"rank {rank}",
            _time(measured.busy(rank)),
            Bar(f"{measured.rank_bubble(rank):.1%}", measured.rank_bubble(rank)),
            f"{planned.rank_bubble(rank):.1%}",
            _time(measured.gaps(rank)),
            _time(planned.gaps(rank)),
        )
        for rank in range(measured.num_ranks)
    ]
    columns = ("", "computes", "idle", "idle as planned", "gaps", "gaps as planned")
    caption = "Gaps are idle time between the first and the last action of a rank."
    return Section("Ranks", (Table(columns, tuple(rows), caption=caption),))


def _stage_section(plan: SplitPlan) -> Section:
    whole = sum(stage.forward_us + stage.backward_us for stage in plan.stages)
    rows: list[tuple[Cell, ...]] = []
    for number, stage in enumerate(plan.stages):
        work = stage.forward_us + stage.backward_us
        rows.append(
            (
                f"{number}: {stage.where}",
                Bar(format_share(round(work), round(whole)), work / max(whole, 1e-9)),
                format_bytes(stage.parameter_bytes),
                format_bytes(stage.kept_bytes),
                format_bytes(stage.crossing_bytes),
                stage.reason,
            )
        )
    columns = ("stage, from", "share of the work", "parameters", "kept per micro-batch", "crosses its beginning", "why")
    caption = "Work is estimated from operations and bytes; crossing are values and their gradients."
    return Section("Stages", (Table(columns, tuple(rows), caption=caption, ends_in_text=True),))


def _time(ms: float) -> str:
    return format_seconds(ms / 1e3)
