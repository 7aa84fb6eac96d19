"""`wholestep.lower` on graphs that are no steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.lowering import compile_with, op_by_op
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

import wholestep
from wholestep import WholestepError
from wholestep.lower import Region


def network(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    for _ in range(3):
        x = F.layer_norm(F.gelu(x @ weight), (8,))
    return x, x.sum(0)


@pytest.fixture
def traced() -> tuple[fx.GraphModule, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    inputs = (torch.randn(4, 8), torch.randn(8, 8))
    return make_fx(network, tracing_mode="fake")(*inputs), inputs


@pytest.fixture(autouse=True)
def _without_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_with(monkeypatch, op_by_op)


def regions(module: fx.GraphModule) -> list[Any]:
    return [node.target for node in module.graph.nodes if isinstance(node.target, Region)]


def test_it_computes_the_same_and_leaves_the_graph_alone(traced: Any) -> None:
    module, inputs = traced
    before = module.code
    lowered = wholestep.lower(module)
    assert len(regions(lowered)) == 1
    assert module.code == before
    for one, other in zip(lowered(*inputs), network(*inputs), strict=True):
        torch.testing.assert_close(one, other)


def test_predicates_and_dumps(traced: Any) -> None:
    module, inputs = traced
    dumped: dict[str, fx.GraphModule] = {}
    lowered = wholestep.lower(
        module,
        node_predicate=lambda node: node.target is not torch.ops.aten.mm.default,
        min_ops=2,
        dump=dumped.__setitem__,
    )
    assert len(dumped) == len(regions(lowered)) == 3
    assert not any("aten.mm" in region.code for region in dumped.values())
    for one, other in zip(lowered(*inputs), network(*inputs), strict=True):
        torch.testing.assert_close(one, other)
    assert not regions(wholestep.lower(module, region_predicate=lambda nodes: False))


def test_breaks_are_logged(traced: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="wholestep"):
        wholestep.lower(traced[0], min_ops=1000)
    assert any("fewer than 1000 ops" in record.getMessage() for record in caplog.records)


def test_graphs_that_write_and_graphs_without_values_are_refused() -> None:
    writing = make_fx(lambda x: x.add_(1), tracing_mode="fake")(torch.zeros(2))
    with pytest.raises(WholestepError, match="functional graphs; 'add_' writes to its arguments"):
        wholestep.lower(writing)
    with pytest.raises(WholestepError, match="nodes have fake values"):
        wholestep.lower(fx.symbolic_trace(lambda x: torch.relu(x)))
