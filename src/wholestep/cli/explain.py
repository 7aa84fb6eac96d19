"""`wholestep explain`: a train step of a file, or a plan that was saved, as a page of text."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from wholestep.api import CompiledStep
from wholestep.cli.options import (
    Prepared,
    add_dry_run_options,
    add_step_options,
    device_here,
    load,
    planned,
    with_options,
)
from wholestep.cli.plan_view import plan_report
from wholestep.cli.progress import working
from wholestep.cli.target import Target
from wholestep.compiler import Plan
from wholestep.compiler.plan_file import to_json
from wholestep.report.predictions import predicted_plan


def add_parser(commands: Any) -> None:
    """Make `explain` a command of the command line."""
    text = (
        "Run the train step of a file once, compiled, and print what it consists of; or capture it without weights; or "
        "print a plan that `wholestep plan --save` has written."
    )
    parser = commands.add_parser("explain", help="what a train step, or a saved plan, consists of", description=text)
    parser.add_argument(
        "target", type=_target, metavar="FILE.py:FUNCTION | plan.json", help="a function as for `plan`, or a saved plan"
    )
    add_step_options(parser)
    parser.add_argument("--no-weights", action="store_true", help="capture without weights, and run nothing")
    add_dry_run_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print what there is to know."""
    if isinstance(options.target, Path):
        plan = Plan.load(options.target)
        print(_json(plan) if options.json else plan_report(plan).to_text(), end="")
        return 0
    prepared = planned(options) if options.no_weights else first_step(options)
    if options.json:
        plan = predicted_plan(prepared.step, prepared.source, prepared.device, finds_smallest=False)
        print(_json(plan), end="")
    else:
        print(prepared.step.explain(), end="")
    return 0


def first_step(options: argparse.Namespace) -> Prepared:
    """The step of a user's file after its first call."""
    made = load(options.target)
    step = CompiledStep(made.eager, with_options(made.step.options, options))
    with working("capturing the step and running it once"):
        step(*made.args, **made.kwargs)
        step.flush()
    return Prepared(step, device_here(), str(options.target))


def _json(plan: Plan) -> str:
    return json.dumps(to_json(plan), indent=1) + "\n"


def _target(text: str) -> Target | Path:
    if not text.endswith(".json"):
        return Target.of(text)
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"there is no file '{text}'")
    return Path(text)
