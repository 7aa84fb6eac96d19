"""Fused and foreach updates: found as blocks, and cut by bucket without changing a bit (COMM-4)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from tests.simulated import Trial
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from wholestep import _torch
from wholestep.comm import find_optimizer_blocks
from wholestep.comm.optimizer_blocks import find_list_ops
from wholestep.graph import Phase, StepGraph

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
BUCKETS = 'allreduce{group=g,world=2},bucket{groups="2.weight 0.bias;0.weight 2.bias"}'
NAMES = ("0.weight", "0.bias", "2.weight", "2.bias")


def step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss


@cache
def trial(make: Callable[..., Optimizer], function: Callable[..., Any] = step, *, groups: bool = False) -> Trial:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    given: Any = [*model.parameters()]
    if groups:
        given = [{"params": given[::2], "lr": 0.02}, {"params": given[1::2], "weight_decay": 0.1}]
    return Trial.of(function, model, make(given, lr=0.05), X)


def list_ops(graph: StepGraph) -> list[str]:
    return [_torch.packet_name(item.node.target) for item in find_list_ops(graph)]


FUSED: dict[str, tuple[Callable[..., Optimizer], set[str]]] = {
    "sgd": (partial(SGD, fused=True), set()),
    "sgd momentum": (partial(SGD, fused=True, momentum=0.9), {"momentum_buffer"}),
    "adam": (partial(Adam, fused=True), {"exp_avg", "exp_avg_sq", "step"}),
    "adamw amsgrad": (partial(AdamW, fused=True, amsgrad=True), {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step"}),
}
FOREACH: dict[str, tuple[Callable[..., Optimizer], set[str]]] = {
    "sgd": (partial(SGD, foreach=True), set()),
    "sgd momentum": (partial(SGD, foreach=True, momentum=0.9, weight_decay=0.1), {"momentum_buffer"}),
    "sgd nesterov": (partial(SGD, foreach=True, momentum=0.9, nesterov=True), {"momentum_buffer"}),
    "adam": (partial(Adam, foreach=True), {"exp_avg", "exp_avg_sq", "step"}),
    "adamw amsgrad": (partial(AdamW, foreach=True, amsgrad=True), {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step"}),
    "adam maximize": (partial(Adam, foreach=True, maximize=True), {"exp_avg", "exp_avg_sq", "step"}),
}
OTHERS: dict[str, Callable[..., Optimizer]] = {
    "sgd plain": partial(SGD, foreach=False, momentum=0.9),
    "adamw plain": partial(AdamW, foreach=False),
    "rmsprop": partial(RMSprop, foreach=True),
    "adagrad fused": partial(Adagrad, fused=True),
}


# Blocks


@pytest.mark.parametrize("name", FUSED)
def test_a_fused_update_is_one_block(name: str) -> None:
    make, states = FUSED[name]
    graph = trial(make).graph
    # Step counters are counted up by a foreach op, a block of its own.
    [block] = [block for block in find_optimizer_blocks(graph) if block.kind != "foreach"]
    assert block.kind == name.split()[0]
    assert block.parameters == NAMES
    assert set(block.gradients) == set(graph.gradients.values())
    assert set(block.states) == states - {"step"}
    for key, inputs in block.states.items():
        assert inputs == [graph.placeholder(f"state.{parameter}.{key}") for parameter in NAMES]
    written = {f"param.{parameter}" for parameter in NAMES}
    written |= {f"state.{parameter}.{key}" for parameter in NAMES for key in states}
    assert set(block.outputs) == written
    assert all(graph.updates[slot_id] is value for slot_id, value in block.outputs.items())
    assert len(block.nodes) == 1


@pytest.mark.parametrize("name", FOREACH)
def test_a_foreach_update_is_one_block(name: str) -> None:
    make, states = FOREACH[name]
    graph = trial(make).graph
    [block] = find_optimizer_blocks(graph)
    assert (block.kind, block.parameters) == ("foreach", NAMES)
    assert set(block.states) == states
    assert set(block.gradients) == set(graph.gradients.values())
    assert list(block.nodes) == [item.node for item in find_list_ops(graph)]
    assert set(block.outputs) == set(graph.updates)


def test_two_groups_are_two_blocks() -> None:
    blocks = find_optimizer_blocks(trial(partial(AdamW, fused=True), groups=True).graph)
    assert [block.parameters for block in blocks if block.kind == "adamw"] == [NAMES[::2], NAMES[1::2]]


def test_updates_one_by_one_are_no_blocks() -> None:
    assert find_optimizer_blocks(trial(partial(Adam, foreach=False)).graph) == []


def test_gradients_behind_a_bucket_are_found() -> None:
    after = trial(partial(AdamW, fused=True)).after(BUCKETS)
    [block] = [block for block in find_optimizer_blocks(after) if block.kind == "adamw"]
    reduced = {name for node in block.gradients for name in node.meta["reduced_gradient_of"]}
    assert reduced == set(NAMES)


# Splitting

ALL: dict[str, Callable[..., Optimizer]] = {
    **{f"fused {name}": make for name, (make, _) in FUSED.items()},
    **{f"foreach {name}": make for name, (make, _) in FOREACH.items()},
    **OTHERS,
}


@pytest.mark.parametrize("groups", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("name", ALL)
def test_a_split_update_computes_the_same(name: str, groups: bool) -> None:
    tested = trial(ALL[name], groups=groups)
    after = tested.after(f"{BUCKETS},split_optimizer,overlap")
    tested.assert_same(after, average=0.5)


@pytest.mark.parametrize(("name", "make"), [(n, m) for n, m in ALL.items() if "plain" not in n])
def test_each_slice_belongs_to_one_bucket(name: str, make: Callable[..., Optimizer]) -> None:
    tested = trial(make)
    after = tested.after(f"{BUCKETS},split_optimizer")
    slices = {item.owners for item in find_list_ops(after)}
    assert slices == {("0.bias", "2.weight"), ("0.weight", "2.bias")}
    assert len(list_ops(after)) == 2 * len(list_ops(tested.graph))


def test_one_bucket_leaves_the_update_whole() -> None:
    tested = trial(partial(AdamW, fused=True))
    before = tested.after("allreduce{group=g,world=2},bucket")
    after = tested.after("allreduce{group=g,world=2},bucket,split_optimizer")
    assert str(after).partition("\n")[2] == str(before).partition("\n")[2]


def test_where_nothing_travels_named_updates_are_cut_off() -> None:
    tested = trial(partial(AdamW, fused=True))
    after = tested.after('split_optimizer{apart="0 2.bias"}')
    owners = [item.owners for item in find_list_ops(after) if "adamw" in str(item.node.target)]
    assert owners == [("2.weight",), ("0.weight", "0.bias", "2.bias")]
    tested.assert_same(after)
    assert list_ops(tested.after("split_optimizer")) == list_ops(tested.graph)


def test_parameters_without_a_bucket_form_a_slice() -> None:
    """A parameter whose gradient is empty, or comes from outside the step, does not travel."""

    class WithEmpty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.empty = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(0, 4))

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([x * self.weight, self.empty])

    model = WithEmpty()
    tested = Trial.of(step, model, SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True), X)
    after = tested.after("allreduce{group=g,world=2},bucket,split_optimizer")
    assert {item.owners for item in find_list_ops(after)} == {("weight",), ("empty",)}
    tested.assert_same(after, average=0.5)


def clipped(model: nn.Module, optimizer: Optimizer, x: Tensor, *, foreach: bool) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    clip_grad_norm_(model.parameters(), 0.1, foreach=foreach)
    optimizer.step()


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("name", ["fused adam", "foreach sgd momentum", "adamw plain"])
def test_a_global_norm_is_split_where_it_can_be(name: str, foreach: bool) -> None:
    tested = trial(ALL[name], partial(clipped, foreach=foreach))
    tested.assert_same(tested.after(f"{BUCKETS},split_optimizer,overlap"), average=0.5)


class Mixing(Optimizer):
    """Adds to every parameter the gradient of its neighbour: positions that belong to two parameters."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            gradients = [parameter.grad for parameter in group["params"]]
            sums = [gradient.sum() for gradient in gradients]
            torch._foreach_add_(group["params"], [*sums[1:], sums[0]])  # pyright: ignore[reportPrivateImportUsage]


