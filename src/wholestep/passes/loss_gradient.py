"""The gradient of a cross entropy in one go.

Eager goes by way of a matrix that is zero but for one number in each row, and sums its rows. That sum is known: it is
the number. What is left reads the log-probabilities once, without a sum, and can be fused with what comes next.

    d[i, c] = nll[i, c] - exp(lp[i, c]) * sum(nll[i])        nll[i, c] = -g[i] where c is the target, 0 elsewhere
            = (exp(lp[i, c]) - (c is the target)) * g[i]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from wholestep.graph import StepGraph
from wholestep.passes.base import Pass, register

aten = torch.ops.aten

_NONE, _MEAN = 0, 1


@register
@dataclass(frozen=True)
class LossGradient(Pass):
    """Join the backward of `nll_loss` with that of the `log_softmax` in front; results agree within rounding.

    ```
    nll_loss_backward = ...(g, lp, target, None, 1, -100, total)      hit = arange(classes) == target[:, None]
    _log_softmax_backward_data = ...(nll_loss_backward, lp, 1)   ->   d = (exp(lp) - hit) * (g / total)
    ```
    """

    name: ClassVar[str] = "loss_gradient"
    after: ClassVar[tuple[str, ...]] = ("simplify", "cse", "chunk_loss", "pad_logits")

    def apply(self, graph: StepGraph) -> StepGraph:
        replacements = {node: _joined(graph, node) for node in graph.calls() if _is_pair(node)}
        graph.replace(replacements)
        graph.eliminate_dead_code()
        return graph


def _is_pair(node: fx.Node) -> bool:
    """Whether a node is the backward of a log_softmax over the last of two dimensions that only an nll_loss reads."""
    if node.target is not aten._log_softmax_backward_data.default or node.args[2] not in (1, -1):
        return False
    loss = _before_cast(node.args[0])
    if loss.target is not aten.nll_loss_backward.default or len(loss.users) > 1:
        return False
    log_probabilities: Any = node.args[1]
    is_own = _before_cast(loss.args[1]) is log_probabilities and len(node.args[0].users) == 1  # pyright: ignore
    return is_own and loss.args[3] is None and log_probabilities.meta["val"].dim() == 2


def _before_cast(value: Any) -> fx.Node:
    """What a value was cast from, itself if it was not: autocast takes the loss in float32."""
    return value.args[0] if value.target is aten._to_copy.default else value


def _joined(graph: StepGraph, node: fx.Node) -> fx.Node:
    loss = _before_cast(node.args[0])
    gradient, log_probabilities, targets, _, reduction, ignored, total = loss.args
    value = log_probabilities.meta["val"]  # pyright: ignore

    def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return graph.insert(target, args, kwargs, like=node, before=node)

    column = call(aten.unsqueeze.default, targets, 1)
    share = call(aten.div.Tensor, gradient, total) if reduction == _MEAN else gradient
    share = call(aten.unsqueeze.default, share, 1) if reduction == _NONE else share
    zero = call(aten.full.default, [], 0.0, dtype=value.dtype, device=value.device, pin_memory=False)
    row = call(aten.where.self, call(aten.ne.Scalar, column, ignored), share, zero)
    classes = call(aten.arange.default, value.shape[1], device=value.device, pin_memory=False)
    hit = call(aten._to_copy.default, call(aten.eq.Tensor, classes, column), dtype=value.dtype)
    difference = call(aten.sub.Tensor, call(aten.exp.default, log_probabilities), hit)
    made = call(aten.mul.Tensor, difference, row)
    dtype = node.meta["val"].dtype
    return made if made.meta["val"].dtype == dtype else call(aten._to_copy.default, made, dtype=dtype)
