"""Every place that refuses a step: it says what to do, and some test provokes it.

What refusals say is read wherever one is provoked, in whatever test (`_refusals_can_be_read` in the conftest). What is
left to see here is that none is forgotten: sites are found by parsing, and some words of each must stand in a test.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.refusals import faults_of

from wholestep import CaptureError

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src" / "wholestep"
ROOMS = ("capture", "runtime")
OTHER_KINDS = ("pipeline", "checkpoint")
"""Rooms that raise errors of their own."""
MAKERS = ("CaptureError", "Raises", "refuse")

UNREACHED = {
    "the step computes with a number in a way that needs its value, and gets another one each time": "a number whose "
    "path changes from trace to trace: no program is known",
    "the step raises an error, because of a value that it has computed": "never told: eager runs, and raises",
    "the step runs": "functions made by C, out of the collector's sight",
    "a thread calls a": "after 600 s: a thread that waits for a capture so long",
    "looks at values while the step runs": "on several ranks: torch.linalg's checks",
    "uses instructions of Python that cannot be followed": "a version of Python whose instructions nobody has seen",
    "of a progress bar": "methods of tqdm that are neither its updates nor its texts",
    "a rewrite of the graph takes for granted that": "a pass of the user's own that asks for sizes",
    "which needs a fixed batch size": "caught: each size is captured apart, and a warning has its words",
    "was made without memory, so its batch size is taken as it is": "caught, as above",
    "the model, the optimizer or the batch was made inside no_weights(): such a step is for planning": "test_blank.py "
    "has it, in a pattern",
    "that a hook has set, or the other way round": "a hook on a tensor that is handed the twin of another one",
    "gives torch what NumPy's numbers from outside are in": "numbers of NumPy's are guards by then",
    "the step updates with the state of": "a wrapper that makes what the one inside would have made: it is seen to "
    "look at the state, and shown none",
    "the step exits": "never told: eager runs, and exits",
}
"""Words of refusals that no program can lead to, and why."""


class Site(NamedTuple):
    file: str
    line: int
    words: tuple[str, ...]
    has_advice: bool


def sites() -> Iterator[Site]:
    for room in ROOMS:
        for file in sorted((SRC / room).rglob("*.py")):
            if not set(OTHER_KINDS) & set(file.relative_to(SRC).parts):
                yield from sites_in(file.relative_to(SRC).as_posix(), file.read_text(encoding="utf-8"))


def sites_in(name: str, text: str) -> Iterator[Site]:
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        function = node.func
        called = function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
        if called not in MAKERS:
            continue
        constants = [part.value for part in ast.walk(node.args[0]) if isinstance(part, ast.Constant)]
        words = tuple(part.strip(" '(),:;") for part in constants if isinstance(part, str))
        has_advice = len(node.args) > 1 or any(keyword.arg == "advice" for keyword in node.keywords)
        yield Site(name, node.lineno, tuple(word for word in words if len(word) > 5), has_advice)


def test_every_refusal_says_what_to_do() -> None:
    unhelpful = [f"{site.file}:{site.line}" for site in sites() if not site.has_advice and "Raises" not in site.file]
    allowed = {"the step exits", "the step raises an error, because of a value that it has computed"}
    found = [site for site in sites() if not site.has_advice and not allowed & set(site.words)]
    assert not found, unhelpful


def test_every_refusal_is_provoked_by_a_test() -> None:
    folders = [ROOT / "tests" / name for name in ("unit", "property", "integrations", "distributed")]
    files = [file for folder in folders for file in folder.rglob("*.py") if file != Path(__file__)]
    # As an assertion has it: escaped for a pattern, over two lines.
    known = re.sub(r"\\|\"\s*r?f?\"", "", "\n".join(file.read_text(encoding="utf-8") for file in files))
    missing = [
        f"{site.file}:{site.line}: {site.words[0]}"
        for site in sites()
        if site.words and not any(word in UNREACHED or _is_mentioned(word, known) for word in site.words)
    ]
    assert not missing, "\n".join(missing)


def _is_mentioned(text: str, known: str) -> bool:
    """Whether a test has these words, or four of them in a row."""
    words = text.removeprefix("the step ").split(" ")
    parts = [" ".join(words[start : start + 4]) for start in range(max(len(words) - 3, 1))]
    return text in known or any(len(part) > 8 and part.strip(",:;") in known for part in parts)


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (CaptureError("the step does this", location="a.py:3"), "no advice"),
        (CaptureError("the step does this", advice="Do that"), "no line"),
        (CaptureError("the step does this. And that", location="a.py:3", advice="Do that"), "not one sentence"),
        (CaptureError("Eq(u0, 3) is not known", location="a.py:3", advice="Do that"), "words of what traces"),
        (CaptureError("no", location=f"{SRC / 'api.py'}:3", advice="Do that"), "none of the user's"),
    ],
)
def test_a_text_that_is_not_as_it_should_be_is_found(error: CaptureError, fault: str) -> None:
    assert any(fault in found for found in faults_of(error))


def test_a_text_that_is_as_it_should_be() -> None:
    assert faults_of(CaptureError("the step does this", location="a.py:3", advice="Do that")) == []
