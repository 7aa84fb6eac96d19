"""Reports as one HTML file: style and drawings inside, nothing loaded from anywhere."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

import jinja2

from wholestep.report.document import Block, Browser, Report
from wholestep.report.sections import step_report
from wholestep.report.template import PAGE, SCRIPT, STYLE
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
    has_browser = any(isinstance(block, Browser) for section in report.sections for block in section.blocks)
    script = SCRIPT if has_browser else ""
    return page.render(report=report, style=STYLE, script=script, policy=_policy(script), kind=_kind)


def _policy(script: str) -> str:
    """What a page may do: be styled from within, and run this very script. It loads nothing and talks to nobody."""
    allowed = f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" if script else "'none'"
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src {allowed}; base-uri 'none'; form-action 'none'"


def _kind(block: Block) -> str:
    return type(block).__name__
