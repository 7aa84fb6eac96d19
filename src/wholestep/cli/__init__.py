"""The command line: `wholestep <command>`.

Exit codes: 0 fine, 1 a check failed or a plan is not feasible, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from wholestep._version import __version__
from wholestep.cli import bench, demo, explain, plan, report, simulate
from wholestep.errors import UsageError, WholestepError

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

_COMMANDS = (demo, plan, explain, report, simulate, bench)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    try:
        options = _parser().parse_args(argv)
    except SystemExit as request:
        # argparse leaves this way after --help (0) and after wrong usage (2).
        return request.code if isinstance(request.code, int) else EXIT_FAILED
    try:
        return options.run(options)
    except WholestepError as error:
        print(f"wholestep: {error}", file=sys.stderr)
        return EXIT_USAGE if isinstance(error, UsageError) else EXIT_FAILED
    except KeyboardInterrupt:
        print("wholestep: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="wholestep", description="Compile a whole PyTorch training step.")
    parser.add_argument("--version", action="version", version=f"wholestep {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in _COMMANDS:
        command.add_parser(commands)
    return parser
