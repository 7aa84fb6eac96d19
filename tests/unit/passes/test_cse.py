"""Equal calls are computed once; what only looks equal, or must stay apart, is left alone."""

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from tests.twins import Twins, World, mse_step, pair
from torch import Tensor, nn
from torch.optim import SGD

import wholestep
from wholestep.capture import capture
from wholestep.graph import Phase, StepGraph, ops
from wholestep.passes import Pipeline, run_passes

aten = torch.ops.aten
X, Y = pair()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0, 3.0, 4.0]))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def captured(function: Callable[..., Any], *args: Any) -> StepGraph:
    return capture(function, (Net(), *args), {}).graph


def merged(function: Callable[..., Any], *args: Any, passes: str = "cse") -> StepGraph:
    return run_passes(captured(function, *args), Pipeline.parse(passes))


def code(graph: StepGraph) -> str:
    """The statements of a printed graph without comments, and what it returns in one line."""
    body, _, returned = str(graph).partition("):\n")[2].partition("    return ")
    lines = [line.partition("  # ")[0].strip().replace("torch.ops.", "") for line in body.splitlines()]
    returned = " ".join(returned.split()).replace("{ }", "{}")
    return "\n".join([*(line for line in lines if line), f"return {returned}"]) + "\n"


def count(graph: StepGraph, target: Any, phase: Phase | None = None) -> int:
    return sum(node.target is target for node in graph.calls(phase))


def test_equal_calls_before_and_after() -> None:
    def step(model: Net, x: Tensor) -> tuple[Tensor, Tensor]:
        first = (x.t() + 1).exp() * 2
        second = (x.t() + 1).exp() * 3
        return torch.cat([first, second]), torch.cat([x.t().exp(), x.exp().t()])

    graph = captured(step, torch.ones(2, 4))
    assert_expected_inline(
        code(graph),
        """\
t = aten.t.default(batch_x)
add = aten.add.Tensor(t, 1)
exp = aten.exp.default(add)
mul = aten.mul.Tensor(exp, 2)
t_1 = aten.t.default(batch_x)
add_1 = aten.add.Tensor(t_1, 1)
exp_1 = aten.exp.default(add_1)
mul_1 = aten.mul.Tensor(exp_1, 3)
cat = aten.cat.default([mul, mul_1])
t_2 = aten.t.default(batch_x)
exp_2 = aten.exp.default(t_2)
exp_3 = aten.exp.default(batch_x)
t_3 = aten.t.default(exp_3)
cat_1 = aten.cat.default([exp_2, t_3])
return { 'outputs': (cat, cat_1), 'updates': {}, 'results': {}, }
""",
    )
    assert_expected_inline(
        code(run_passes(graph, Pipeline.parse("cse"))),
        """\
t = aten.t.default(batch_x)
add = aten.add.Tensor(t, 1)
exp = aten.exp.default(add)
mul = aten.mul.Tensor(exp, 2)
mul_1 = aten.mul.Tensor(exp, 3)
cat = aten.cat.default([mul, mul_1])
exp_2 = aten.exp.default(t)
exp_3 = aten.exp.default(batch_x)
t_3 = aten.t.default(exp_3)
cat_1 = aten.cat.default([exp_2, t_3])
return { 'outputs': (cat, cat_1), 'updates': {}, 'results': {}, }
""",
    )


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (lambda x: x.mul(1), lambda x: x.mul(1.0)),
        (lambda x: x.mul(1), lambda x: x.mul(True)),
        (lambda x: x.add(0.0), lambda x: x.add(-0.0)),
        (lambda x: x.add(x, alpha=2), lambda x: x.add(x, alpha=3)),
        (lambda x: x.sum(0), lambda x: x.sum(1)),
        (lambda x: x.sum(0), lambda x: x.sum(0, keepdim=True)),
        (lambda x: x.sum(), lambda x: x.sum(dtype=torch.float64)),
        (lambda x: torch.cat([x, x.exp()]), lambda x: torch.cat([x.exp(), x])),
        (lambda x: torch.full((2,), 1), lambda x: torch.full((2,), 1.0)),
        (lambda x: x.sub(x.exp()), lambda x: x.exp().sub(x)),
    ],
    ids=["float", "bool", "sign", "alpha", "dim", "keepdim", "dtype", "list", "fill", "order"],
)
def test_calls_that_differ_in_any_argument_stay_apart(
    first: Callable[[Tensor], Tensor], second: Callable[[Tensor], Tensor]
) -> None:
    def step(model: Net, x: Tensor) -> tuple[Tensor, ...]:
        return first(x) * 2, second(x) * 2, first(x) * 3

    graph = merged(step, torch.ones(4, 4))
    ours, theirs, again = (node.args[0] for node in graph.outputs)
    assert ours is again
    assert ours is not theirs


