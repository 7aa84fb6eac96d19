"""Classes of ops, as heuristics about second runs ask for them: what a call is, not what it costs.

They are read off torch's tags and schemas, and off names where those say nothing.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from wholestep import _torch
from wholestep.cost import node_flops
from wholestep.graph import ops

# Not all of torch's own reductions have the tag.
REDUCTIONS = frozenset({"sum", "mean", "amax", "amin", "var_mean", "var", "prod", "any", "all", "argmax", "argmin"})
# Pointwise for Inductor although their schema does not say so; they may read through indices.
ALSO_POINTWISE = frozenset(
    {
        "convert_element_type",
        "clone",
        "full",
        "full_like",
        "scalar_tensor",
        "iota",
        "arange",
        "embedding",
        "index",
        "gather",
    }
    | {"zeros_like", "ones_like", "inductor_random", "inductor_lookup_seed", "constant_pad_nd", "cat", "_to_copy"}
)
# Inductor takes these apart into pointwise ops, as long as nobody has done so before.
_DECOMPOSED = frozenset(
    {"zeros", "ones", "empty", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty"}
    | {"triu", "tril", "lift_fresh_copy"}
)
# Reads all its arguments into one place of its own: others fuse into it, but a second run is a second copy of them all.
_COPYING = frozenset({"cat"})
# One number drawn per element: a kernel that other pointwise work fits into.
_DRAWN_BY_ELEMENT = frozenset({"native_dropout", "rand", "rand_like", "randn", "randn_like", "bernoulli"})


@dataclass(frozen=True)
class OpClass:
    """What kind of op a call is; a call may be of several kinds, or of none (collectives, operators not torch's own).

    fusible: a compiler that fuses puts it into one kernel with fusible neighbours.
    compute_intensive: a matrix product, convolution or attention, that is, what has flops.
    random: it draws random numbers. A second run has to draw the same ones.
    view: no work at all: its result is memory that was there before, or an item of a tuple.
    recomputable: on the allow-list: so cheap that a second run is hardly noticed, inside a fused kernel at least.
    reduction: it folds dimensions of what it reads.
    """

    fusible: bool = False
    compute_intensive: bool = False
    random: bool = False
    view: bool = False
    recomputable: bool = False
    reduction: bool = False


def classify(node: fx.Node) -> OpClass:
    """The class of a call; inputs and outputs of a graph have none."""
    if node.op != "call_function":
        return OpClass()
    if not ops.is_op(node):
        is_free = ops.is_pure(node.target)
        return OpClass(fusible=is_free, recomputable=is_free, view=node.target is operator.getitem)
    target: Any = node.target
    if ops.is_view(target):
        return OpClass(fusible=True, recomputable=True, view=True)
    name, draws = _torch.packet_name(target), ops.draws(node)
    intensive, reduction = node_flops(node) > 0, _is_reduction(target)
    cheap = ops.is_pure(target) and not intensive and (reduction or _is_pointwise(target))
    return OpClass(
        fusible=cheap or (draws and name in _DRAWN_BY_ELEMENT),
        compute_intensive=intensive,
        random=draws,
        recomputable=cheap and name not in _COPYING,
        reduction=reduction,
    )


def _is_reduction(target: Any) -> bool:
    # By the tag's name: not every torch that is supported has it.
    return _torch.packet_name(target) in REDUCTIONS or any(tag.name == "reduction" for tag in _torch.tags(target))


def _is_pointwise(target: Any) -> bool:
    return torch.Tag.pointwise in _torch.tags(target) or _torch.packet_name(target) in ALSO_POINTWISE | _DECOMPOSED
