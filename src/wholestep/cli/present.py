"""What a comparison shows: a table in the terminal, the same on top of the report, and JSON."""

from __future__ import annotations

import dataclasses
import json
import sys
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table as TerminalTable

from wholestep.cli.comparison import Comparison, Side
from wholestep.comm.plan import BucketPlan, DataParallelPlan
from wholestep.report import Figure, Prose, Section, Table, step_report
from wholestep.report.charts import Series, line_chart
from wholestep.report.summary import format_bytes, format_seconds

_MAX_REASONS = 3
_PIPED_WIDTH = 110


def write_report(comparison: Comparison, path: Path) -> Path:
    """The report about the compiled step, with the comparison on top."""
    losses = [Series(name, tuple(side.losses)) for name, side in comparison.sides.items()]
    chart = line_chart(losses, title="Training loss", x_label="step")
    notes = [Prose(note) for note in _notes(comparison)]
    return (
        step_report(comparison.main.compiled)
        .before(
            Section(
                "Compared with eager",
                (Prose(_verdict(comparison)), Table(_columns(comparison), _rows(comparison)), *notes),
            ),
            *_other_plans(comparison),
            Section("Loss", (Figure(chart, "A character GPT on the text of Python's own help pages"),)),
        )
        .write(path)
    )


def print_result(comparison: Comparison, path: Path, seconds: float, *, as_json: bool) -> None:
    """To stdout."""
    if as_json:
        print(json.dumps(_as_dict(comparison, path, seconds), indent=2))
        return
    where = f" on {comparison.num_ranks} ranks" if comparison.num_ranks > 1 else ""
    num_steps, num_ops = len(comparison.eager.losses), comparison.main.compiled.graph.num_ops
    table = TerminalTable(title=f"GPT{where}, {num_steps} steps, {num_ops} ops in one graph")
    for index, name in enumerate(_columns(comparison)):
        table.add_column(name, justify="left" if index == 0 else "right")
    for row in _rows(comparison):
        table.add_row(*row)
    console = Console(file=sys.stdout, highlight=False)
    if not console.is_terminal:
        console.width = _PIPED_WIDTH
    console.print(table)
    for name, reasons in _reasons(comparison).items():
        _print_wrapped(console, f"plan of {name}:")
        for reason in reasons:
            _print_wrapped(console, reason, indent="  ")
    for note in _notes(comparison):
        _print_wrapped(console, note)
    _print_wrapped(console, _verdict(comparison))
    console.print(f"report: {path} ({seconds:.0f} s in all)", markup=False, soft_wrap=True)


def _print_wrapped(console: Console, text: str, indent: str = "") -> None:
    behind = indent * 2
    lines = textwrap.fill(text, console.width, initial_indent=indent, subsequent_indent=behind, break_long_words=False)
    console.print(lines, markup=False, soft_wrap=True)


def _verdict(comparison: Comparison) -> str:
    if not comparison.agrees:
        return "LOSSES DIFFER: this is a bug, please report it."
    if all(gap.loss == gap.parameters == 0 for gap in comparison.differences.values()):
        return "Losses at every step and parameters at the end are equal, bit for bit."
    return "Losses agree."


def _columns(comparison: Comparison) -> tuple[str, ...]:
    return "", *comparison.sides


def _rows(comparison: Comparison) -> tuple[tuple[str, ...], ...]:
    def of_all(label: str, show: Callable[[Side], str]) -> tuple[str, ...]:
        return label, *map(show, comparison.sides.values())

    def of_compiled(label: str, show: Callable[[Side], str]) -> tuple[str, ...]:
        return label, "", *map(show, comparison.compiled.values())

    def of_plan(label: str, show: Callable[[DataParallelPlan], str]) -> tuple[str, ...]:
        return of_compiled(label, lambda side: show(_plan_of(side)))

    gaps = comparison.differences.values()
    return (
        of_all("final loss", lambda side: f"{side.losses[-1]:.6f}"),
        ("largest loss difference", "", *(_difference(gap.loss) for gap in gaps)),
        ("largest parameter difference", "", *(_difference(gap.parameters) for gap in gaps)),
        of_all("median step", lambda side: format_seconds(side.median_seconds)),
        of_all("first step, with capture", lambda side: format_seconds(side.seconds[0])),
        of_compiled("captures", lambda side: str(side.compiled.num_captures)),
        of_all("peak memory, measured", lambda side: format_bytes(side.peak_bytes)),
        of_compiled("peak memory, predicted", lambda side: format_bytes(side.predicted_peak_bytes)),
        *(of_plan(label, show) for label, show in _plan_rows(comparison)),
    )


