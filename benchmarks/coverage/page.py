"""The tables as text, and where they stand in docs/coverage.md."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch

from benchmarks.coverage.cases import Kind, Outcome

PAGE = Path(__file__).parents[2] / "docs" / "coverage.md"
_ORDER = [*Kind]


def summary(outcomes: list[Outcome], apart: frozenset[str]) -> str:
    """Counts of families and of cases, those that were held back apart."""
    lines = ["| | " + " | ".join(_ORDER) + " |", "|---|" + "---|" * len(_ORDER)]
    parts = {
        "open": [one for one in outcomes if one.case.family not in apart],
        "held back": [one for one in outcomes if one.case.family in apart],
    }
    for part, ones in parts.items():
        families = Counter(families_of(ones).values())
        cases = Counter(one.kind for one in ones)
        lines.append(f"| {part}: families | " + " | ".join(str(families[kind]) for kind in _ORDER) + " |")
        lines.append(f"| {part}: cases | " + " | ".join(str(cases[kind]) for kind in _ORDER) + " |")
    return "\n".join(lines)


def families_of(outcomes: Iterable[Outcome]) -> dict[str, Kind]:
    """The worst kind of each family; one of which nothing can be compared is excluded."""
    worst: dict[str, Kind] = {}
    for one in outcomes:
        known = worst.get(one.case.family)
        if known is None or known is Kind.EXCLUDED:
            worst[one.case.family] = one.kind
        elif one.kind is not Kind.EXCLUDED:
            worst[one.case.family] = max(known, one.kind, key=_ORDER.index)
    return worst


def write(name: str, outcomes: list[Outcome], apart: frozenset[str], num_known: int) -> None:
    """Replace the part of the page between the marks of a table."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    version = torch.__version__.partition("+")[0]
    tried = "all cases" if len(outcomes) == num_known else f"{len(outcomes)} of {num_known} cases, drawn by a seed"
    body = "\n\n".join([f"torch {version}, {tried}.", summary(outcomes, apart), _others(outcomes)])
    PAGE.write_text(f"{before}{begin}\n\n{body}\n\n{end}{after}", encoding="utf-8")


def _others(outcomes: list[Outcome]) -> str:
    """All that is not bitwise: one line for each reason, with the cases that it keeps out."""
    reasons: dict[tuple[Kind, str], list[str]] = {}
    for one in outcomes:
        if one.kind is not Kind.BITWISE:
            reasons.setdefault((one.kind, told(one.detail)), []).append(one.case.name)
    lines = [
        f"- {kind}: {reason} ({len(names)}): {', '.join(sorted(names))}"
        for (kind, reason), names in sorted(reasons.items(), key=lambda item: (_ORDER.index(item[0][0]), item[0][1]))
    ]
    return "\n".join(lines) or "Nothing else."


def told(detail: str) -> str:
    """The first sentence of an outcome, without folders of this machine and numbers of lines."""
    first = " ".join(detail.split())[:300]
    first = re.sub(r"(/[^ :]+/)([^/ :]+):\d+", r"\2", first)
    return first.replace(os.path.expanduser("~"), "~")
