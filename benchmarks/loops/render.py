"""The verdicts that are kept, and the page that shows them."""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

from benchmarks.loops import Loop
from benchmarks.loops.trial import Outcome

KEPT = Path(__file__).with_name("verdicts.json")
PAGE = Path(__file__).parents[2] / "docs" / "loops.md"

HEAD = """\
# Training loops as they are published

Steps of public training scripts, retyped with tiny models and compiled without a change to them: what makes them
hard (meters, prints, `.item()`, branches on counters, draws from Python) is still there. Each is trained twice from one
seed, eagerly and with `wholestep.compile`, and everything is compared after every call: what the step returned and
printed, parameters, gradients, buffers, optimizer state, generators, the script's own objects.

- *bitwise*: no bit differed. *close*: within {tolerance:g} of the largest element; the largest difference is given.
- *refused*: a `CaptureError` names the line; below is the smallest edit that works, which was tried.
- *captures* are graphs that were needed, of so many calls; *eager* are calls that left the graph and ran as they are.
- † held back: nobody looked at these while the compiler was changed.

Written by `python -m benchmarks.loops.run`.
"""


COLUMNS = ("| loop | kind | after | verdict | captures | eager |", "|---|---|---|---|---|---|")


def load() -> dict[str, Outcome]:
    """The verdicts of the last runs, by the name of the loop."""
    if not KEPT.exists():
        return {}
    return {name: Outcome(**fields) for name, fields in json.loads(KEPT.read_text()).items()}


def save(loops: Mapping[str, Loop], outcomes: Mapping[str, Outcome]) -> None:
    """Keep the verdicts of the loops that exist, and write the page."""
    kept = {name: outcomes[name] for name in loops if name in outcomes}
    fields = {name: _plain(outcome) for name, outcome in sorted(kept.items())}
    KEPT.write_text(json.dumps(fields, indent=1, ensure_ascii=False) + "\n")
    PAGE.write_text(page(loops, kept))


def _plain(outcome: Outcome) -> dict[str, object]:
    fields = {field.name: field.default for field in dataclasses.fields(outcome)}
    return {name: value for name, value in dataclasses.asdict(outcome).items() if value != fields[name]}


def page(loops: Mapping[str, Loop], outcomes: Mapping[str, Outcome]) -> str:
    """The page: totals, one row for each loop, the refusals with their edits."""
    from benchmarks.loops.trial import TOLERANCE

    outcomes = {name: outcomes[name] for name in loops if name in outcomes}
    rows = [_row(loops[name], outcome) for name, outcome in outcomes.items()]
    refused = [_refusal(name, outcome) for name, outcome in outcomes.items() if not outcome.runs]
    parts = [HEAD.format(tolerance=TOLERANCE), _totals(loops, outcomes)]
    parts.append("\n".join([*COLUMNS, *rows]))
    if refused:
        parts.append("## Not run, and the edit that works\n\n" + "\n".join(refused))
    return "\n".join(part.rstrip("\n") + "\n" for part in parts)


def _totals(loops: Mapping[str, Loop], outcomes: Mapping[str, Outcome]) -> str:
    verdicts = collections.Counter(outcome.verdict for outcome in outcomes.values())
    kinds = {loops[name].kind for name in outcomes}
    share = sum(outcome.runs for outcome in outcomes.values()) / max(len(outcomes), 1)
    counts = ", ".join(f"{count} {verdict}" for verdict, count in sorted(verdicts.items()))
    return f"**{len(outcomes)} loops of {len(kinds)} kinds: {counts}. {share:.0%} run.**\n"


def _row(loop: Loop, outcome: Outcome) -> str:
    mark = " †" if loop.is_held_back else ""
    verdict = f"close ({outcome.detail})" if outcome.verdict == "close" else outcome.verdict
    captures = f"{outcome.captures} of {outcome.calls}" if outcome.runs else ""
    eager = str(outcome.eager_calls or "") if outcome.runs else ""
    return f"| {loop.name}{mark} | {loop.kind} | {loop.source} | {verdict} | {captures} | {eager} |"


def _refusal(name: str, outcome: Outcome) -> str:
    at = f" at `{outcome.line}`" if outcome.line else ""
    edit = f" Edit: {outcome.edit} — {outcome.edited}." if outcome.edit else ""
    return f"- **{name}**, {outcome.verdict}{at}: {outcome.detail.rstrip('.')}.{edit}"
