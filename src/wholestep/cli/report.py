"""`wholestep report`: the HTML report about a train step of a file."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from wholestep._output import require_writable
from wholestep.cli.explain import first_step
from wholestep.cli.options import add_dry_run_options, add_step_options, add_target, planned
from wholestep.cli.progress import working


def add_parser(commands: Any) -> None:
    """Make `report` a command of the command line."""
    text = "Run the train step of a file once, compiled, or capture it without weights, and write a report about it."
    parser = commands.add_parser("report", help="write a report about a train step", description=text)
    add_target(parser)
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("report.html"), help="where it goes (default %(default)s)"
    )
    add_step_options(parser)
    parser.add_argument("--no-weights", action="store_true", help="capture without weights, and run nothing")
    add_dry_run_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Write the report and say where it is."""
    require_writable(options.output)
    prepared = planned(options) if options.no_weights else first_step(options)
    with working("writing the report"):
        path = prepared.step.report(options.output)
    print(json.dumps({"report": str(path)}) if options.json else f"report: {path}")
    return 0
