"""`wholestep plan`: what a training step will need, before there are weights, GPUs or ranks."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from wholestep._output import require_writable
from wholestep.cli.options import add_dry_run_options, add_step_options, add_target, planned
from wholestep.cli.plan_view import plan_report
from wholestep.cli.progress import say, working
from wholestep.compiler import Plan
from wholestep.compiler.plan_file import to_json
from wholestep.remat import StepBudget
from wholestep.report.predictions import predicted_plan
from wholestep.report.summary import format_bytes


def add_parser(commands: Any) -> None:
    """Make `plan` a command of the command line."""
    text = (
        "Capture the train step of a file without allocating its weights, plan it for a memory budget, a device and "
        "ranks that need not be there, and print what it will take. Exit code 1 if the budget cannot be kept."
    )
    parser = commands.add_parser("plan", help="plan a train step without weights or ranks", description=text)
    add_target(parser)
    add_step_options(parser)
    add_dry_run_options(parser)
    parser.add_argument(
        "--save",
        type=Path,
        metavar="plan.json",
        help="write the plan; wholestep.compile(plan=...) runs it",
    )
    parser.add_argument("--report", type=Path, metavar="report.html", help="write a report with pictures")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Plan and print."""
    require_writable(options.report)
    prepared = planned(options)
    with working("looking for the smallest peak"):
        plan = predicted_plan(prepared.step, prepared.source, prepared.device)
    if options.save is not None:
        say(f"plan: {plan.save(options.save)}")
    if options.report is not None:
        with working("planning other budgets for the report"):
            path = prepared.step.report(options.report)
        say(f"report: {path}")
    print(json.dumps(to_json(plan), indent=1) + "\n" if options.json else plan_report(plan).to_text(), end="")
    return _verdict(plan, prepared.step.options.memory_budget)


def _verdict(plan: Plan, budget: StepBudget | None) -> int:
    """0 if the step keeps its budget; buckets and updates that wait are not part of what is planned, and come extra."""
    limit = None if budget is None or budget.whole is None else budget.whole.num_bytes
    if limit is None or plan.memory is None or plan.memory.peak_bytes <= limit:
        return 0
    over = format_bytes(plan.memory.peak_bytes - limit)
    say(f"wholestep: with its gradient buckets the step needs {over} more than its budget; ask for that much less")
    return 1
