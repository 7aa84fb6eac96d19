"""Rematerialization: what to keep for the backward and what to compute again, within a memory budget."""

from wholestep.remat.budget import Budget, ModuleBudget, StepBudget, readable
from wholestep.remat.curve import Curve, CurvePoint, MemoryStudy, Survey
from wholestep.remat.fit import fit_step
from wholestep.remat.fit_lowered import fit_lowered_step
from wholestep.remat.inductor import InductorBackend
from wholestep.remat.partition import Partition, partition_joint
from wholestep.remat.plan import KeptValue, ModuleUse, RematPlan, RepeatedOp
from wholestep.remat.remat import Remat
from wholestep.remat.rules import BanRules

__all__ = [
    "BanRules",
    "Budget",
    "Curve",
    "CurvePoint",
    "InductorBackend",
    "KeptValue",
    "MemoryStudy",
    "ModuleBudget",
    "ModuleUse",
    "Partition",
    "Remat",
    "RematPlan",
    "RepeatedOp",
    "StepBudget",
    "Survey",
    "fit_lowered_step",
    "fit_step",
    "partition_joint",
    "readable",
]
