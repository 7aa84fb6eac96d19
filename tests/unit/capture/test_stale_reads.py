# ruff: noqa: E501 - tables with one world a line
"""What a step reads by unusual ways, and whether later calls read it again: small worlds that were once stale."""

from __future__ import annotations

import pytest
from tests.unit.capture.test_unseen import Case
from tests.worlds import Outcome, run

import wholestep


def outcome_of(case: Case) -> Outcome:
    """Compare with eager at every call; raises where they differ, or where only one of case and step is refused."""
    outcome = run(case.program(), wholestep.compile)
    assert case.refused in (outcome.refused or "")
    assert bool(outcome.refused) is bool(case.refused)
    return outcome


def all_of(cases: list[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in cases])


# Values that are equal and yet not the same

SIGN = "loss = loss * (2.0 + math.copysign(1.0, C.imag))"
KINDS = [
    Case("complex", "C = complex(1.0, 0.0)\n", loss=SIGN, changes=("C = complex(1.0, -0.0)", "C = complex(1.0, 0.0)")),
    Case("complex of NumPy", "C = np.complex64(complex(1.0, 0.0))\n", loss=SIGN, changes=("C = np.complex64(complex(1.0, -0.0))", "")),
    Case("float of NumPy", "C = np.float32(0.0)\n", loss="loss = loss * (2.0 + math.copysign(1.0, C))", changes=("C = np.float32(-0.0)", "")),
    Case("slice", "S = slice(0.0, None)\n", loss="loss = loss * (2.0 + math.copysign(1.0, S.start))", changes=("S = slice(-0.0, None)", "")),
    Case("range", "R = range(0, 3, 2)\n", loss="loss = loss * R.stop", changes=("R = range(0, 4, 2)", "")),
]  # fmt: skip


@all_of(KINDS)
def test_values_that_are_equal_and_not_the_same(case: Case) -> None:
    assert outcome_of(case).captures > 1


def test_numbers_that_are_no_numbers_stay_the_same() -> None:
    case = Case(
        "NaN",
        "C = np.float32('nan')\n",
        loss="loss = loss * (2.0 if C != C else 1.0)",
        changes=("C = np.float32('nan')", ""),
    )
    assert outcome_of(case).captures == 1
