"""Random models and train steps against eager, bit for bit after each of three steps."""

import pytest
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st
from tests.random_steps import FAMILIES, STEPS, Plan, build_world, call, make_batch, make_step, plans
from tests.twins import Twins

DETERMINISTIC = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=20,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def run(plan: Plan) -> Twins:
    note(repr(plan))
    twins = Twins(
        lambda: build_world(plan), make_step(plan), call=call, seed=plan.seed, dynamic_batch=plan.dynamic_batch
    )
    for number in range(STEPS):
        twins.step(*make_batch(plan, number))
    return twins


@pytest.mark.sample(2)
@pytest.mark.parametrize("num_steps", [6, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", FAMILIES)
def test_random_steps_are_eagers(family: str, num_steps: int) -> None:
    @settings(DETERMINISTIC, max_examples=num_steps)
    @given(plans(FAMILIES[family]))
    def check(plan: Plan) -> None:
        twins = run(plan)
        assert twins.num_captures <= STEPS
        twins.compiled.graph.verify()

    check()


@settings(DETERMINISTIC, max_examples=4)
@given(plans(), st.integers(1, STEPS))
def test_random_steps_verify(plan: Plan, number: int) -> None:
    note(repr(plan))
    twins = Twins(lambda: build_world(plan), make_step(plan), call=call, seed=plan.seed, verify=number)
    for index in range(STEPS):
        twins.step(*make_batch(plan, index))
