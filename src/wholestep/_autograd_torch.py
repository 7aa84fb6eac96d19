# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false
"""The autograd graph of a traced step: its leaves, its links to the forward, and derivatives as eager computes them.

Some derivatives look at values: which elements a mask selects, whether a factor is zero. Where values cannot be looked
at, which is while tracing, torch has a second formula for them, rounded otherwise. Hooks on the autograd nodes exchange
its result for an operator that does what eager does. As private as `_torch`; seen in torch 2.11 to 2.13.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._functorch._aot_autograd.logging_utils import setup_stacktrace_preservation_hooks


def link_backward(roots: list[Any]) -> None:
    """Hook the autograd graph so that each backward node records the sequence number of its forward node."""
    setup_stacktrace_preservation_hooks(roots)


def accumulate_grad_variables(roots: Sequence[Any]) -> Iterator[torch.Tensor]:
    """The leaves that a backward pass from `roots` will write gradients to."""
    return (node.variable for node in autograd_nodes(roots) if hasattr(node, "variable"))


def autograd_nodes(roots: Sequence[Any]) -> Iterator[Any]:
    """All nodes of the autograd graph that a backward pass from `roots` goes through."""
    seen: set[Any] = set()
    pending = [root for root in roots if root is not None]
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        pending.extend(function for function, _ in node.next_functions if function is not None)


_OPS = torch.library.Library("wholestep", "FRAGMENT")
_OPS.define("masked_sum(Tensor self, Tensor mask) -> Tensor")
_OPS.impl("masked_sum", lambda tensor, mask: tensor.masked_select(mask).sum(), "CompositeExplicitAutograd")
_OPS.impl("masked_sum", lambda tensor, mask: tensor.new_empty(()), "Meta")
_OPS.define("prod_backward(Tensor grad, Tensor self, int? dim, bool keepdim) -> Tensor")


def _prod_backward(grad: torch.Tensor, factors: torch.Tensor, dim: int | None, keepdim: bool) -> torch.Tensor:
    with torch.enable_grad():
        leaf = factors.detach().requires_grad_()
        product = leaf.prod() if dim is None else leaf.prod(dim, keepdim)
        return torch.autograd.grad(product, leaf, grad)[0]


_OPS.impl("prod_backward", _prod_backward, "CompositeExplicitAutograd")
_OPS.impl("prod_backward", lambda grad, factors, dim, keepdim: torch.empty_like(factors), "Meta")


def _masked_fill_gradients(node: Any, _grads: Any, outgoing: Any) -> Any:
    return (None, torch.ops.wholestep.masked_sum(outgoing, node._saved_mask))


def _prod_gradients(node: Any, _grads: Any, outgoing: Any) -> Any:
    dim, keepdim = getattr(node, "_saved_dim", None), getattr(node, "_saved_keepdim", False)
    if dim is not None and dim >= 2**63:  # a negative one, saved without its sign
        dim -= 2**64
    factors = node._saved_self
    gradient = torch.ops.wholestep.prod_backward(outgoing, factors.to(outgoing.dtype), dim, keepdim)
    return (gradient.to(factors.dtype),)


# By the name of the autograd node; found by holding the gradients of a traced step against eager's.
_VALUE_DEPENDENT: dict[str, Callable[[Any, Any, Any], Any]] = {
    "MaskedFillBackward1": _masked_fill_gradients,
    "ProdBackward0": _prod_gradients,
    "ProdBackward1": _prod_gradients,
}


def use_derivatives_of_eager(roots: Sequence[Any]) -> None:
    """Let a traced backward from `roots` record eager's derivatives where torch would trace others."""
    for node in autograd_nodes(roots):
        formula = _VALUE_DEPENDENT.get(node.name())
        if formula is not None and "wholestep" not in node.metadata:
            node.metadata["wholestep"] = True
            node.register_hook(functools.partial(_exchange_gradients, node, formula))


def _exchange_gradients(node: Any, formula: Callable[[Any, Any, Any], Any], grads: Any, outgoing: Any) -> Any:
    """A hook on an autograd node; a derivative that is to be derived again stays as it is."""
    if torch.is_grad_enabled() or outgoing[0] is None:
        return grads
    exact = formula(node, grads, outgoing[0])
    return tuple(old if new is None or old is None else new for old, new in zip(grads, exact, strict=True))
