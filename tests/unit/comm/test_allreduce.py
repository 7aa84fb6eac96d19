"""Which gradients ranks must agree on (COMM-6), and who reads them averaged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from tests.simulated import Trial
from torch import Tensor, fx, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Optimizer

from wholestep.comm import reducible_gradients
from wholestep.graph import Phase, StepGraph, nodes_in, ops
from wholestep.passes import Pipeline, run_passes

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
MEAN = "allreduce{group=g,world=2}"


class Net(nn.Module):
    """Two layers; what `second` is, its test says."""

    def __init__(self, second: nn.Module | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.second = nn.Linear(4, 4, bias=False) if second is None else second

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


def plain_step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def forgetful_step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    """Leaves no gradients behind, so that nothing keeps equal ones from being one value."""
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


class Shift(nn.Module):
    """Its gradient is also what flows further back."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift


def trial(step: Callable[..., Any] = plain_step, model: nn.Module | None = None, x: Tensor = X) -> Trial:
    torch.manual_seed(0)
    model = Net() if model is None else model
    return Trial.of(step, model, SGD(model.parameters(), lr=0.1, foreach=False), x)


def keys(graph: StepGraph) -> list[tuple[str, int]]:
    return [(gradient.key, gradient.wave) for gradient in reducible_gradients(graph)]


def calls(graph: StepGraph, *targets: Any) -> list[fx.Node]:
    return [node for node in graph.calls() if node.target in targets]


def source_of(reduced: fx.Node) -> fx.Node:
    """The local gradient behind a wait."""
    [issue] = reduced.all_input_nodes
    [scaled] = issue.all_input_nodes
    return scaled.all_input_nodes[0]


# What is reducible


def test_gradients_come_in_the_order_of_the_backward() -> None:
    graph = trial().graph
    assert keys(graph) == [("second.weight", 0), ("first.weight", 0)]
    assert {gradient.key: gradient.node for gradient in reducible_gradients(graph)} == graph.gradients


def test_a_tied_parameter_has_one_gradient_with_its_first_name() -> None:
    model = Net()
    model.get_submodule("second").weight = model.first.weight
    graph = trial(model=model).graph
    assert keys(graph) == [("first.weight", 0)]


class TwoBiases(nn.Module):
    """Their gradients are equal, and one value."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(4)), nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.a + self.b


def test_parameters_with_the_same_gradient_share_a_message() -> None:
    tested = trial(forgetful_step, TwoBiases())
    [gradient] = reducible_gradients(tested.graph)
    assert sorted(gradient.names) == ["a", "b"]
    after = tested.after(MEAN)
    assert len(calls(after, ops.ALL_REDUCE)) == 1
    tested.assert_same(after, average=0.5)


def test_accumulated_gradients_are_reduced_once() -> None:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
        optimizer.zero_grad()
        for part in x.split(1):
            model(part).square().mean().backward()
        optimizer.step()

    tested = trial(step)
    assert keys(tested.graph) == [("second.weight", 0), ("first.weight", 0)]
    after = tested.after(MEAN)
    assert len(calls(after, ops.ALL_REDUCE)) == 2
    tested.assert_same(after, average=0.5)


def test_a_gradient_that_is_used_and_then_added_to_travels_twice() -> None:

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        model(x).abs().mean().backward()
        optimizer.step()

    assert keys(trial(step).graph) == [
        ("second.weight#1", 0),
        ("first.weight#1", 0),
        ("second.weight", 1),
        ("first.weight", 1),
    ]


def test_two_rounds_are_two_waves() -> None:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
        for _ in range(2):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

    tested = trial(step)
    assert keys(tested.graph) == [
        ("second.weight#1", 0),
        ("first.weight#1", 0),
        ("second.weight", 1),
        ("first.weight", 1),
    ]
    tested.assert_same(tested.after(MEAN), average=0.5)


def test_an_earlier_gradient_that_nobody_uses_does_not_travel() -> None:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
        model(x).abs().mean().backward()
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    assert keys(trial(step).graph) == [("second.weight", 0), ("first.weight", 0)]


class WithEmpty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.nothing = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(0, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x * self.weight, self.nothing])


def test_empty_and_missing_gradients_do_not_travel() -> None:
    model = nn.ModuleDict({"used": WithEmpty(), "unused": nn.Linear(2, 2), "frozen": nn.Linear(4, 4)})
    model["frozen"].requires_grad_(False)

    def step(model: nn.ModuleDict, optimizer: Optimizer, x: Tensor) -> None:
        optimizer.zero_grad()
        model["used"](model["frozen"](x)).square().mean().backward()
        optimizer.step()

    tested = trial(step, model)
    assert keys(tested.graph) == [("used.weight", 0)]
    tested.assert_same(tested.after(MEAN), average=0.5)


# Who reads what


def test_one_weight_before_and_after() -> None:
    tested = trial(model=nn.Linear(4, 1, bias=False))
    wanted = (Phase.COMM, Phase.OPTIMIZER)

    def code(graph: StepGraph) -> str:
        nodes = [node for node in graph.calls() if node.meta["phase"] in wanted]
        lines = [f"{n.name} = {n.target}({', '.join(map(str, n.args))})" for n in nodes]
        return "\n".join([*lines, f"results {graph.results}"]) + "\n"

    assert_expected_inline(
        code(tested.graph),
        """\