@pytest.mark.parametrize(
    "draw",
    [lambda x: F.dropout(x, 0.5), lambda x: torch.rand_like(x), lambda x: torch.rand(4, 4), torch.bernoulli],
    ids=["dropout", "rand_like", "rand", "bernoulli"],
)
def test_random_numbers_are_drawn_as_often_as_in_eager(draw: Callable[[Tensor], Tensor]) -> None:
    def step(model: Net, x: Tensor) -> Tensor:
        return draw(x) * 2 + draw(x) * 3

    for passes in ("cse", "cse{across_phases=true}"):
        graph = merged(step, torch.full((4, 4), 0.5), passes=passes)
        assert sum(ops.is_random(node.target) for node in graph.calls()) == 2


def test_uninitialised_memory_is_not_shared() -> None:
    def step(model: Net, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.new_empty(2).fill_(1.0), x.new_empty(2).fill_(2.0)

    graph = merged(step, torch.ones(4))
    first, second = (node.args[0] for node in graph.outputs)
    assert first is not second
    assert {node.target for node in (first, second)} == {aten.new_empty.default}


class Recomputed(torch.autograd.Function):
    """Computes its exponential again in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        [x] = ctx.saved_tensors
        return grad * x.exp()


class TwoPhases(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        return Recomputed.apply(F.linear(x, self.weight))  # pyright: ignore[reportReturnType]


def two_phase_graph() -> StepGraph:
    model = TwoPhases()
    return capture(mse_step, (model, SGD(model.parameters(), lr=0.1), X, Y), {}).graph


def test_tensors_are_merged_across_phases_only_on_request() -> None:
    kept = run_passes(two_phase_graph(), Pipeline.parse("cse"))
    assert [count(kept, aten.exp.default, phase) for phase in (Phase.FORWARD, Phase.BACKWARD)] == [1, 1]
    once = run_passes(two_phase_graph(), Pipeline.parse("cse{across_phases=true}"))
    assert [count(once, aten.exp.default, phase) for phase in (Phase.FORWARD, Phase.BACKWARD)] == [1, 0]


class Turned(torch.autograd.Function):
    """Turns its argument in the forward and in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(x)
        return x.t() * 1.5

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        [x] = ctx.saved_tensors
        return (grad * x.t()).t()


def test_views_are_merged_across_phases() -> None:
    def step(model: TwoPhases) -> None:
        Turned.apply(model.weight).sum().backward()  # pyright: ignore[reportOptionalMemberAccess]

    graph = capture(step, (TwoPhases(),), {}).graph
    weight = graph.placeholder("param.weight")
    assert [node.meta["phase"] for node in weight.users] == [Phase.FORWARD, Phase.BACKWARD]
    run_passes(graph, Pipeline.parse("cse"))
    assert [node.meta["phase"] for node in weight.users] == [Phase.FORWARD]


def test_numbers_are_merged_across_phases() -> None:
    graph = two_phase_graph()
    rate, loss, update = graph.placeholder("lr.0"), graph.outputs[0], graph.updates["param.weight"]
    for place in (loss, update):
        doubled = graph.insert(operator.mul, (rate, 2), like=place, before=place)
        place.args = (
            graph.insert(aten.mul.Tensor, (place.args[0], doubled), like=place, before=place),
            *place.args[1:],
        )
    assert [node.meta["phase"] for node in graph.calls() if node.target is operator.mul] == [
        Phase.FORWARD,
        Phase.OPTIMIZER,
    ]
    run_passes(graph, Pipeline.parse("cse"))
    assert count(graph, operator.mul) == 1


def test_a_merged_node_stands_for_all_it_was_merged_from() -> None:
    graph = two_phase_graph()
    origins = {origin for node in graph.calls() for origin in node.meta["origins"]}
    run_passes(graph, Pipeline.parse("cse{across_phases=true}"))
    assert {origin for node in graph.calls() for origin in node.meta["origins"]} == origins
    [exponential] = [node for node in graph.calls() if node.target is aten.exp.default]
    [product] = [node for node in graph.calls(Phase.BACKWARD) if node.target is aten.mul.Tensor]
    assert graph.forward_twin(product) is exponential
    assert set(graph.gradients) == {"weight"}


def test_equal_gradients_of_two_parameters_have_memory_of_their_own() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return self.a * x + self.b * x

    def step(model: nn.Module, x: Tensor) -> None:
        model(x).sum().backward()

    Twins(lambda: World(model=Sum()), step, call=lambda world, step, x: step(world.model, x)).steps(3, X)


def test_equal_outputs_have_memory_of_their_own() -> None:
    def step(model: Net, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, x * 2

    first, second = wholestep.compile(step)(Net(), torch.ones(4))
    first.add_(1)
    assert (first - second).tolist() == [1.0] * 4


@pytest.mark.parametrize("passes", ["cse", "cse{across_phases=true}", "simplify,cse{across_phases=true},reinplace"])
def test_merging_does_not_change_a_bit(passes: str) -> None:
    def build() -> World:
        model = TwoPhases()
        return World(model=model, optimizer=SGD(model.parameters(), lr=0.1, momentum=0.9))

    Twins(build, mse_step, passes=passes).steps(3, X, Y)
