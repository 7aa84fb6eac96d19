"""Which ops become regions, and the reasons of those that do not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.lowering import functional_graph
from tests.parity import default_step
from torch import Tensor, fx, nn
from torch.optim import SGD, Optimizer

from wholestep import zoo
from wholestep.graph import Phase, StepGraph, ops
from wholestep.lower import Break, Lower, Region, divide, regions_of
from wholestep.lower.lower import region_name
from wholestep.lower.regions import merged, why_not
from wholestep.passes import run_passes
from wholestep.zoo.optimizers import OPTIMIZERS

aten = torch.ops.aten


def zoo_graph(name: str, optimizer: str = "adamw_fused") -> StepGraph:
    case = zoo.get(name)
    model = case.build()
    return functional_graph(default_step(case), model, OPTIMIZERS[optimizer](model.parameters()), case.make_batch(4, 0))


@pytest.fixture(scope="module")
def gpt() -> StepGraph:
    return zoo_graph("gpt")


@pytest.fixture(scope="module")
def mlp() -> StepGraph:
    return zoo_graph("mlp", "sgd")


class Matrix(nn.Module):
    """One parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))


def matrix_graph(loss: Callable[[Tensor, Tensor], Tensor], num_losses: int = 1) -> StepGraph:
    """A step that trains a matrix on `loss(weight, x)`, several times over."""

    def step(model: Matrix, optimizer: Optimizer, x: Tensor) -> list[Tensor]:
        optimizer.zero_grad()
        losses: list[Tensor] = []
        for _ in range(num_losses):
            losses.append(loss(model.weight, x))
            losses[-1].backward()
        optimizer.step()
        return losses

    model = Matrix()
    return functional_graph(step, model, SGD(model.parameters(), lr=0.1), torch.randn(4, 4))


def test_regions_are_runs_of_one_phase_in_order(gpt: StepGraph) -> None:
    division = divide(gpt)
    calls = list(gpt.calls())
    assert {nodes[0].meta["phase"] for nodes in division.regions} == {Phase.FORWARD, Phase.BACKWARD}
    for nodes in division.regions:
        first = calls.index(nodes[0])
        assert calls[first : first + len(nodes)] == list(nodes)
        assert len({node.meta["phase"] for node in nodes}) == 1
        assert not any(why_not(node) for node in nodes)


def test_every_op_that_does_something_is_in_a_region_or_has_a_reason(gpt: StepGraph) -> None:
    division = divide(gpt)
    counted = sum(len(nodes) for nodes in division.regions) + sum(item.num_nodes for item in division.breaks)
    inside = {node for nodes in division.regions for node in nodes}
    bare = [node for node in gpt.calls() if node not in inside and not why_not(node) and is_idle(node)]
    assert gpt.num_ops - len(bare) <= counted <= gpt.num_ops
    assert all(item.reason for item in division.breaks)


def is_idle(node: fx.Node) -> bool:
    return not ops.is_op(node) or ops.shares_memory(node.target) or "empty" in node.name


@pytest.mark.parametrize(
    ("optimizer", "reason"),
    [
        ("adamw_fused", "it is one kernel already"),
        ("sgd", "it reads a number that changes from step to step"),
        ("sgd", "it draws random numbers, in eager's order"),
        ("sgd", "fewer than 10 ops in a row"),
    ],
)
def test_breaks_have_reasons(optimizer: str, reason: str) -> None:
    assert reason in {item.reason for item in divide(zoo_graph("mlp", optimizer)).breaks}


def test_collectives_and_their_waits_are_breaks() -> None:
    graph = fx.Graph()
    source = graph.placeholder("x")
    source.meta["val"] = torch.ones(2)
    sent = graph.call_function(ops.ALL_REDUCE, (source, "sum", "0"))
    got = graph.call_function(ops.WAIT, (sent,))
    assert [why_not(sent), why_not(got)] == ["it talks to other ranks"] * 2


