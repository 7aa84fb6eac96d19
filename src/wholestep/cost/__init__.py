"""What a step costs, predicted from its graph (flops, bytes, live memory) and measured on a run."""

from wholestep.cost.flops import Cost, node_cost, node_elementwise_flops, node_flops, total_cost
from wholestep.cost.measure import MeasuredPeak, measure_peak
from wholestep.cost.memory import LiveValue, MemoryProfile, Traffic, node_bytes, profile_memory

__all__ = [
    "Cost",
    "LiveValue",
    "MeasuredPeak",
    "MemoryProfile",
    "Traffic",
    "measure_peak",
    "node_bytes",
    "node_cost",
    "node_elementwise_flops",
    "node_flops",
    "profile_memory",
    "total_cost",
]
