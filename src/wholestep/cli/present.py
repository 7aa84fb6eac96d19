"""What a comparison shows: a table in the terminal, the same on top of the report, and JSON."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table as TerminalTable

from wholestep.cli.comparison import Comparison, Side
from wholestep.report import Figure, Prose, Section, Table, step_report
from wholestep.report.charts import Series, line_chart
from wholestep.report.summary import format_bytes, format_seconds

Plan = Any
_MAX_REASONS = 4
_PIPED_WIDTH = 110


def write_report(comparison: Comparison, path: Path) -> Path:
    """The report about the compiled step, with the comparison on top."""
    losses = [Series(name, tuple(side.losses)) for name, side in comparison.sides.items()]
    chart = line_chart(losses, title="Training loss", x_label="step")
    verdict = "The trainings agree." if comparison.agrees else "The losses differ: this is a bug, please report it."
    notes = [Prose(note) for note in _notes(comparison)]
    return (
        step_report(comparison.main.compiled)
        .before(
            Section("Compared with eager", (Prose(verdict), Table(_columns(comparison), _rows(comparison)), *notes)),
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
    table = TerminalTable(title=f"GPT{where}, {comparison.main.compiled.graph.num_ops} ops in one graph")
    for index, name in enumerate(_columns(comparison)):
        table.add_column(name, justify="left" if index == 0 else "right")
    for row in _rows(comparison):
        table.add_row(*row)
    console = Console(file=sys.stdout, soft_wrap=True, highlight=False)
    if not console.is_terminal:
        console.width = _PIPED_WIDTH
    console.print(table)
    for line in (*_plan_lines(comparison), *_notes(comparison)):
        console.print(line, markup=False)
    console.print("losses agree" if comparison.agrees else "LOSSES DIFFER: please report this", markup=False)
    console.print(f"report: {path} ({seconds:.0f} s in all)", markup=False)


def _columns(comparison: Comparison) -> tuple[str, ...]:
    return "", *comparison.sides


def _rows(comparison: Comparison) -> tuple[tuple[str, ...], ...]:
    def of_all(label: str, show: Callable[[Side], str]) -> tuple[str, ...]:
        return label, *map(show, comparison.sides.values())

    def of_compiled(label: str, show: Callable[[Side], str]) -> tuple[str, ...]:
        return label, "", *map(show, comparison.compiled.values())

    gaps = comparison.differences.values()
    num_steps = len(comparison.eager.losses)
    return (
        of_all("final loss", lambda side: f"{side.losses[-1]:.6f}"),
        (f"largest loss difference in {num_steps} steps", "", *(_difference(gap.loss) for gap in gaps)),
        ("largest parameter difference", "", *(_difference(gap.parameters) for gap in gaps)),
        of_all("median step", lambda side: format_seconds(side.median_seconds)),
        of_all("first step, with capture", lambda side: format_seconds(side.seconds[0])),
        of_compiled("captures", lambda side: str(side.compiled.num_captures)),
        of_all("peak memory, measured", lambda side: format_bytes(side.peak_bytes)),
        of_compiled("peak memory, predicted", lambda side: format_bytes(side.predicted_peak_bytes)),
        *(of_compiled(label, show) for label, show in _plan_rows(comparison)),
    )


def _plan_rows(comparison: Comparison) -> Iterable[tuple[str, Callable[[Side], str]]]:
    """Rows about how gradients travel, if they do."""
    if comparison.main.compiled.plan is None:
        return ()
    return (
        ("link", lambda side: _plan_of(side).link),
        ("buckets", lambda side: str(len(_plan_of(side).buckets))),
        ("updates that run in the next iteration", lambda side: str(len(_plan_of(side).moved))),
        ("communication, predicted", lambda side: format_seconds(_plan_of(side).travel_us / 1e6)),
        ("not hidden, predicted", lambda side: f"at most {format_seconds(_most_exposed_s(_plan_of(side)))}"),
    )
