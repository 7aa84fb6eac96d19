"""Errors that are there only because the step is traced: a step that catches one would go on otherwise than eager."""

from __future__ import annotations

import pytest
from tests.unit.capture.test_stale_reads import outcome_of
from tests.unit.capture.test_unseen import Case

LOOK = "if loss > 0.1: loss = loss * 2.0"
OURS = {
    "a value": f"try:\n    {LOOK}\nexcept Exception:\n    loss = loss * 3.0",
    "a bare except": f"try:\n    {LOOK}\nexcept:\n    loss = loss * 3.0",
    "suppressed": f"with contextlib.suppress(Exception):\n    {LOOK}",
    "a manager of one's own": f"with quiet():\n    {LOOK}",
    "a return in finally": "loss = looking(loss)",
    "turned into another": f"try:\n    {LOOK}\nexcept Exception as e:\n    raise ValueError('too large') from e",
    "a file": "try:\n    text = open(__file__).read()\nexcept Exception:\n    loss = loss * 3.0",
    "in a function": "loss = tried(lambda: loss * 2.0 if loss > 0.1 else loss)",
    "an operator": "try:\n    torch.cat([x, torch.zeros(9)])\nexcept RuntimeError as e:\n    loss = loss * len(str(e))",
}
DEFS = """
import contextlib
@contextlib.contextmanager
def quiet():
    try:
        yield
    except Exception:
        pass
def tried(make):
    try:
        return make()
    except Exception:
        return 0.0
def looking(loss):
    try:
        if loss > 0.1:
            loss = loss * 2.0
    finally:
        return loss
"""


@pytest.mark.parametrize("lines", OURS.values(), ids=OURS)
def test_a_step_that_catches_a_refusal_is_refused(lines: str) -> None:
    refusal = "the step goes on after an error of torch" if "cat" in lines else "world.py"
    outcome_of(Case("caught", DEFS, loss=lines, refused=refusal))


def test_errors_of_the_user_may_be_caught() -> None:
    lines = "try:\n    loss = loss * T['b']\nexcept KeyError:\n    loss = loss * 3.0\n"
    lines += "loss = loss * tried(lambda: T['a'] + 1)"
    outcome = outcome_of(Case("own", f"{DEFS}T = {{'a': 1.0}}\n", loss=lines, changes=("T['b'] = 2.0", "del T['a']")))
    assert outcome.captures == 3
