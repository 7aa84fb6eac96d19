"""Where a model is cut: marks in the forward, modules by name, policies; what is refused, and how it is said."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.cuts import CutRun, MicroStep, micro_step
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import wholestep
from wholestep.capture import capture
from wholestep.errors import SplitError
from wholestep.pipe import Layer, SplitPlan, SplitPoint, build_schedule, pipe_split, plan_split
from wholestep.pipe.borders import missing_module
from wholestep.pipe.cut import cut
from wholestep.pipe.placement import forward_calls

BEGINNING, END = SplitPoint.BEGINNING, SplitPoint.END


def squared(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def batches(count: int = 2) -> list[Tensor]:
    return [torch.randn(2, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(count)]


def step_of(model: nn.Module, passes: str = "simplify,cse,dce") -> MicroStep:
    return micro_step(model, squared, batches(), passes)


def planned(step: MicroStep, **options: Any) -> SplitPlan:
    return plan_split(step.captured, step.graph, **options)


def modules_by_stage(step: MicroStep, plan: SplitPlan) -> list[set[str]]:
    """The modules whose ops each stage has."""
    edges = [0, *plan.borders, plan.num_calls]
    calls = forward_calls(step.graph)
    return [
        {node.meta["fqn"] for node in calls[edges[i] : edges[i + 1]] if node.meta.get("fqn")}
        for i in range(len(edges) - 1)
    ]


def assert_trains(step: MicroStep, plan: SplitPlan) -> None:
    parts = cut(step.graph, plan.borders)
    schedule = build_schedule("1f1b", len(parts.stages), len(step.batches))
    CutRun(step, parts).run(schedule).assert_like_eager()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.second = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.relu(self.first(x)))


class Stack(nn.Module):
    """Blocks, with marks before those in `marked`, inside the model's own loop."""

    def __init__(self, marked: Sequence[int] = (), num_blocks: int = 6) -> None:
        super().__init__()
        self.marked = tuple(marked)
        self.embed = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.unused = nn.Linear(4, 4)
        self.idle = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for number, block in enumerate(self.blocks):
            if number in self.marked:
                pipe_split()
            x = self.idle(block(x))
        return x


@functools.cache
def stack_step() -> MicroStep:
    """The step of a stack without marks, for tests that only read it."""
    return step_of(Stack())


# Marks


def test_a_mark_does_nothing_in_eager() -> None:
    torch.manual_seed(0)
    marked = Stack([2, 4])
    plain = Stack()
    plain.load_state_dict(marked.state_dict())
    (x,) = batches(1)
    assert torch.equal(marked(x), plain(x))
    assert vars(marked).keys() == vars(plain).keys()
    assert pipe_split() is None


def test_marks_leave_the_captured_graph_as_it_is() -> None:
    torch.manual_seed(0)
    marked = Stack([2, 4])
    plain = Stack()
    graphs = [step_of(model, "simplify").captured.graph for model in (marked, plain)]
    assert str(graphs[0]) == str(graphs[1])
    assert [sorted(node.meta) for node in graphs[0].nodes] == [sorted(node.meta) for node in graphs[1].nodes]
    assert not any("epoch" in node.meta for graph in graphs for node in graph.nodes)


def test_a_marked_model_trains_without_a_pipeline() -> None:
    torch.manual_seed(0)
    model = Stack([2])
    twin = copy.deepcopy(model)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = squared(model, x)
        loss.backward()
        optimizer.step()
        return loss

    (x,) = batches(1)
    step = wholestep.compile(train)
    ours = step(model, torch.optim.SGD(model.parameters(), lr=0.1), x)
    assert torch.equal(ours, train(twin, torch.optim.SGD(twin.parameters(), lr=0.1), x))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


@pytest.mark.parametrize("passes", ["", "simplify", "simplify,cse,dce"])
def test_marks_in_a_loop_are_found_again_behind_passes(passes: str) -> None:
    step = step_of(Stack([2, 5]), passes)
    plan = planned(step)
    prefixes = [{name.rpartition(".")[0] for name in names} - {""} for names in modules_by_stage(step, plan)]
    inside = [{name for name in names if "." in name} for names in prefixes]
    assert inside == [{f"blocks.{n}" for n in range(2)}, {f"blocks.{n}" for n in range(2, 5)}, {"blocks.5"}]
    assert [stage.where.split("test_borders.py:")[0] for stage in plan.stages[1:]] == ["pipe_split() at "] * 2
    assert [stage.where.rpartition(" (")[2] for stage in plan.stages[1:]] == ["call 1 of 2)", "call 2 of 2)"]
    assert [stage.reason for stage in plan.stages] == ["", "marked by the model", "marked by the model"]
    assert_trains(step, plan)


