"""What a step costs, predicted from its graph (flops, bytes, live memory, op and link times) and measured on a run."""

from wholestep.cost.flops import Cost, node_cost, node_elementwise_flops, node_flops, total_cost
from wholestep.cost.hardware import DEVICES, LINKS, DeviceModel, Wire, typical_device, typical_name
from wholestep.cost.link import Link, calibrate_link
from wholestep.cost.logits import LogitsAtPeak, dominant_logits
from wholestep.cost.measure import MeasuredPeak, measure_peak
from wholestep.cost.memory import LiveValue, MemoryProfile, Traffic, node_bytes, profile_memory
from wholestep.cost.op_time import calibrate_device, estimated_times, measured_times, product_dtype

__all__ = [
    "DEVICES",
    "LINKS",
    "Cost",
    "DeviceModel",
    "Link",
    "LiveValue",
    "LogitsAtPeak",
    "MeasuredPeak",
    "MemoryProfile",
    "Traffic",
    "Wire",
    "calibrate_device",
    "calibrate_link",
    "dominant_logits",
    "estimated_times",
    "measure_peak",
    "measured_times",
    "node_bytes",
    "node_cost",
    "node_elementwise_flops",
    "node_flops",
    "product_dtype",
    "profile_memory",
    "total_cost",
    "typical_device",
    "typical_name",
]
