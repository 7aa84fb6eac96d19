"""One container that a step finds in several places, an argument among them, and writes to."""

from __future__ import annotations

import dataclasses

import pytest
from tests.unit.capture.test_stale_reads import outcome_of
from tests.unit.capture.test_unseen import STATE, Case
from tests.worlds import Outcome, run

import wholestep

ONE = "to which the step writes"


def outcome_with(after: str, given: str) -> Outcome:
    """Of a step with two more arguments, `q` and `w`."""
    program = Case("", STATE, after=after).program()
    main = program.main.replace("def step(x, y):", "def step(x, y, q, w):")
    main = main.replace("return batch(call, size)", f"a, b = batch(call, size); {given}")
    return run(dataclasses.replace(program, main=main), wholestep.compile)


@pytest.mark.parametrize(
    ("after", "given"),
    [
        ("q.append(1); k.n = len(w)", "z = []; return a, b, z, z"),
        ("q.append(1); k.n = len(w)", "z = []; return a, b, z, z if call in (2, 3) else []"),
        ("q['m'].append(1); k.n = len(w['m'])", "z = []; return a, b, {'m': z}, {'m': z}"),
        ("q.append(1); k.n = len(k.l)", "return a, b, k.l, 0"),
        ("q.append(1); k.n = len(k.l)", "return a, b, k.l if call in (2, 3) else [], 0"),
        ("k.h['n'] = 1; k.n = len(q)", "return a, b, k.h if call in (2, 3) else {}, 0"),
    ],
)
def test_one_container_that_is_an_argument_and_something_else(after: str, given: str) -> None:
    assert ONE in outcome_with(after, given).refused


@pytest.mark.parametrize(
    ("after", "given"),
    [
        ("k.n = len(q) + len(w)", "z = [1]; return a, b, z, z if call in (2, 3) else [1]"),
        ("k.n = len(q) + len(k.l)", "return a, b, k.l if call in (2, 3) else [], 0"),
        ("q['n'] = 1; k.n = len(w)", "return a, b, {}, {}"),
        ("q.n += 1; k.n = w.n", "z = types.SimpleNamespace(n=1); return a, b, z, z if call < 2 else copy.copy(z)"),
    ],
)
def test_what_is_only_read_or_no_container_may_be_one(after: str, given: str) -> None:
    assert not outcome_with(after, given).refused


def test_a_dict_of_attributes_that_somebody_has_kept() -> None:
    changes = ("v = {'n': 7}", "v = vars(k)")
    outcome_of(Case("vars", STATE + "v = vars(k)\n", after="v['n'] += 1\nk.f = k.n", changes=changes))