def test_an_update_that_cannot_be_told_apart_says_why(caplog: pytest.LogCaptureFixture) -> None:
    tested = trial(Mixing)
    [item] = find_list_ops(tested.graph)
    assert (item.owners, item.problem) == (None, "position 0 belongs to several parameters at once")
    with caplog.at_level(logging.INFO, "wholestep"):
        after = tested.after(f"{BUCKETS},split_optimizer,overlap")
    assert "aten._foreach_add.List stays whole: position 0 belongs to several parameters at once" in caplog.text
    assert len(list_ops(after)) == 1
    tested.assert_same(after, average=0.5)


class OfConstants(Mixing):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        ones = torch._foreach_add([torch.ones(()), torch.ones(())], 1)  # pyright: ignore[reportPrivateImportUsage]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad * ones[0] * 0.1)


def test_an_op_on_no_parameter_says_so(caplog: pytest.LogCaptureFixture) -> None:
    tested = trial(OfConstants)
    with caplog.at_level(logging.INFO, "wholestep"):
        tested.assert_same(tested.after(f"{BUCKETS},split_optimizer,overlap"), average=0.5)
    assert "stays whole: position 0 belongs to no parameter" in caplog.text


def test_list_ops_of_the_forward_are_nobodys_business() -> None:
    def step_with_lists(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
        optimizer.zero_grad()
        [scaled, _] = torch._foreach_mul([x, x], 2.0)  # pyright: ignore[reportPrivateImportUsage]
        model(scaled).square().mean().backward()
        optimizer.step()

    graph = trial(partial(SGD, fused=True), step_with_lists).graph
    assert any("_foreach_mul" in str(node.target) for node in graph.calls(Phase.FORWARD))
    assert list_ops(graph) == ["_fused_sgd"]
