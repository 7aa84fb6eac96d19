"""Worlds of random Python objects and steps that use them: equal to eager at every call, or refused; never wrong."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, note, seed, settings
from tests.worlds import Outcome, Program, programs, run

import wholestep

REFUSED_SHARE = 0.25
# After ten examples hypothesis mostly varies old ones, which says less than a new world does: short runs, many seeds.
SETTINGS = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=9,
    report_multiple_bugs=False,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
)


def outcomes_of(num_worlds: int, compile: Callable[..., Any]) -> list[Outcome]:
    """How that many different worlds went; raises for the first that is wrong."""
    outcomes: dict[str, Outcome] = {}
    number = 0
    while len(outcomes) < num_worlds:

        @settings(SETTINGS)
        @seed(number)
        @given(programs())
        def check(program: Program) -> None:
            note(repr(program))
            if repr(program) not in outcomes:
                outcomes[repr(program)] = run(program, compile)

        check()
        number += 1
    return list(outcomes.values())


@pytest.mark.parametrize("num_worlds", [50, pytest.param(2000, marks=pytest.mark.slow)])
def test_worlds_are_eagers_or_refused(num_worlds: int) -> None:
    outcomes = outcomes_of(num_worlds, wholestep.compile)
    refused = sum(bool(outcome.refused) for outcome in outcomes)
    captures = sum(outcome.captures for outcome in outcomes)
    print(f"{len(outcomes)} worlds: {len(outcomes) - refused} equal to eager, {refused} refused; {captures} captures")
    assert refused < REFUSED_SHARE * len(outcomes)


def test_eager_worlds_are_equal() -> None:
    """The worlds themselves are sound: two eager runs of one see the same."""
    assert not any(outcome.refused for outcome in outcomes_of(20, lambda step: step))
