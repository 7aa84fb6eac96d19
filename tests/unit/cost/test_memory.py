"""Predicted live memory: by hand on small graphs, against measured runs on random and on real steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import fx, nn
from torch.fx.node import map_arg
from torch.optim import Optimizer

import wholestep
from wholestep.cost import measure_peak, profile_memory
from wholestep.graph import Phase, Slot, SlotKind, StepGraph
from wholestep.zoo import Batch, get
from wholestep.zoo.optimizers import OPTIMIZERS

aten = torch.ops.aten
KILO = 1000  # elements of one byte


class Builder:
    """Writes a step graph op by op, on tensors without memory."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.slots: dict[str, Slot] = {}

    def slot(self, name: str, num_bytes: int, kind: SlotKind = SlotKind.PARAM) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = torch.empty(num_bytes, dtype=torch.uint8, device="meta")
        self.slots[node.name] = Slot(kind, name)
        return node

    def call(self, target: Callable[..., Any], *args: Any, value: torch.Tensor | None = None) -> fx.Node:
        node = self.graph.call_function(target, args)
        values = map_arg(args, lambda arg: arg.meta["val"])
        node.meta |= {"val": target(*values) if value is None else value, "phase": Phase.FORWARD, "fqn": "layers.0"}
        return node

    def finish(self, *outputs: fx.Node) -> StepGraph:
        self.graph.output({"outputs": outputs, "updates": {}, "results": {}})
        return StepGraph(fx.GraphModule(nn.Module(), self.graph), self.slots, None)


def test_values_die_after_their_last_use_and_slots_never() -> None:
    build = Builder()
    x = build.slot("x", 5 * KILO)
    a = build.call(aten.bitwise_not.default, x)
    b = build.call(aten.bitwise_not.default, a)
    c = build.call(aten.bitwise_not.default, b)
    profile = profile_memory(build.finish(c))
    assert profile.live_bytes == (10 * KILO, 15 * KILO, 15 * KILO)  # a while b is made, b while c is made
    assert (profile.slot_bytes, profile.peak_bytes) == (5 * KILO, 15 * KILO)
    assert (profile.peak_index, profile.peak_node) == (1, b.name)
    assert [value.name for value in profile.at_peak] == [a.name, b.name, "param.x"]
    assert [value.fqn for value in profile.at_peak] == ["layers.0", "layers.0", ""]
    assert profile.at_peak[2].slot == Slot(SlotKind.PARAM, "x")


def test_a_view_keeps_its_base_alive_and_costs_nothing() -> None:
    build = Builder()
    x = build.slot("x", KILO)
    a = build.call(aten.bitwise_not.default, x)
    view = build.call(aten.slice.Tensor, a, 0, 0, 1)
    b = build.call(aten.bitwise_not.default, x)
    c = build.call(aten.bitwise_or.Tensor, b, view)
    assert profile_memory(build.finish(c)).live_bytes == (2 * KILO, 2 * KILO, 3 * KILO, 4 * KILO)


def test_an_in_place_op_allocates_nothing_although_its_fake_value_is_another_storage() -> None:
    build = Builder()
    x = build.slot("x", KILO)
    a = build.call(aten.bitwise_not.default, x)
    stale = torch.empty(KILO, dtype=torch.uint8, device="meta")
    b = build.call(aten.bitwise_not_.default, a, value=stale)
    c = build.call(aten.bitwise_not.default, b)
    profile = profile_memory(build.finish(c))
    assert profile.live_bytes == (2 * KILO, 2 * KILO, 3 * KILO)
    assert [value.name for value in profile.at_peak] == [a.name, c.name, "param.x"]


def test_what_nobody_uses_dies_at_once_and_what_is_returned_stays() -> None:
    build = Builder()
    x = build.slot("x", KILO)
    build.call(aten.bitwise_not.default, x)
    kept = build.call(aten.bitwise_not.default, x)
    last = build.call(aten.bitwise_not.default, x)
    assert profile_memory(build.finish(kept, last)).live_bytes == (2 * KILO, 2 * KILO, 3 * KILO)


