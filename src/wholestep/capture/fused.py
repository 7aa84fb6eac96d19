"""Fused optimizer kernels while tracing: the functional operator, and its results written back.

The fused kernels take their learning rate as a C++ double, which would bake a traced one into the graph, and their
in-place form cannot be functionalised by torch (it asserts on the empty list that stands for "no amsgrad"). So the
in-place call of the optimizer becomes the functional operator with a tensor learning rate, followed by copies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from wholestep import _torch

if TYPE_CHECKING:
    from wholestep.capture.session import Lifted, Session

FUNCTIONS = _torch.FUSED_OPTIMIZERS


def call(session: Session, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Trace an in-place fused update as its functional twin; gradients are left alone unless they are unscaled.

    Options that change (betas, weight decay) are C++ numbers as well: traced by their value, then exchanged for the
    graph's inputs that they are.
    """
    functional = FUNCTIONS[function]
    in_place = _torch.overload_by_name(_torch.packet_name(functional) + "_", "tensor_lr")
    arguments = _torch.schema(functional).arguments
    bound = {argument.name: value for argument, value in zip(arguments, args, strict=False)} | kwargs
    learning_rate = bound["lr"]
    if not isinstance(learning_rate, torch.Tensor):
        bound["lr"] = torch.scalar_tensor(learning_rate, dtype=torch.float64)
    changing = {
        name: next(entry for entry in session.lifted.values() if entry.twin is value)
        for name, value in bound.items()
        if isinstance(value, torch.SymFloat)
    }
    results = functional(**{**bound, **{name: entry.real for name, entry in changing.items()}})
    if changing:
        _exchange(_node_of(session, functional, results), arguments, changing)
    written = [argument.name for argument in _torch.schema(in_place).arguments if _torch.is_written(argument)]
    for name, tensors in zip(written, results, strict=True):
        if name == "grads" and bound.get("grad_scale") is None:
            continue
        for old, new in zip(bound[name], tensors, strict=True):
            old.copy_(new)


def _node_of(session: Session, functional: Any, results: Any) -> fx.Node:
    """The call of a functional operator that has just been traced."""
    node = session.node_of(next(tensor for tensors in results for tensor in tensors))
    while node.target is not functional:
        node = node.all_input_nodes[0]
    return node


def _exchange(node: fx.Node, arguments: Any, changing: dict[str, Lifted]) -> None:
    """Give a call some inputs of the graph in place of plain numbers."""
    positions = {argument.name: index for index, argument in enumerate(arguments)}
    args = list(node.args)
    for name, entry in changing.items():
        if positions[name] < len(args):
            args[positions[name]] = entry.node
        else:
            node.kwargs = {**node.kwargs, name: entry.node}
    node.args = tuple(args)
