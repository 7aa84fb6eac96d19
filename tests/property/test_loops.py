"""Public training loops: none is wrong, and docs/loops.md says what becomes of each."""

from __future__ import annotations

import pytest

from benchmarks.loops import all_loops
from benchmarks.loops.render import PAGE, load, page
from benchmarks.loops.trial import Outcome, try_in_child

LOOPS = all_loops()


def test_the_page_is_what_was_seen() -> None:
    assert page(LOOPS, load()) == PAGE.read_text()


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", LOOPS)
def test_loops(name: str) -> None:
    outcome, expected = try_in_child(LOOPS[name]), load().get(name, Outcome("not tried"))
    assert (outcome.verdict, outcome.edited) == (expected.verdict, expected.edited), outcome.detail
    assert outcome.captures <= expected.captures, "more captures than docs/loops.md says"
    assert outcome.runs or outcome.verdict == "refused", outcome.detail
