"""Rematerialization: what to keep for the backward and what to compute again, within a memory budget."""

from wholestep.remat.budget import Budget, readable
from wholestep.remat.fit import fit_step
from wholestep.remat.inductor import InductorBackend
from wholestep.remat.partition import Partition, partition_joint
from wholestep.remat.plan import KeptValue, RematPlan, RepeatedOp
from wholestep.remat.remat import Remat

__all__ = [
    "Budget",
    "InductorBackend",
    "KeptValue",
    "Partition",
    "Remat",
    "RematPlan",
    "RepeatedOp",
    "fit_step",
    "partition_joint",
    "readable",
]