def test_operators_of_others_are_breaks() -> None:
    with torch.library._scoped_library("wholestep_test_regions", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
        library.impl("twice", lambda x: torch.empty_like(x), "Meta")
        node = fx.Graph().call_function(torch.ops.wholestep_test_regions.twice.default, ())
        assert why_not(node) == "it may have effects"


def test_draws_that_alternate_with_bare_memory_are_one_break() -> None:
    graph = run_passes(zoo_graph("gpt"), [Lower()])
    drawn = [remark for remark in graph.remarks["lower"] if "random" in remark]
    assert drawn == ["bernoulli and 6 more (forward): it draws random numbers, in eager's order"]


def test_breaks_of_one_reason_are_merged() -> None:
    breaks = [
        Break("a", Phase.FORWARD, "why", 2),
        Break("b", Phase.FORWARD, "other"),
        Break("c", Phase.FORWARD, "why"),
        Break("d", Phase.BACKWARD, "why"),
    ]
    assert [str(item) for item in merged(breaks)] == [
        "a and 2 more (forward): why",
        "b (forward): other",
        "d (backward): why",
    ]


def test_short_runs_stay_as_they_are(mlp: StepGraph) -> None:
    longest = max(len(nodes) for nodes in divide(mlp, min_ops=1).regions)
    assert divide(mlp, min_ops=longest + 1).regions == ()
    assert len(divide(mlp, min_ops=1).regions) > len(divide(mlp, min_ops=10).regions) > 0


def test_predicates_decide_about_nodes_and_regions(mlp: StepGraph) -> None:
    no_products = divide(mlp, min_ops=1, node_predicate=lambda node: node.target is not aten.relu.default)
    assert not any(node.target is aten.relu.default for nodes in no_products.regions for node in nodes)
    assert any(item.reason == "the node predicate says no" for item in no_products.breaks)
    no_backward = divide(mlp, min_ops=3, region_predicate=lambda nodes: nodes[0].meta["phase"] is not Phase.BACKWARD)
    assert {nodes[0].meta["phase"] for nodes in no_backward.regions} >= {Phase.FORWARD}
    assert not any(nodes[0].meta["phase"] is Phase.BACKWARD for nodes in no_backward.regions)
    assert any(item.reason == "the region predicate says no" for item in no_backward.breaks)


def test_a_region_is_named_by_phase_and_module(gpt: StepGraph) -> None:
    block = [node for node in gpt.calls(Phase.FORWARD) if node.meta.get("fqn", "").startswith("blocks.1.")]
    assert region_name(block) == "forward_blocks_1"
    assert region_name(list(gpt.calls(Phase.BACKWARD))) == "backward"


class Blocks(nn.Module):
    """Draws that need more than a shape cut the forward within and between blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.bernoulli(torch.sigmoid(block(x))) + block(torch.tanh(x).exp().sin())
        return x


def test_no_two_regions_have_the_same_name() -> None:
    model = Blocks()

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    graph = functional_graph(step, model, SGD(model.parameters(), lr=0.1), torch.randn(3, 4))
    graph = run_passes(graph, [Lower(min_ops=2)])
    names = [region.name for region in regions_of(graph)]
    assert {"forward_blocks", "forward_blocks_part2"} <= set(names)
    assert len(set(names)) == len(names)
    assert [node.name for node in graph.calls() if isinstance(node.target, Region)] == names


def test_a_name_that_a_node_has_is_not_given_again() -> None:
    graph = matrix_graph(lambda weight, x: (weight.sin() + x).cos().exp().sum())
    taken = graph.graph.create_node("call_function", aten.sin.default, (graph.nodes[0],), name="forward")
    assert taken.name == "forward"
    taken.meta = {"val": graph.nodes[0].meta["val"], "phase": Phase.OPTIMIZER}
    next(iter(graph.calls())).prepend(taken)
    graph.set_returned(outputs=(*graph.outputs, taken))
    graph = run_passes(graph, [Lower(min_ops=2)])
    assert [region.name for region in regions_of(graph)][:1] == ["forward"]
    assert len({node.name for node in graph.nodes}) == len(graph.nodes)


def effects(graph: StepGraph) -> list[str]:
    return [str(node.target) for node in graph.calls() if ops.has_effect(node)]


def test_draws_go_to_the_front_in_their_order() -> None:
    def loss(weight: Tensor, x: Tensor) -> Tensor:
        noise = torch.rand(4, 4)
        hidden = F.dropout(weight @ x + noise, 0.5)
        return F.dropout(hidden.sin().cos() + torch.randn(4, 4), 0.1).sum()

    graph = matrix_graph(loss)
    before = effects(graph)
    graph = run_passes(graph, [Lower(min_ops=3)])
    assert effects(graph) == before
    assert len(before) == 4
    calls = list(graph.calls())
    first = next(index for index, node in enumerate(calls) if isinstance(node.target, Region))
    assert all(not ops.has_effect(node) for node in calls[first:])


class NoisyBackward(torch.autograd.Function):
    """Draws in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad * torch.rand(4, 4)


def test_draws_do_not_pass_those_of_a_backward_before_them() -> None:
    def loss(weight: Tensor, x: Tensor) -> Tensor:
        noisy: Any = NoisyBackward.apply(weight * x)
        return F.dropout(noisy.cos().exp(), 0.5).sum()

    graph = matrix_graph(loss, num_losses=2)
    before = effects(graph)
    assert before.count("aten.rand.default") == 2
    assert effects(run_passes(graph, [Lower(min_ops=2)])) == before


def test_draws_of_a_second_forward_stay_behind_the_first_backward() -> None:
    graph = matrix_graph(lambda weight, x: F.dropout((weight * x).cos().exp(), 0.5).sum(), num_losses=2)
    graph = run_passes(graph, [Lower(min_ops=2)])
    order = ["draw" if ops.has_effect(node) else node.name for node in graph.calls()]
    order = [name for name in order if name == "draw" or name.startswith(("forward", "backward"))]
    assert order == ["draw", "forward", "backward", "draw", "forward_part2", "backward_part2"]
