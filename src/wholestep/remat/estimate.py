"""What a second run of an op costs, three ways.

    flops      matrix products, convolutions and attention by their arithmetic; moving bytes counts next to nothing
    roofline   microseconds: the larger of arithmetic and moved bytes on a typical device of the op's kind
    profile    microseconds as measured on this machine (each distinct op once)

The first two depend on the graph alone, so that every rank and every run comes to the same plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import fx

from wholestep.cost import DeviceModel, node_bytes, node_flops, typical_device
from wholestep.cost.op_time import estimate_us, is_free, measure_us
from wholestep.errors import WholestepError

ESTIMATORS = ("flops", "roofline", "profile")

# Next to nothing, but enough to tell two plans of equal flops apart.
_FLOPS_PER_BYTE = 1e-3


def estimated_costs(
    nodes: Iterable[fx.Node], estimator: str, device: DeviceModel | None = None
) -> Mapping[fx.Node, float]:
    """The cost of every call among `nodes`; `device` is whose roofline, a typical one's of the op's kind if None."""
    calls = [node for node in nodes if node.op == "call_function"]
    if estimator == "flops":
        return {node: _by_flops(node) for node in calls}
    if estimator == "roofline":
        return {node: 0.0 if is_free(node) else estimate_us(node, device or typical_device([node])) for node in calls}
    if estimator == "profile":
        return measure_us(calls)
    raise WholestepError(f"there is no estimator '{estimator}'; choose from {', '.join(ESTIMATORS)}")


def _by_flops(node: fx.Node) -> float:
    if is_free(node):
        return 0.0
    traffic = node_bytes(node)
    return node_flops(node) + _FLOPS_PER_BYTE * (traffic.read + traffic.written)