neg = <built-in function neg>(lr_0)
add = aten.add.Tensor(param_weight, mm_1)
results {'grad.weight': mm_1}
""",
    )
    assert_expected_inline(
        code(tested.after(MEAN)),
        """\
mul_tensor = aten.mul.Tensor(mm_1, 0.5)
all_reduce_default = _c10d_functional.all_reduce.default(mul_tensor, sum, g)
wait_tensor_default = _c10d_functional.wait_tensor.default(all_reduce_default)
neg = <built-in function neg>(lr_0)
add = aten.add.Tensor(param_weight, wait_tensor_default)
results {'grad.weight': wait_tensor_default}
""",
    )


def test_only_what_comes_behind_the_backward_reads_the_average() -> None:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> tuple[Tensor, Tensor]:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        norm = clip_grad_norm_(model.parameters(), 0.1, foreach=False)
        optimizer.step()
        gradient = next(model.parameters()).grad
        assert gradient is not None
        return norm, gradient.sum()

    tested = trial(step)
    after = tested.after(MEAN)
    for wait in calls(after, ops.WAIT):
        assert {user.meta["phase"] for user in wait.users if user.op != "output"} <= {Phase.OPTIMIZER}
        local = source_of(wait)
        assert not [user for user in local.users if user.meta.get("phase") is Phase.OPTIMIZER]
    tested.assert_same(after, average=0.5)


def test_the_backward_goes_on_with_local_values() -> None:
    tested = trial(forgetful_step, nn.Sequential(nn.Linear(4, 4), Shift()))
    after = tested.after(MEAN)
    gradient = after.gradients["1.shift"]
    assert {user.meta["phase"] for user in gradient.users} == {Phase.BACKWARD, Phase.COMM}
    tested.assert_same(after, average=0.5)


def test_the_gradient_of_an_argument_stays_local() -> None:
    tested = trial(plain_step, Shift(), X.clone().requires_grad_())
    after = tested.after(MEAN)
    [wait] = calls(after, ops.WAIT)
    assert after.results["grad.shift"] is wait
    assert str(after.results["grad.x"]) == str(tested.graph.results["grad.x"])
    # The same, where both are one value.
    same = tested.graph.copy()
    same.set_returned(results=dict.fromkeys(same.results, same.gradients["shift"]))
    after = run_passes(same, Pipeline.parse(MEAN))
    [wait] = calls(after, ops.WAIT)
    assert after.results == {"grad.shift": wait, "grad.x": source_of(wait)}


def test_returned_gradients_are_the_average() -> None:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor | None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        return next(model.parameters()).grad

    tested = trial(step, nn.Linear(4, 2, bias=False))
    after = tested.after(MEAN)
    [wait] = calls(after, ops.WAIT)
    assert nodes_in(after.outputs) == [wait]
    assert after.results["grad.weight"] is wait
    tested.assert_same(after, average=0.5)


@pytest.mark.parametrize("world", [2, 3, 7])
def test_the_mean_is_scaled_before_it_is_sent(world: int) -> None:
    tested = trial()
    after = tested.after(f"allreduce{{group=g,world={world}}}")
    for issue in calls(after, ops.ALL_REDUCE):
        [scaled] = issue.all_input_nodes
        assert (scaled.target, scaled.args[1]) == (torch.ops.aten.mul.Tensor, 1.0 / world)
        assert issue.args[1:] == ("sum", "g")
    tested.assert_same(after, average=1.0 / world)


def test_a_sum_is_not_scaled_and_not_made_in_the_gradients_memory() -> None:
    tested = trial()
    after = tested.after("allreduce{group=g,world=2,average=false}")
    assert [issue.all_input_nodes for issue in calls(after, ops.ALL_REDUCE)] == [[g] for g in after.gradients.values()]
    tested.assert_same(after, average=1.0)


def test_what_a_message_carries_is_noted() -> None:
    after = trial(forgetful_step, TwoBiases()).after(MEAN)
    [issue], [wait] = calls(after, ops.ALL_REDUCE), calls(after, ops.WAIT)
    [(key, names)] = issue.meta["reduces"]
    assert key == names[0]
    assert wait.meta["reduced_gradient_of"] == names
    assert sorted(names) == ["a", "b"]
    assert (issue.meta["phase"], wait.meta["phase"], issue.meta["wave"]) == (Phase.COMM, Phase.COMM, 0)
