"""Every model of the zoo and every optimizer: the compiled step is eager's, bit for bit, at every step."""

import pytest
from tests.parity import assert_parity
from torch import nn

from wholestep import zoo
from wholestep.graph import Phase
from wholestep.zoo.optimizers import OPTIMIZERS

BRANCHES_ON_THE_STEP_COUNT = {"radam"}
"""Captured once more, when the count gets there."""


FAMILIES = ("sgd", "adam", "adamw_foreach", "adamw_fused")
# By default each model meets one of them; all pairs are slow tests.
PAIRS = [
    pytest.param(name, optimizer_name, marks=[pytest.mark.slow] if (row + column) % len(FAMILIES) else [])
    for row, name in enumerate(zoo.CASES)
    for column, optimizer_name in enumerate(FAMILIES)
]


@pytest.mark.sample(5)
@pytest.mark.parametrize(("name", "optimizer_name"), PAIRS)
def test_every_step_is_eagers(name: str, optimizer_name: str) -> None:
    step = assert_parity(zoo.get(name), optimizer_name, steps=5)
    assert step.num_captures == 1
    assert step.recompile_reasons == ()
    step.graph.verify()


@pytest.mark.sample(8)
@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
def test_every_optimizer_is_eagers(optimizer_name: str) -> None:
    step = assert_parity(zoo.get("mlp"), optimizer_name, steps=5)
    assert step.num_captures <= (2 if optimizer_name in BRANCHES_ON_THE_STEP_COUNT else 1)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["mlp", "gpt", "resnet", "lstm", "custom_function", "checkpointed"])
def test_the_graph_as_captured_is_eagers_too(name: str) -> None:
    step = assert_parity(zoo.get(name), "adamw", steps=2, compile_options={"passes": ""})
    step.graph.verify(deep=True)
    assert step.graph.is_functional


@pytest.mark.parametrize("name", ["mlp", "bert", "resnet", "lstm"])
def test_the_first_steps_verify(name: str) -> None:
    step = assert_parity(zoo.get(name), "adamw_fused", steps=3, compile_options={"verify": 2})
    assert step.num_captures == 1


@pytest.mark.parametrize("name", ["mlp", "gpt", "resnet", "lstm"])
def test_the_graph_knows_phases_gradients_and_twins(name: str) -> None:
    models: list[nn.Module] = []
    step = assert_parity(zoo.get(name), "adamw", steps=1, compile_options={"passes": ""}, prepare=models.append)
    graph = step.graph
    assert {node.meta["phase"] for node in graph.calls()} == {Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER}
    trainable = {parameter_name for parameter_name, _ in models[0].named_parameters()}
    assert set(graph.gradients) == trainable
    assert {slot_id for slot_id in graph.updates if slot_id.startswith("param.")} == {
        f"param.{parameter_name}" for parameter_name in trainable
    }
    twins = graph.forward_twins()
    assert twins
    assert all(node.meta["phase"] is Phase.BACKWARD for node in twins)
    assert all(twin.meta["phase"] is Phase.FORWARD for twin in twins.values())
