"""Simplify removes views and copies that change nothing, and keeps those the user asked for."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from tests.twins import Twins, World, pair, small_world
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from wholestep.capture import capture
from wholestep.graph import StepGraph
from wholestep.passes import Pipeline, run_passes

aten = torch.ops.aten
X, Y = pair()


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0, 3.0, 4.0]))
        self.register_buffer("last", torch.zeros(4))
        self.last: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def captured(function: Callable[..., Any], *args: Any) -> StepGraph:
    return capture(function, (Scale(), *args), {}).graph


def simplified(function: Callable[..., Any], *args: Any) -> StepGraph:
    return run_passes(captured(function, *args), Pipeline.parse("simplify"))


def code(graph: StepGraph) -> str:
    """The statements of a printed graph without comments, and what it returns in one line."""
    body, _, returned = str(graph).partition("):\n")[2].partition("    return ")
    lines = [line.partition("  # ")[0].strip().replace("torch.ops.", "") for line in body.splitlines()]
    returned = " ".join(returned.split()).replace("{ }", "{}")
    return "\n".join([*(line for line in lines if line), f"return {returned}"]) + "\n"


def targets(graph: StepGraph) -> list[Any]:
    return [node.target for node in graph.calls()]


def test_views_and_copies_before_and_after() -> None:
    def step(model: Scale, x: Tensor) -> tuple[Tensor, Tensor]:
        turned = x.detach().t().t()
        scaled = model(turned).clone()
        flat = scaled.view(-1).view(2, 4)
        return flat + 1, flat[0].clone()

    graph = captured(step, torch.ones(2, 4))
    assert_expected_inline(
        code(graph),
        """\
detach = aten.detach.default(batch_x)
t = aten.t.default(detach)
t_1 = aten.t.default(t)
mul = aten.mul.Tensor(t_1, param_weight)
clone = aten.clone.default(mul)
view = aten.view.default(clone, [-1])
view_1 = aten.view.default(view, [2, 4])
add = aten.add.Tensor(view_1, 1)
select = aten.select.int(view_1, 0, 0)
clone_1 = aten.clone.default(select)
return { 'outputs': (add, clone_1), 'updates': {}, 'results': {}, }
""",
    )
    assert_expected_inline(
        code(run_passes(graph, Pipeline.parse("simplify"))),
        """\
mul = aten.mul.Tensor(batch_x, param_weight)
view = aten.view.default(mul, [-1])
view_1 = aten.view.default(view, [2, 4])
add = aten.add.Tensor(view_1, 1)
select = aten.select.int(view_1, 0, 0)
clone_1 = aten.clone.default(select)
return { 'outputs': (add, clone_1), 'updates': {}, 'results': {}, }
""",
    )


def test_a_gradient_goes_straight_into_its_parameter() -> None:
    def step(model: Scale, optimizer: Optimizer, x: Tensor) -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    model = Scale()
    graph = capture(step, (model, SGD(model.parameters(), lr=0.1, foreach=False), torch.ones(4)), {}).graph
    marked = graph.gradients["weight"]
    computed = marked.args[0]
    assert marked.target is aten.detach.default
    run_passes(graph, Pipeline.parse("simplify"))
    assert aten.detach.default not in targets(graph)
    assert graph.gradients["weight"] is graph.results["grad.weight"] is computed
    assert graph.updates["param.weight"].args[1] is computed


@pytest.mark.parametrize(
    "give",
    [
        lambda model, x: x.clone(),
        lambda model, x: x.clone().view(-1),
        lambda model, x: {"a": [x.clone().t().t()]},
        lambda model, x: model.last.clone(),
        lambda model, x: (model.weight.detach().clone(), model.weight.detach().clone()),
    ],
    ids=["copy", "view_of_a_copy", "nested", "buffer", "twice"],
)
def test_copies_that_the_user_gets_stay(give: Callable[[Scale, Tensor], Any]) -> None:
    def step(model: Scale, x: Tensor) -> Any:
        return give(model, x)

    before = captured(step, torch.ones(2, 4))
    num_copies = targets(before).count(aten.clone.default)
    assert num_copies > 0
    assert targets(simplified(step, torch.ones(2, 4))).count(aten.clone.default) == num_copies


def test_a_copy_that_is_kept_as_a_gradient_stays() -> None:
    def step(model: Scale, x: Tensor) -> None:
        model.weight.grad = x.clone()

    graph = simplified(step, torch.ones(4))
    assert targets(graph) == [aten.clone.default]
    assert graph.results["grad.weight"].target is aten.clone.default


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.t().contiguous(),
        lambda x: x[:, ::2].clone(),
        lambda x: x[0].expand(2, 4).clone(),
        lambda x: x.double(),
    ],
    ids=["contiguous", "strided", "expanded", "dtype"],
)
def test_copies_that_change_layout_or_dtype_stay(change: Callable[[Tensor], Tensor]) -> None:
    def step(model: Scale, x: Tensor) -> Tensor:
        return change(x) + 1

    def copies(graph: StepGraph) -> list[Any]:
        return [target for target in targets(graph) if target in (aten.clone.default, aten._to_copy.default)]

    before = captured(step, torch.ones(2, 4))
    assert copies(before)
    assert copies(simplified(step, torch.ones(2, 4))) == copies(before)


def test_a_value_written_to_a_buffer_is_the_buffers_new_value() -> None:
    def step(model: Scale, x: Tensor) -> None:
        model.last.copy_(x + 1)

    assert aten.copy.default in targets(captured(step, torch.ones(4)))
    graph = simplified(step, torch.ones(4))
    assert targets(graph) == [aten.add.Tensor]
    assert graph.updates["buffer.last"].target is aten.add.Tensor


@pytest.mark.parametrize("source", [torch.ones(1), torch.ones(4, dtype=torch.float64)], ids=["broadcast", "cast"])
def test_a_write_that_converts_its_value_stays(source: Tensor) -> None:
    def step(model: Scale, x: Tensor) -> None:
        model.last.copy_(x)

    assert targets(simplified(step, source)) == [aten.copy.default]


def test_the_copy_of_a_number_made_in_the_step_goes() -> None:
    def step(model: Scale, x: Tensor) -> Tensor:
        return x * torch.tensor(2.0)

    assert aten.lift_fresh_copy.default in targets(captured(step, torch.ones(4)))
    assert targets(simplified(step, torch.ones(4))) == [aten.mul.Tensor]


def test_a_number_made_in_the_step_and_then_written_is_made_anew_in_each_step() -> None:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        counter = torch.tensor(2.0)
        counter.add_(x.sum())
        counted = counter.clone()
        counter.mul_(2)
        return counted, counter

    Twins(small_world(), step).steps(3, X, Y)


def test_old_values_that_are_read_after_a_write_are_kept() -> None:
    def build() -> World:
        model = Scale()
        return World(model=model, optimizer=SGD(model.parameters(), lr=0.1))

    def step(model: Scale, optimizer: Optimizer, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        optimizer.zero_grad()
        before = model.weight.detach().clone()
        window = model.last[1:3]
        old = window.clone()
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        model.last.add_(1)
        return before, model.weight.detach() - before, old, window.clone(), loss

    Twins(build, step).steps(3, X, Y)
