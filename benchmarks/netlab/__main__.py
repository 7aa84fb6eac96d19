"""The command: `python -m benchmarks.netlab --ranks 2 --rate 1gbit -- COMMAND ...`."""

from __future__ import annotations

import argparse
import sys

from benchmarks.netlab.lab import Lab, LabError, exit_on_signals
from benchmarks.netlab.rate import Rate


def main(argv: list[str] | None = None) -> int:
    """Exit code: the command's own, or 2 if there is no lab."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.netlab",
        description="Run COMMAND once per rank, each in a network namespace, joined by rate-limited links. Sets what "
        "torchrun sets, and GLOO_SOCKET_IFNAME. Added latency is not possible (no netem).",
        epilog="Needs root on Linux with iproute2. Exit code: that of the first rank to fail; 2 if there is no lab.",
    )
    parser.add_argument("--ranks", type=int, default=2, help="how many ranks (default 2)")
    parser.add_argument("--rate", type=_rate, default="unlimited", help="1gbit, 500mbit, ... (default unlimited)")
    parser.add_argument("--pin", action="store_true", help="keep rank N on core N")
    parser.add_argument("--timeout-s", type=float, metavar="S", help="end the ranks after S seconds, exit code 124")
    parser.add_argument("command", nargs="+", metavar="COMMAND", help="what each rank runs, behind --")
    arguments = parser.parse_args(argv)
    exit_on_signals()
    try:
        with Lab(arguments.ranks, arguments.rate, pin=arguments.pin) as lab:
            return lab.run(arguments.command, timeout_s=arguments.timeout_s)
    except LabError as error:
        print(error, file=sys.stderr)
        return 2


def _rate(text: str) -> Rate:
    try:
        return Rate.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


if __name__ == "__main__":
    sys.exit(main())
