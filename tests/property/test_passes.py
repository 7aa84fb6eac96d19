"""Passes change how a step computes, never what: any pipeline gives what the graph as captured gives, bit for bit."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st
from tests.parity import RandomStream, build_optimizer, default_step, differences
from tests.random_steps import FAMILIES, STEPS, Plan, build_world, call, make_batch, make_step, plans
from tests.twins import World, named_values, observe
from torch import Tensor

import wholestep
from wholestep import zoo
from wholestep.passes import DEFAULT_PIPELINE, Pipeline

DETERMINISTIC = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=7,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
PREFIXES = [Pipeline(DEFAULT_PIPELINE.passes[:length]) for length in range(1, len(DEFAULT_PIPELINE.passes) + 1)]

# Passes over values in any order and number, then in place or not, then what may still follow.
pipelines = st.builds(
    lambda values, in_place, after: ",".join([*values, *(["reinplace", *after] if in_place else [])]),
    st.lists(st.sampled_from(["simplify", "cse", "cse{across_phases=true}", "dce"]), max_size=6),
    st.booleans(),
    st.lists(st.just("dce"), max_size=1),
)

Run = Callable[[Any], list[dict[str, Tensor]]]


def observe_steps(
    build: Callable[[], World],
    function: Callable[..., Any],
    run: Callable[[World, Any, int], Any],
    passes: Any,
    *,
    seed: int = 0,
    **options: Any,
) -> list[dict[str, Tensor]]:
    """All that a few steps leave behind, step by step, and what they returned as it is at the end."""
    torch.manual_seed(seed)
    world = build()
    step = wholestep.compile(function, passes=passes, **options)
    stream = RandomStream(seed + 1)
    seen: list[dict[str, Tensor]] = []
    kept: list[Any] = []
    for number in range(STEPS):
        with stream.active():
            kept.append(run(world, step, number))
            seen.append(named_values("output", kept[-1]) | observe(world) | {"rng": torch.get_rng_state()})
    step.graph.verify()
    return [*seen, named_values("kept", kept)]


def assert_passes_change_nothing(run: Run, others: list[Any]) -> None:
    expected = run("")
    for passes in others:
        for number, (before, after) in enumerate(zip(expected, run(passes), strict=True), 1):
            assert differences(before, after) == [], f"'{passes}' changes step {number}"


def run_plan(plan: Plan, passes: Any) -> list[dict[str, Tensor]]:
    return observe_steps(
        partial(build_world, plan),
        make_step(plan),
        lambda world, step, number: call(world, step, *make_batch(plan, number)),
        passes,
        seed=plan.seed,
        dynamic_batch=plan.dynamic_batch,
    )


def run_case(name: str, optimizer_name: str, passes: Any) -> list[dict[str, Tensor]]:
    case = zoo.get(name)

    def build() -> World:
        model = case.build()
        return World(model=model, optimizer=build_optimizer(optimizer_name, model))

    return observe_steps(
        build,
        default_step(case),
        lambda world, step, number: step(world.model, world.optimizer, case.make_batch(4, number)),
        passes,
    )


def of_one_size(plan: Plan) -> Plan:
    """One capture instead of several: what happens to sizes is another test's business."""
    return dataclasses.replace(plan, sizes=plan.sizes[:1] * STEPS, dynamic_batch=False)


@pytest.mark.sample(1)
@pytest.mark.parametrize("num_steps", [2, pytest.param(30, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", FAMILIES)
def test_pipelines_on_random_steps(family: str, num_steps: int) -> None:
    @settings(DETERMINISTIC, max_examples=num_steps)
    @given(plans(FAMILIES[family]).map(of_one_size), pipelines)
    def check(plan: Plan, other: str) -> None:
        note(repr(plan))
        assert_passes_change_nothing(partial(run_plan, plan), [*PREFIXES, other])

    check()


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "optimizer_name"),
    [
        ("mlp", "adam"),
        pytest.param("gpt", "adamw_fused", marks=pytest.mark.slow),
        pytest.param("resnet", "sgd", marks=pytest.mark.slow),
        ("lstm", "adamw_foreach"),
        ("custom_function", "adafactor"),
    ],
)
def test_prefixes_on_the_zoo(name: str, optimizer_name: str) -> None:
    assert_passes_change_nothing(partial(run_case, name, optimizer_name), list(PREFIXES))


@settings(DETERMINISTIC, max_examples=5)
@given(pipelines)
def test_random_pipelines_on_the_mlp(passes: str) -> None:
    assert_passes_change_nothing(partial(run_case, "mlp", "adamw"), [passes])


@given(pipelines)
@settings(DETERMINISTIC, max_examples=50)
def test_pipelines_round_trip_through_text(passes: str) -> None:
    assert str(Pipeline.parse(passes)) == passes
    assert Pipeline.parse(str(Pipeline.parse(passes))) == Pipeline.parse(passes)


def test_the_history_tells_what_ran() -> None:
    case = zoo.get("mlp")
    model = case.build()
    step = wholestep.compile(default_step(case))
    step(model, build_optimizer("adam", model), case.make_batch(4, 0))
    assert ",".join(record.text for record in step.graph.history) == str(DEFAULT_PIPELINE)
    assert step.graph.num_ops == step.graph.history[-1].num_ops_after
    assert not step.graph.is_functional
