"""Reports as plain text: aligned columns, no colour, fit for a terminal or a log."""

from __future__ import annotations

from collections.abc import Iterable

from wholestep.report.document import Prose, Report, Section, Table
from wholestep.report.sections import step_report
from wholestep.runtime import StepRunner

_INDENT = "  "


def explain_step(step: StepRunner) -> str:
    """A compiled step in one page of text; raises `GuardError` if it has not been called yet."""
    return render_text(step_report(step, pictures=False))


def render_text(report: Report) -> str:
    """A report's cards, prose and tables."""
    lines = [f"{report.title}  ({report.subtitle})", ""]
    width = max((len(card.label) for card in report.cards), default=0)
    for card in report.cards:
        note = f"  ({card.note})" if card.note else ""
        lines.append(f"{_INDENT}{card.label:<{width}}  {card.value}{note}")
    for section in report.sections:
        lines += _section_lines(section)
    return "\n".join(lines) + "\n"


def _section_lines(section: Section) -> list[str]:
    body: list[str] = []
    for block in section.blocks:
        if isinstance(block, Prose):
            body.append(_INDENT + block.text)
        elif isinstance(block, Table):
            body += [_INDENT + line for line in _table_lines(block)]
    return ["", section.title, *body] if body else []


def _table_lines(table: Table) -> list[str]:
    rows = [
        [str(cell) for cell in row] for row in (table.columns, *table.rows, *([table.total] if table.total else []))
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(table.columns))]
    return [*(_aligned(row, widths) for row in rows), *([table.caption] if table.caption else [])]


def _aligned(row: Iterable[str], widths: list[int]) -> str:
    """First column to the left, figures to the right."""
    first, *rest = (
        text.ljust(width) if index == 0 else text.rjust(width) for index, (text, width) in enumerate(zip(row, widths))
    )
    return "  ".join([first, *rest]).rstrip()