def test_a_mark_means_the_same_place_as_the_module_behind_it() -> None:
    torch.manual_seed(0)
    marked = planned(step_of(Stack([1, 3])))
    named = planned(stack_step(), points={"blocks.1": BEGINNING, "blocks.3": BEGINNING})
    assert marked.borders == named.borders


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        pipe_split()
        return self.second(x)


class Twice(nn.Module):
    """Calls a marked module twice: two borders, and parameters that three stages share."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.inner(x).tanh())


def test_a_mark_in_a_module_that_is_called_twice_is_two_borders() -> None:
    step = step_of(Twice())
    plan = planned(step)
    assert len(plan.stages) == 3
    assert_trains(step, plan)


def test_a_mark_in_a_checkpointed_region_counts_once() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)  # pyright: ignore[reportReturnType]

    step = step_of(Checkpointed())
    assert len(planned(step).stages) == 2
    assert_trains(step, planned(step))


class MarkedBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        pipe_split()
        return grad_outputs[0] * 2


class WithMarkedBackward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return MarkedBackward.apply(self.first(x))  # pyright: ignore[reportReturnType]


def test_a_mark_in_a_backward_is_refused_where_the_model_is_cut() -> None:
    step = step_of(WithMarkedBackward())
    with pytest.raises(
        SplitError, match=r"pipe_split\(\) at test_borders.py:\d+ runs in the backward: call it in the forward"
    ):
        planned(step)


@pytest.mark.parametrize(
    ("before", "between", "behind", "message"),
    [
        (1, 0, 0, "stage 0 would be empty: there is no op between the beginning of the forward and pipe_split"),
        (
            0,
            2,
            0,
            r"stage 1 would be empty: there is no op between pipe_split\(\) at \S+:\d+ \(call 1 of 2\) and pipe_split",
        ),
        (
            0,
            0,
            1,
            r"stage 1 would be empty: there is no op between pipe_split\(\) at \S+:\d+ and the end of the forward",
        ),
    ],
)
def test_marks_with_nothing_between_them_are_refused(before: int, between: int, behind: int, message: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        for _ in range(before):
            pipe_split()
        x = model[0](x)  # pyright: ignore[reportIndexIssue]
        for _ in range(between):
            pipe_split()
        return model[1](x).square().mean()  # pyright: ignore[reportIndexIssue]

    def run(model: nn.Module, x: Tensor) -> None:
        value = loss(model, x)
        for _ in range(behind):
            pipe_split()
        value.backward()

    captured = capture(run, (model, batches(1)[0]), {})
    with pytest.raises(SplitError, match=message):
        plan_split(captured, captured.graph)


# Names


def test_both_sides_of_a_module() -> None:
    step = stack_step()
    plan = planned(step, points={"blocks.2": [BEGINNING, END]})
    names = modules_by_stage(step, plan)
    assert names[1] == {"blocks.2", "blocks.2.first", "blocks.2.second"}
    assert [stage.where for stage in plan.stages[1:]] == ["the beginning of 'blocks.2'", "the end of 'blocks.2'"]
    assert_trains(step, plan)
    assert planned(step, points=["blocks.2"]).borders == plan.borders[:1]
    assert planned(step, points={"blocks.1": END}).borders == plan.borders[:1]


def test_a_module_inside_another() -> None:
    step = stack_step()
    plan = planned(step, points=["blocks.3.second"])
    assert "blocks.3.first" in modules_by_stage(step, plan)[0]
    assert "blocks.3.second" in modules_by_stage(step, plan)[1]
    assert_trains(step, plan)


class Reused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)
        self.other_a = self.a

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(self.b(self.a(self.b(x).tanh()).tanh()).tanh()).tanh())


def test_a_reused_module_reaches_from_its_first_call_to_its_last() -> None:
    step = step_of(Reused())
    plan = planned(step, points={"a": [BEGINNING, END]})
    first, middle, last = modules_by_stage(step, plan)
    assert (first & {"a", "b"}, middle & {"a", "b"}, last & {"a", "b"}) == ({"b"}, {"a", "b"}, {"b"})
    assert planned(step, points={"other_a": [BEGINNING, END]}).borders == plan.borders
    assert_trains(step, plan)


def test_a_module_that_another_one_runs_counts_for_both() -> None:
    class Borrowing(nn.Module):
        def __init__(self, lent: nn.Module) -> None:
            super().__init__()
            self._lent = [lent]

        def forward(self, x: Tensor) -> Tensor:
            return self._lent[0](x)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.start = nn.Linear(4, 4)
            self.borrowing = Borrowing(self.linear)

        def forward(self, x: Tensor) -> Tensor:
            return self.borrowing(self.start(x)).tanh()

    step = step_of(Model())
    assert planned(step, points=["borrowing"]).borders == planned(step, points=["linear"]).borders


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("blocks.9", "no module 'blocks.9': 'blocks' has '0' to '5'"),
        ("blocks.2.third.x", "no module 'blocks.2.third.x': 'blocks.2' has 'first', 'second'"),
        ("block.2", "no module 'block.2': the model has 'embed', 'blocks', 'unused', 'idle'"),
        ("embed.x", "no module 'embed.x': 'embed' has no modules inside"),
        ("unused", "module 'unused' is never called by the forward, so there is no place to cut at"),
        ("idle", "module 'idle' has no ops in this step, so it has neither beginning nor end: name another"),
        ("blocks", "module 'blocks' is never called by the forward, so there is no place to cut at"),
        (
            "embed",
            "stage 0 would be empty: there is no op between the beginning of the forward and the beginning of 'embed'",
        ),
    ],
)
def test_a_name_that_does_not_do_is_refused_by_name(name: str, message: str) -> None:
    step = stack_step()
    with pytest.raises(SplitError) as error:
        planned(step, points={name: BEGINNING})
    assert str(error.value) == message


def test_long_lists_of_modules_are_cut_short() -> None:
    names = ["", *(f"layer_{number}" for number in range(20))]
    assert missing_module("x", names).endswith("'layer_6', 'layer_7' and 12 more")


def test_two_names_for_one_place_are_refused() -> None:
    step = stack_step()
    with pytest.raises(SplitError) as error:
        planned(step, points={"blocks.1": END, "blocks.2": BEGINNING})
    assert str(error.value) == (
        "stage 1 would be empty: there is no op between the end of 'blocks.1' and the beginning of 'blocks.2'"
    )


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ("blocks.2", "points are a list of names or a dict"),
        ({"blocks.2": "middle"}, "'blocks.2' is cut at SplitPoint.BEGINNING or SplitPoint.END, not at 'middle'"),
    ],
)
def test_points_of_another_kind_are_refused(points: Any, message: str) -> None:
    with pytest.raises(SplitError, match=message):
        planned(stack_step(), points=points)


def test_marks_and_names_add_up() -> None:
    step = step_of(Stack([2]))
    plan = planned(step, points=["blocks.4"], num_stages=3)
    assert plan.borders == planned(stack_step(), points=["blocks.2", "blocks.4"]).borders
    with pytest.raises(SplitError, match=r"the borders that are given \(pipe_split\(\) at .*\) make 2 stages, not 4"):
        planned(step, num_stages=4)


def test_something_has_to_say_where_to_cut() -> None:
    step = stack_step()
    with pytest.raises(
        SplitError, match="nothing says where to cut: give num_stages, points or a policy, or call pipe_split"
    ):
        planned(step)
    for wrong in (0, -1, True, 2.0):
        with pytest.raises(SplitError, match="num_stages is a whole number, 1 or more, not"):
            planned(step, num_stages=wrong)
    assert planned(step, num_stages=1).borders == ()


# Policies


def test_a_policy_sees_modules_in_order_with_their_costs() -> None:
    seen: list[Layer] = []

    def policy(layers: Sequence[Layer]) -> list[str]:
        seen.extend(layers)
        blocks = [layer for layer in layers if layer.kind == "Block"]
        return [layer.name for layer in blocks[2::2]]

    step = stack_step()
    plan = planned(step, policy=policy)
    assert [stage.where for stage in plan.stages[1:]] == ["the beginning of 'blocks.2'", "the beginning of 'blocks.4'"]
    assert {stage.reason for stage in plan.stages[1:]} == {"by policy"}
    names = [layer.name for layer in seen]
    assert names[:5] == ["", "embed", "blocks.0", "blocks.0.first", "blocks.0.second"]
    assert [layer.depth for layer in seen[:5]] == [0, 1, 2, 3, 3]
    by_name = {layer.name: layer for layer in seen}
    block, first, second = (by_name[name] for name in ("blocks.0", "blocks.0.first", "blocks.0.second"))
    assert block.begin <= first.begin < first.end <= second.begin < second.end <= block.end
    assert block.forward_us > first.forward_us + second.forward_us > 0
    assert block.parameter_bytes == 4 * (4 * 8 + 8 + 8 * 4 + 4)


def test_what_a_policy_must_return() -> None:
    step = stack_step()
    assert planned(step, policy=lambda _: {"blocks.1": END}).stages[1].where == "the end of 'blocks.1'"
    with pytest.raises(SplitError, match="a split policy returns names of modules, not NoneType"):
        planned(step, policy=lambda _: None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(SplitError, match="no module 'x'"):
        planned(step, policy=lambda _: ["x"])


def test_cutting_leaves_the_model_alone() -> None:
    model = Stack([2])
    before = copy.deepcopy(model.state_dict())
    names = set(vars(model))
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    step = step_of(model)
    planned(step)
    planned(step)
    assert set(vars(model)) == names
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()] == hooks
    assert all(parameter.grad is None for parameter in model.parameters())
