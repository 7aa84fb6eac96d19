"""What can be captured, held against eager bit for bit: torch's optimizers, timm's, torch's operators and modules.

    python -m benchmarks.coverage [optimizers timm modules ops] [--only TEXT] [--part open|held-back|all] [--write]

Each table counts families (an optimizer, an operator, a module) by their worst case. A fifth of the families is held
back: what was found while this was made better came from the others. `--write` puts the tables into docs/coverage.md.
"""

from __future__ import annotations

import argparse
import gc
import math
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.coverage import modules, ops, optimizers, page, timm_optimizers
from benchmarks.coverage.cases import Case, Kind, Outcome, held_back, run

TABLES: dict[str, Callable[[], Iterator[Case]]] = {
    "optimizers": optimizers.cases,
    "timm": timm_optimizers.cases,
    "modules": modules.cases,
    "ops": ops.cases,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.coverage", description=__doc__)
    parser.add_argument("tables", nargs="*", default=[*TABLES], help="which tables (all)")
    parser.add_argument("--only", help="cases whose name contains this")
    parser.add_argument("--every", type=int, default=1, help="one in so many families, for a look")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after that time (a random sample)")
    parser.add_argument("--part", choices=["open", "held-back", "all"], default="all")
    parser.add_argument("--write", action="store_true", help="write docs/coverage.md (that table's part of it)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in options.tables:
        known = [*TABLES[name]()]
        apart = held_back(case.family for case in known)
        chosen = [case for case in known if _is_chosen(case, options, apart)]
        outcomes = _run(name, chosen, options.minutes)
        print(page.summary(outcomes, apart))
        if options.write:
            page.write(name, outcomes, apart, len(known))


def _is_chosen(case: Case, options: Any, apart: frozenset[str]) -> bool:
    if options.only and options.only not in case.name:
        return False
    if options.part != "all" and (case.family in apart) is not (options.part == "held-back"):
        return False
    return sum(case.family.encode()) % options.every == 0


def _run(table: str, cases: list[Case], minutes: float) -> list[Outcome]:
    outcomes: list[Outcome] = []
    end = time.monotonic() + 60 * minutes
    if math.isfinite(minutes):
        cases = sorted(cases, key=lambda case: zlib.crc32(case.family.encode()))
    for number, case in enumerate(cases, 1):
        if time.monotonic() > end:
            break
        print(f"\r{table} {number}/{len(cases)} {case.name[:60]:60}", end="", file=sys.stderr, flush=True)
        outcomes.append(run(case))
        if outcomes[-1].kind not in (Kind.BITWISE, Kind.EXCLUDED):
            print(f"\r{outcomes[-1].kind}: {case.name}: {outcomes[-1].detail[:700]}", flush=True)
        if number % 20 == 0:
            torch._dynamo.reset()
            gc.collect()
    print(file=sys.stderr)
    return outcomes


main()
