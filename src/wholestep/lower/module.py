"""`wholestep.lower`: the same for any FX graph of functional torch operators."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from wholestep import _torch
from wholestep.errors import WholestepError
from wholestep.graph import Phase, StepGraph, ops
from wholestep.lower.decompose import Decompose
from wholestep.lower.layouts import prepare_regions
from wholestep.lower.lower import lower_graph, regions_of

Dump = Callable[[str, fx.GraphModule], Any]


def lower_module(
    module: fx.GraphModule,
    *,
    node_predicate: Callable[[fx.Node], bool] | None = None,
    region_predicate: Callable[[Sequence[fx.Node]], bool] | None = None,
    min_ops: int = 10,
    dump: Dump | None = None,
) -> tuple[fx.GraphModule, tuple[str, ...]]:
    """See `wholestep.lower`; this also returns what is not lowered, and why."""
    mode = _fake_mode(module)
    lowered = _torch.graph_module(module, copy.deepcopy(module.graph, {id(mode): mode}))
    graph = StepGraph(lowered, {}, mode)
    for node in graph.nodes:
        if node.op == "call_module" or node.op == "call_method":
            raise WholestepError(f"wholestep.lower takes graphs of torch operators; '{node.name}' is a {node.op}")
        if ops.written_arguments(node.target):  # pyright: ignore[reportArgumentType]
            raise WholestepError(f"wholestep.lower takes functional graphs; '{node.name}' writes to its arguments")
        node.meta.setdefault("phase", Phase.FORWARD)
    Decompose().apply(graph)
    graph.eliminate_dead_code()
    lower_graph(graph, min_ops=min_ops, node_predicate=node_predicate, region_predicate=region_predicate)
    for region in regions_of(graph):
        if dump is not None:
            dump(region.name, region.module)
    prepare_regions(graph)
    lowered.recompile()
    return lowered, graph.remarks["lower"]


def _fake_mode(module: fx.GraphModule) -> Any:
    for node in module.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            return _torch.fake_mode_of(value)
    raise WholestepError(
        "wholestep.lower takes graphs whose nodes have fake values, as make_fx and torch.export trace them"
    )
