"""Every invariant of a step graph, broken on purpose: the error names the node."""

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.optim import Adam, Optimizer

from wholestep.capture import capture
from wholestep.errors import GraphError
from wholestep.graph import StepGraph, ops
from wholestep.graph.verify import describe
from wholestep.passes import DEFAULT_PIPELINE, run_passes
from wholestep.zoo import get
from wholestep.zoo.optimizers import OPTIMIZERS

aten = torch.ops.aten


class Model(nn.Module):
    """With tuples (batch norm) and two draws of random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.linear(F.dropout(self.norm(x), 0.5)), 0.5)


def train_step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss


@pytest.fixture(name="original", scope="module")
def _original() -> StepGraph:
    model = Model()
    return capture(train_step, (model, Adam(model.parameters(), foreach=False), torch.randn(6, 4)), {}).graph


@pytest.fixture(name="graph")
def _graph(original: StepGraph) -> StepGraph:
    duplicate = original.copy()
    duplicate.verify(deep=True)
    return duplicate


def first(graph: StepGraph, target: Callable[..., Any]) -> fx.Node:
    return next(node for node in graph.calls() if node.target is target)


def assert_refused(graph: StepGraph, *words: str, deep: bool = False) -> None:
    with pytest.raises(GraphError) as caught:
        graph.verify(deep=deep)
    for word in words:
        assert word in str(caught.value)


def test_a_call_without_a_fake_value(graph: StepGraph) -> None:
    node = first(graph, aten.addmm.default)
    del node.meta["val"]
    assert_refused(graph, f"'{node.name}'", "aten.addmm.default", "no fake value")


def test_an_input_without_a_fake_value(graph: StepGraph) -> None:
    node = graph.placeholder("param.linear.weight")
    del node.meta["val"]
    assert_refused(graph, f"'{node.name}'", "no fake value")


@pytest.mark.parametrize("phase", [None, "forward"])
def test_a_call_without_a_phase(graph: StepGraph, phase: str | None) -> None:
    node = first(graph, aten.addmm.default)
    node.meta["phase"] = phase
    assert_refused(graph, f"'{node.name}'", "aten.addmm.default", "no phase")


def test_a_value_that_is_used_before_it_is_computed(graph: StepGraph) -> None:
    node = first(graph, aten.addmm.default)
    source = node.args[2]
    assert isinstance(source, fx.Node)
    node.append(source)
    assert_refused(graph, "not well formed", f"'{source.name}'")


def test_a_value_of_another_graph(graph: StepGraph, original: StepGraph) -> None:
    node = first(graph, aten.addmm.default)
    node.args = (*node.args[:2], first(original, aten.t.default))
    assert_refused(graph, "not well formed", f"'{node.name}'")


def test_random_ops_that_have_changed_places(graph: StepGraph) -> None:
    [earlier, later] = [node for node in graph.calls() if ops.is_random(node.target)]
    later.args = earlier.args
    earlier.prepend(later)
    assert_refused(graph, f"'{earlier.name}'", "has moved behind an effect that was captured after it")


def test_a_write_in_a_functional_graph(graph: StepGraph) -> None:
    node = first(graph, aten.addmm.default)
    written = graph.insert(aten.relu_.default, (node,), like=node, after=node)
    assert_refused(graph, f"'{written.name}'", "aten.relu_.default", "writes to its arguments in a functional graph")
    graph.is_functional = False
    graph.verify(deep=True)


def test_an_update_of_another_shape(graph: StepGraph) -> None:
    update = graph.updates["param.linear.weight"]
    turned = graph.insert(aten.t.default, (update,), like=update, after=update)
    graph.set_returned(updates={**graph.updates, "param.linear.weight": turned})
    assert_refused(graph, "'param.linear.weight'", "f32[4, 3]", "f32[3, 4]")


def test_an_update_of_another_dtype(graph: StepGraph) -> None:
    update = graph.updates["param.linear.bias"]
    wide = graph.insert(aten._to_copy.default, (update,), {"dtype": torch.float64}, like=update, after=update)
    graph.set_returned(updates={**graph.updates, "param.linear.bias": wide})
    assert_refused(graph, "'param.linear.bias'", "f64[3]", "f32[3]")


def test_an_update_of_an_unknown_slot(graph: StepGraph) -> None:
    update = graph.updates["param.linear.bias"]
    graph.set_returned(updates={**graph.updates, "param.nope": update})
    assert_refused(graph, "'param.nope'", "not one of its slots")


def test_an_input_without_a_slot(graph: StepGraph) -> None:
    node = graph.placeholder("batch.x")
    del graph.slots[node.name]
    assert_refused(graph, f"'{node.name}'", "no slot")


def test_an_item_of_another_type_than_its_tuple_says(graph: StepGraph) -> None:
    item = first(graph, operator.getitem)
    producer = item.args[0]
    assert isinstance(producer, fx.Node)
    assert item.args[1] == 0
    item.args = (producer, 1)
    assert_refused(graph, f"'{item.name}'", "item 1", f"'{producer.name}'")


def test_an_item_that_its_tuple_does_not_have(graph: StepGraph) -> None:
    item = first(graph, operator.getitem)
    item.args = (item.args[0], 99)
    assert_refused(graph, f"'{item.name}'")


@pytest.mark.parametrize("change", [lambda val: val.t(), lambda val: val.double()])
def test_a_fake_value_that_its_op_does_not_yield_is_found_by_deep_verification(
    graph: StepGraph, change: Callable[[Tensor], Tensor]
) -> None:
    node = first(graph, aten.addmm.default)
    expected = describe(node.meta["val"])
    with graph.fake_mode:
        node.meta["val"] = change(node.meta["val"])
    graph.verify()
    assert_refused(graph, f"'{node.name}'", f"yields {expected}", describe(node.meta["val"]), deep=True)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.zeros(2, 3), "f32[2, 3]"),
        (torch.zeros((), dtype=torch.bool), "b8[]"),
        (torch.zeros(1, dtype=torch.complex64), "complex64[1]"),
        ((torch.zeros(2), [torch.zeros(0, dtype=torch.int64)]), "(f32[2], (i64[0]))"),
        (1.5, "float"),
        (None, "NoneType"),
    ],
)
def test_types_in_short(value: Any, text: str) -> None:
    assert describe(value) == text


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "optimizer"), [("gpt", "adamw"), ("resnet", "sgd_foreach"), ("lstm", "adamw_fused"), ("mlp", "adafactor")]
)
def test_real_steps_are_well_formed_before_and_after_their_passes(name: str, optimizer: str) -> None:
    case = get(name)
    model = case.build()
    args = (model, OPTIMIZERS[optimizer](model.parameters()), case.make_batch(2, 0))

    def step(model: nn.Module, optimizer: Optimizer, batch: dict[str, Tensor]) -> Tensor:
        optimizer.zero_grad()
        loss = case.loss(model, batch)
        loss.backward()
        optimizer.step()
        return loss

    graph = capture(step, args, {}).graph
    graph.verify(deep=True)
    run_passes(graph, DEFAULT_PIPELINE).verify(deep=True)
