"""Partial lowering: runs of ops that Inductor can compile become regions, the rest stays where it is."""

from wholestep.lower.decompose import Decompose
from wholestep.lower.layouts import leave_regions, prepare_regions
from wholestep.lower.lower import Lower, dump_regions, regions_of
from wholestep.lower.masks import Masks
from wholestep.lower.module import lower_module
from wholestep.lower.region import Region
from wholestep.lower.regions import Break, Division, divide
from wholestep.lower.write import WriteRegions, memory_of

__all__ = [
    "Break",
    "Decompose",
    "Division",
    "Lower",
    "Masks",
    "Region",
    "WriteRegions",
    "divide",
    "dump_regions",
    "leave_regions",
    "lower_module",
    "memory_of",
    "prepare_regions",
    "regions_of",
]
