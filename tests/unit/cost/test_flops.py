"""Flops and bytes of nodes: by hand for single ops, against torch's own counter for whole steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import SGD, Optimizer
from torch.utils.flop_counter import FlopCounterMode

import wholestep
from wholestep.api import CompiledStep
from wholestep.cost import Cost, Traffic, node_bytes, node_cost, node_elementwise_flops, node_flops, total_cost
from wholestep.graph import Phase, Replay
from wholestep.zoo import Batch, get
from wholestep.zoo.gpt import GPTConfig, make_case

aten = torch.ops.aten


def call(target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
    """A node that calls `target`; tensors among the arguments become inputs of its graph."""
    graph = fx.Graph()

    def lift(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [lift(item) for item in value]
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in known:
            known[id(value)] = graph.placeholder(f"x{len(known)}")
            known[id(value)].meta["val"] = value
        return known[id(value)]

    known: dict[int, fx.Node] = {}
    node = graph.call_function(target, tuple(lift(arg) for arg in args), {key: lift(v) for key, v in kwargs.items()})
    node.meta["val"] = target(*args, **kwargs)
    return node


def meta(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*sizes, dtype=dtype, device="meta")


def compiled(loss: Callable[[nn.Module, Batch], torch.Tensor], **options: Any) -> CompiledStep:
    def train_step(model: nn.Module, optimizer: Optimizer, batch: Batch) -> torch.Tensor:
        optimizer.zero_grad()
        value = loss(model, batch)
        value.backward()
        optimizer.step()
        return value.detach()

    return wholestep.compile(train_step, **options)


@pytest.mark.parametrize(
    ("node", "flops"),
    [
        (call(aten.mm.default, meta(2, 3), meta(3, 5)), 2 * 2 * 3 * 5),
        (call(aten.addmm.default, meta(5), meta(2, 3), meta(3, 5)), 2 * 2 * 3 * 5),
        (call(aten.addmm_.default, meta(2, 5), meta(2, 3), meta(3, 5)), 2 * 2 * 3 * 5),
        (call(aten.bmm.default, meta(7, 2, 3), meta(7, 3, 5)), 2 * 7 * 2 * 3 * 5),
        (
            call(
                aten.convolution.default,
                meta(2, 3, 8, 8),
                meta(4, 3, 3, 3),
                None,
                [1, 1],
                [1, 1],
                [1, 1],
                False,
                [0],
                1,
            ),
            2 * (2 * 8 * 8) * 4 * (3 * 3 * 3),
        ),
        (call(aten.exp.default, meta(4, 4)), 0),
        (call(aten.t.default, meta(4, 4)), 0),
    ],
    ids=lambda value: str(value.target) if isinstance(value, fx.Node) else "",
)
def test_flops_of_single_ops(node: fx.Node, flops: int) -> None:
    assert node_flops(node) == flops


@pytest.mark.parametrize(
    ("node", "elements"),
    [
        (call(aten.exp.default, meta(4, 6)), 24),
        (call(aten.add_.Tensor, meta(4, 6), meta(6)), 24),
        (call(aten._foreach_mul.Scalar, [meta(3), meta(5)], 2.0), 8),
        (call(aten._foreach_mul_.Scalar, [meta(3), meta(5)], 2.0), 8),
        (call(aten.mm.default, meta(2, 3), meta(3, 5)), 0),
        (call(aten.view.default, meta(4, 6), [24]), 0),
    ],
    ids=lambda value: str(value.target) if isinstance(value, fx.Node) else "",
)
def test_elementwise_flops_of_single_ops(node: fx.Node, elements: int) -> None:
    assert node_elementwise_flops(node) == elements


ROW = meta(6)
SQUARE = meta(4, 6)
PARTS = meta(3, 8).unbind(0)


@pytest.mark.parametrize(
    ("node", "traffic"),
    [
        (call(aten.add.Tensor, SQUARE, ROW), Traffic(4 * (24 + 6), 4 * 24)),
        (call(aten.mul.Tensor, SQUARE, SQUARE), Traffic(4 * 24, 4 * 24)),
        (call(aten.add_.Tensor, meta(4, 6), ROW), Traffic(4 * (24 + 6), 4 * 24)),
        (call(aten.copy_.default, meta(4, 6), ROW), Traffic(4 * 6, 4 * 24)),
        (call(aten.exp.default, ROW.expand(1000, 6)), Traffic(4 * 6, 4 * 6000)),
        (call(aten.addcmul.default, *PARTS), Traffic(4 * 24, 4 * 8)),
        (call(aten.addcmul.default, PARTS[0], PARTS[1], PARTS[1]), Traffic(4 * 16, 4 * 8)),
        (call(aten.embedding.default, meta(1000, 8), meta(5, dtype=torch.int64)), Traffic(4 * 40 + 8 * 5, 4 * 40)),
        (call(aten.zeros_like.default, SQUARE), Traffic(0, 4 * 24)),
        (call(aten.empty_like.default, SQUARE), Traffic(0, 0)),
        (call(aten.view.default, SQUARE, [24]), Traffic(0, 0)),
        (call(aten.native_layer_norm.default, SQUARE, [6], ROW, None, 1e-5), Traffic(4 * 30, 4 * (24 + 4 + 4))),
        (call(aten._foreach_add_.List, [meta(3), meta(5)], [meta(3), meta(5)]), Traffic(4 * 16, 4 * 8)),
    ],
    ids=lambda value: str(value.target) if isinstance(value, fx.Node) else "",
)
def test_bytes_of_single_ops(node: fx.Node, traffic: Traffic) -> None:
    assert node_bytes(node) == traffic


def test_costs_add_up_and_inputs_cost_nothing() -> None:
    node = call(aten.mm.default, meta(2, 3), meta(3, 5))
    assert node_cost(node) == Cost(1, 60, 0, 4 * (6 + 15), 4 * 10)
    assert total_cost(node.graph.nodes) == node_cost(node)
    assert node_cost(node) + node_cost(node) == Cost(2, 120, 0, 8 * (6 + 15), 8 * 10)
    assert node_cost(node).bytes_moved == 4 * (6 + 15 + 10)


def test_phases_of_a_linear_layer() -> None:
    model = nn.Linear(8, 4, bias=False)
    step = compiled(lambda model, batch: model(batch["x"]).square().sum())
    step(model, SGD(model.parameters(), lr=0.1), {"x": torch.randn(2, 8)})
    by_phase = {phase: total_cost(step.graph.calls(phase)) for phase in Phase}
    assert by_phase[Phase.FORWARD].flops == 2 * 2 * 8 * 4
    assert by_phase[Phase.BACKWARD].flops == 2 * 2 * 8 * 4  # the input needs no gradient
    assert by_phase[Phase.OPTIMIZER].flops == 0
    assert by_phase[Phase.OPTIMIZER].bytes_moved == 4 * 32 * 3  # reads weight and gradient, writes weight
    assert by_phase[Phase.COMM] == Cost()


@pytest.mark.parametrize("name", ["mlp", "gpt", "resnet"])
def test_a_step_has_the_flops_that_torch_counts_in_eager(name: str) -> None:
    case = get(name)
    model, batch = case.build(), case.make_batch(4, 0)
    step = compiled(case.loss)
    # torch's counter does not know attention on the CPU: the plain formulation has the same products.
    with sdpa_kernel(SDPBackend.MATH):
        step(model, SGD(model.parameters(), lr=0.1), batch)
        with FlopCounterMode(display=False) as counter:
            case.loss(model, batch).backward()
    assert total_cost(step.graph.calls()).flops == counter.get_total_flops() > 0


def test_attention_on_the_cpu_counts_both_products_and_their_backward() -> None:
    config = GPTConfig(context=16, width=32, heads=4, layers=1, dropout=0.0)
    case = make_case("gpt", config)
    model = case.build()
    step = compiled(case.loss)
    step(model, SGD(model.parameters(), lr=0.1), case.make_batch(3, 0))
    found = {str(node.target): node_flops(node) for node in step.graph.calls() if "flash_attention" in str(node.target)}
    product = 2 * 3 * 4 * 16 * 16 * 8
    assert sorted(found.values()) == [2 * product, 5 * product], found


def test_a_symbolic_batch_costs_what_the_captured_one_does() -> None:
    case = get("mlp")
    totals: list[Cost] = []
    for dynamic_batch in (False, True):
        model = case.build()
        step = compiled(case.loss, dynamic_batch=dynamic_batch)
        step(model, SGD(model.parameters(), lr=0.1), case.make_batch(6, 0))
        totals.append(total_cost(step.graph.calls()))
    assert totals[0].flops == totals[1].flops > 0
    assert totals[0].bytes_moved == totals[1].bytes_moved > 0


def test_an_attention_that_is_replayed_counts_like_the_first_one() -> None:
    query = torch.empty(2, 4, 32, 16, device="meta")
    target = aten._scaled_dot_product_flash_attention_for_cpu.default
    first = call(target, query, query, query)
    again = call(Replay(target, "cpu"), torch.get_rng_state(), query, query, query)
    assert node_flops(again) == node_flops(first) > 0
