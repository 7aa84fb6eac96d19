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


# Arrays that are too large to be compared at each call

LARGE = "A = np.ones(300_000, dtype=np.float32)\nI = np.array([0, 1])\nB = [0.0]\nK = {'a': A}\n"
LARGE_READS = {
    "mean": "A.mean()",
    "sum": "np.sum(A)",
    "take": "A.take(I).sum()",
    "max": "A.max()",
    "item": "A.item(0)",
    "astype": "A.astype(np.float64)[0]",
    "view": "A.T[0]",
    "function of C": "np.dot(A, A)",
    "in a list": "np.stack([A, A])[0, 0]",
    "in a dict": "np.mean([*K.values()])",
    "operator": "(A * 2)[0]",
    "tensor": "torch.tensor(A)[0]",
    "text": "len(f'{A}')",
}


@pytest.mark.sample(5)
@pytest.mark.parametrize("read", LARGE_READS.values(), ids=LARGE_READS)
def test_content_of_a_large_array_is_refused(read: str) -> None:
    outcome_of(
        Case("large", LARGE, loss=f"loss = loss * {read}", changes=("A[:] = 5", ""), refused="large NumPy array")
    )


def test_a_large_array_may_be_handed_on() -> None:
    """Its shape is read, it is kept, and a tensor in its memory is an input like any other."""
    body = "loss = loss + torch.from_numpy(A)[:3].sum() * len(A) / A.shape[0]"
    case = Case(
        "large",
        LARGE,
        loss=body,
        after="B.append(A); B.insert(0, [A]); K.get('b', A)",
        changes=("A[:2] = 5", "A[0] = 3"),
    )
    assert outcome_of(case).captures == 1


# Variables of the context

SCALED = """
import contextlib
import contextvars
V = contextvars.ContextVar("V", default=1.0)
@contextlib.contextmanager
def scaled(value):
    token = V.set(value)
    try: yield token
    finally: V.reset(token)
"""
VARIABLES = [
    Case("reset", SCALED, loss="with scaled(2.0): loss = loss * V.get()\nloss = loss * V.get()", changes=("V.set(3.0)", "V.set(5.0)")),
    Case("nested", SCALED, loss="with scaled(2.0), scaled(4.0): loss = loss * V.get()\nloss = loss * V.get()", changes=("V.set(3.0)", "V.set(5.0)")),
    Case("old value", SCALED, loss="with scaled(7.0) as t: loss = loss * (1.0 if t.old_value is t.MISSING else t.old_value)", changes=("V.set(3.0)", "V.set(5.0)")),
    Case("left set", SCALED, loss="loss = loss * V.get()\nV.set(2.0)\nloss = loss * V.get()", changes=("V.set(3.0)", "V.set(5.0)")),
]  # fmt: skip


@all_of(VARIABLES)
def test_a_variable_of_the_context_that_is_set_and_reset(case: Case) -> None:
    outcome_of(case)
