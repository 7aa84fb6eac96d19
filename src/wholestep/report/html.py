"""Reports as one HTML file: style and drawings inside, nothing loaded from anywhere."""

from __future__ import annotations

from pathlib import Path

import jinja2

from wholestep.report.document import Block, Report
from wholestep.report.sections import step_report
from wholestep.report.template import PAGE, STYLE
from wholestep.runtime import StepRunner

_ENVIRONMENT = jinja2.Environment(
    autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined, keep_trailing_newline=True
)
_ENVIRONMENT.tests["bar"] = lambda cell: not isinstance(cell, str)


def write_step_report(step: StepRunner, path: Path) -> Path:
    """Write the report about a compiled step and return its path; raises `GuardError` if it has not been called yet."""
    return step_report(step).write(path)


def render_html(report: Report) -> str:
    """A report as a complete page."""
    page = _ENVIRONMENT.from_string(PAGE)
    return page.render(report=report, style=STYLE, kind=_kind)


def _kind(block: Block) -> str:
    return type(block).__name__
