"""Try loops, show what becomes of them, and write docs/loops.md.

    python -m benchmarks.loops.run [--only NAME ...] [--kinds KIND ...] [--held-back] [--eager] [--show]

Loops that are held back run with `--held-back` only (all together, at the end). `--eager` compares eager with eager:
whether a loop is one at all. `--show` changes no file. Exit code 1 if a loop is wrong or fails.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from benchmarks.loops import Loop, all_loops
from benchmarks.loops.render import load, save
from benchmarks.loops.trial import Outcome, try_in_child


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for; the exit code."""
    options = _options(arguments)
    loops = all_loops()
    outcomes = load()
    chosen = [found for found in loops.values() if _is_chosen(found, options)]
    ends_well = True
    for number, chosen_loop in enumerate(chosen, start=1):
        outcome = try_in_child(chosen_loop, eager_only=options.eager)
        print(f"{number}/{len(chosen)} {chosen_loop.kind}: {chosen_loop.name}: {_text(outcome)}", flush=True)
        ends_well &= outcome.runs or outcome.verdict == "refused"
        outcomes[chosen_loop.name] = outcome
        if not options.eager and not options.show:
            save(loops, outcomes)
    return 0 if ends_well else 1


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loops.run", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these loops")
    parser.add_argument("--kinds", nargs="+", metavar="KIND", help="loops of these kinds")
    parser.add_argument("--held-back", action="store_true", help="also those that are held back")
    parser.add_argument("--eager", action="store_true", help="compare eager with eager, keep nothing")
    parser.add_argument("--show", action="store_true", help="keep nothing")
    return parser.parse_args(arguments)


def _is_chosen(found: Loop, options: argparse.Namespace) -> bool:
    if options.only is not None:
        return found.name in options.only
    if options.kinds is not None and found.kind not in options.kinds:
        return False
    return options.held_back or options.eager or not found.is_held_back


def _text(outcome: Outcome) -> str:
    counts = f"{outcome.captures} captures, {outcome.eager_calls} eager of {outcome.calls}"
    edit = f"\n    edit: {outcome.edit}: {outcome.edited}" if outcome.edit else ""
    line = f" [{outcome.line}]" if outcome.line else ""
    return f"{outcome.verdict}, {counts}{line} {outcome.detail}{edit}"


if __name__ == "__main__":
    sys.exit(main())