def test_a_graph_without_ops_needs_its_slots() -> None:
    build = Builder()
    x = build.slot("x", KILO)
    profile = profile_memory(build.finish(x))
    assert (profile.peak_bytes, profile.live_bytes) == (KILO, ())


def test_measured_peak_follows_lifetimes() -> None:
    def work(x: torch.Tensor) -> torch.Tensor:
        a = torch.zeros(1000, dtype=torch.uint8)
        b = a.clone()
        view = b[:10]
        del a, b
        c = torch.zeros(500, dtype=torch.uint8)
        del view
        return c

    measured = measure_peak(work, torch.zeros(100, dtype=torch.uint8))
    assert (measured.held_bytes, measured.peak_bytes, measured.allocated_bytes) == (100, 2100, 2000)
    assert measured.result.shape == (500,)


def test_memory_freed_during_the_call_counts_until_then() -> None:
    model = nn.Linear(1000, 1, bias=False)
    model(torch.ones(1, 1000)).sum().backward()

    def replace_gradient(model: nn.Linear) -> None:
        model.weight.grad = None
        model.weight.grad = torch.zeros(1, 1000)

    measured = measure_peak(replace_gradient, model)
    assert (measured.held_bytes, measured.peak_bytes) == (8000, 8000)


def peaks(
    loss: Callable[[nn.Module, Batch], torch.Tensor], model: nn.Module, optimizer: str, batch: Batch, passes: str | None
) -> tuple[int, int]:
    """The predicted and the measured peak of a step that has settled."""

    def train_step(model: nn.Module, optimizer: Optimizer, batch: Batch) -> torch.Tensor:
        optimizer.zero_grad()
        value = loss(model, batch)
        value.backward()
        optimizer.step()
        return value.detach()

    model = copy.deepcopy(model)
    state = OPTIMIZERS[optimizer](model.parameters())
    step = wholestep.compile(train_step, passes=passes)
    for _ in range(2):
        step(model, state, batch)
    measured = measure_peak(step, model, state, batch)
    return profile_memory(step.graph).peak_bytes, measured.peak_bytes


@pytest.mark.sample(3)
@pytest.mark.parametrize("passes", [None, ""], ids=["default", "as_captured"])
@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        ("gpt", "adamw"),
        ("gpt", "adamw_fused"),
        ("mlp", "adamw"),
        ("resnet", "sgd_foreach"),
        pytest.param("t5", "sgd_plain", marks=pytest.mark.slow),
    ],
)
def test_the_predicted_peak_is_the_measured_one(name: str, optimizer: str, passes: str | None) -> None:
    case = get(name)
    predicted, measured = peaks(case.loss, case.build(), optimizer, case.make_batch(4, 0), passes)
    assert predicted == pytest.approx(measured, rel=0.01)


BINARY = (torch.add, torch.mul, torch.sub)
UNARY = (torch.sin, torch.relu, torch.t, torch.clone, lambda x: x[:1].expand_as(x), lambda x: x.flatten().view(x.shape))
INSTRUCTIONS = st.lists(
    st.tuples(st.integers(0, len(BINARY) + len(UNARY) - 1), st.integers(0, 99), st.integers(0, 99)),
    min_size=1,
    max_size=12,
)


class Program(nn.Module):
    """Runs random instructions on a pool of square matrices; dead values, views and shared operands included."""

    def __init__(self, instructions: list[tuple[int, int, int]]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.instructions = instructions

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pool = [x, x + self.weight]
        for operation, first, second in self.instructions:
            left, right = pool[first % len(pool)], pool[second % len(pool)]
            if operation < len(BINARY):
                pool.append(BINARY[operation](left, right))
            else:
                pool.append(UNARY[operation - len(BINARY)](left))
        return pool[-1].sum() + (x + self.weight).sum()


@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(instructions=INSTRUCTIONS, optimizer=st.sampled_from(["sgd_plain", "adamw", "sgd_foreach"]))
def test_the_prediction_is_exact_for_random_programs(instructions: list[tuple[int, int, int]], optimizer: str) -> None:
    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        return model(batch["x"])

    predicted, measured = peaks(loss, Program(instructions), optimizer, {"x": torch.randn(8, 8)}, None)
    assert predicted == measured
