"""What a node costs to run: floating point operations and bytes moved, from its fake values alone.

Two figures for the arithmetic, because hardware runs them on different units: `flops` are those of matrix products,
convolutions and attention (a multiply-add counts as two, formulas from `torch.utils.flop_counter`);
`elementwise_flops` count one per element that a pointwise op produces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from wholestep import _torch
from wholestep.cost.memory import node_bytes, tensors_in, written_values
from wholestep.graph import Replay, ops

aten = torch.ops.aten

Formula = Callable[..., int]


@dataclass(frozen=True)
class Cost:
    """What one or several nodes cost. Costs add up; `Cost()` is nothing."""

    num_ops: int = 0
    flops: int = 0
    elementwise_flops: int = 0
    bytes_read: int = 0
    bytes_written: int = 0

    @property
    def bytes_moved(self) -> int:
        return self.bytes_read + self.bytes_written

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.num_ops + other.num_ops,
            self.flops + other.flops,
            self.elementwise_flops + other.elementwise_flops,
            self.bytes_read + other.bytes_read,
            self.bytes_written + other.bytes_written,
        )


def node_cost(node: fx.Node) -> Cost:
    """The cost of one node; inputs and outputs of the graph cost nothing."""
    if node.op != "call_function":
        return Cost()
    traffic = node_bytes(node)
    return Cost(1, node_flops(node), node_elementwise_flops(node), traffic.read, traffic.written)


def total_cost(nodes: Iterable[fx.Node]) -> Cost:
    """The costs of several nodes, added up."""
    return sum((node_cost(node) for node in nodes), Cost())


def node_flops(node: fx.Node) -> int:
    """Floating point operations of a matrix product, convolution or attention; 0 for every other node."""
    target, given = node.target, node.args
    if isinstance(target, Replay):
        target, given = target.target, node.args[1:]
    formula = _formula(target) if _torch.is_op_overload(target) else None
    if formula is None:
        return 0
    args, kwargs = map_arg((given, node.kwargs), _stand_in)  # pyright: ignore[reportGeneralTypeIssues]
    return int(formula(*args, **kwargs, out_val=_stand_in(node)))


def node_elementwise_flops(node: fx.Node) -> int:
    """Elements a pointwise op produces; a `_foreach_` op counts the elements of its whole list."""
    if not ops.is_op(node) or not _is_elementwise(node.target):
        return 0
    produced = list(tensors_in(node.meta.get("val"))) or written_values(node)
    return sum(_num_elements(tensor) for tensor in produced)


def _formula(target: Any) -> Formula | None:
    packet = target.overloadpacket
    return _FURTHER_FORMULAS.get(packet) or flop_registry.get(packet)


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> int:
    return sdpa_flop_count(query.shape, key.shape, value.shape)


def _attention_backward(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> int:
    return sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape)


# Attention on the CPU and the in-place products are missing from torch's registry.
_FURTHER_FORMULAS: dict[Any, Formula] = {
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    aten.addmm_: flop_registry[aten.addmm],
    aten.baddbmm_: flop_registry[aten.baddbmm],
}


def _stand_in(node: fx.Node) -> Any:
    """A node's value for the formulas: tensors without memory and without symbolic sizes."""
    return _without_symbols(node.meta.get("val"))


def _without_symbols(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty([_torch.optimization_hint(size) for size in value.shape], dtype=value.dtype, device="meta")
    if isinstance(value, (list, tuple)):
        return type(value)(_without_symbols(item) for item in value)
    return _torch.optimization_hint(value) if isinstance(value, torch.SymInt) else value


def _is_elementwise(target: Any) -> bool:
    return torch.Tag.pointwise in _torch.tags(target) or _torch.packet_name(target).startswith(("_foreach_", "_fused_"))


def _num_elements(tensor: torch.Tensor) -> int:
    return _torch.optimization_hint(tensor.numel())