def _plan_rows(comparison: Comparison) -> Iterable[tuple[str, Callable[[DataParallelPlan], str]]]:
    """Rows about how gradients travel, if they do."""
    if comparison.num_ranks == 1:
        return ()
    return (
        ("link of the plan", lambda plan: plan.link),
        ("buckets (crossing border)", lambda plan: f"{len(plan.buckets)} ({len(plan.moved)})"),
        ("compute, predicted", lambda plan: format_seconds(plan.compute_us / 1e6)),
        ("communication, predicted", lambda plan: format_seconds(plan.travel_us / 1e6)),
        ("of it exposed", lambda plan: format_seconds(plan.exposed_us / 1e6)),
        ("step, predicted", lambda plan: format_seconds(plan.predicted_us / 1e6)),
        ("step if nothing moved, predicted", lambda plan: format_seconds(plan.unmoved_us / 1e6)),
    )


def _plan_of(side: Side) -> DataParallelPlan:
    plan = side.compiled.plan.communication
    assert plan is not None
    return plan


def _difference(value: float) -> str:
    return "0 (bit for bit)" if value == 0 else f"{value:.3g}"


def _notes(comparison: Comparison) -> list[str]:
    """What one has to know to read the table."""
    if comparison.num_ranks == 1:
        return []
    slow = _plan_of(list(comparison.compiled.values())[-1]).link
    return [
        f"All three see the same batches and dropout masks, other ones on each of the {comparison.num_ranks} ranks. "
        "Differences are the largest on any rank; all other figures are of rank 0, DDP's peak without its own buckets.",
        f"The last column is planned as if the link were {slow}, where communication takes about as long as compute "
        "(forward and backward); it runs on the loopback like the others. Exposed is what the step waits for gradients "
        "before it can apply them.",
        "The step has no clip_grad_norm_: a global norm needs all gradients before the first update, so that no update "
        "could cross the border to the next iteration.",
    ]


def _reasons(comparison: Comparison) -> dict[str, list[str]]:
    """Some reasons of each plan: of buckets that move, or else of the last ones."""
    found: dict[str, list[str]] = {}
    if comparison.num_ranks == 1:
        return found
    for name, side in comparison.compiled.items():
        buckets = _plan_of(side).buckets
        order = sorted(range(len(buckets)), key=lambda index: (buckets[index].moved, index))
        shown = sorted(order[-_MAX_REASONS:])
        found[name] = [f"bucket {index}: {_described(buckets[index])}" for index in shown]
        if len(shown) < len(buckets):
            found[name].append(f"{len(buckets) - len(shown)} more in the report")
    return found


def _described(bucket: BucketPlan) -> str:
    first, *others = bucket.keys
    more = f" and {len(others)} more" if others else ""
    return f"{first}{more} ({format_bytes(bucket.num_bytes)}) {bucket.reason}"


def _other_plans(comparison: Comparison) -> list[Section]:
    """Plans of compiled steps that have no report of their own."""
    sections: list[Section] = []
    for name, side in list(comparison.compiled.items())[1:]:
        rows = [
            (f"{index}: {bucket.keys[0]}", str(len(bucket.keys)), format_bytes(bucket.num_bytes), bucket.reason)
            for index, bucket in enumerate(_plan_of(side).buckets)
        ]
        table = Table(("bucket", "gradients", "bytes", "its update"), tuple(rows))
        sections.append(Section(f"Plan of {name}", (table,)))
    return sections


def _as_dict(comparison: Comparison, path: Path, seconds: float) -> dict[str, Any]:
    keys = ("eager", "wholestep", "wholestep_slow_link")
    main, difference = comparison.main, next(iter(comparison.differences.values()))
    return {
        "agrees": comparison.agrees,
        "num_ranks": comparison.num_ranks,
        "num_steps": len(main.losses),
        "max_loss_difference": difference.loss,
        "max_parameter_difference": difference.parameters,
        "num_captures": main.compiled.num_captures,
        "capture_s": main.compiled.captured.seconds,
        "num_ops": main.compiled.graph.num_ops,
        "predicted_peak_bytes": main.predicted_peak_bytes,
        **{key: _side_dict(comparison, name) for key, name in zip(keys, comparison.sides)},
        "report": str(path),
        "total_s": seconds,
    }


def _side_dict(comparison: Comparison, name: str) -> dict[str, Any]:
    side = comparison.sides[name]
    values: dict[str, Any] = {
        "final_loss": side.losses[-1],
        "losses": side.losses,
        "median_step_s": side.median_seconds,
        "first_step_s": side.seconds[0],
        "peak_bytes": side.peak_bytes,
    }
    if name not in comparison.differences:
        return values
    difference, plan = comparison.differences[name], side.compiled.plan.communication
    return values | {
        "max_loss_difference": difference.loss,
        "max_parameter_difference": difference.parameters,
        "num_captures": side.compiled.num_captures,
        "predicted_peak_bytes": side.predicted_peak_bytes,
        "plan": None if plan is None else {**dataclasses.asdict(plan), "moved": plan.moved},
    }
