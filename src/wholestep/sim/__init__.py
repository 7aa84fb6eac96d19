"""Simulation of training steps on clusters that need not be there."""

from wholestep.sim.cluster import Cluster
from wholestep.sim.costs import CostModel
from wholestep.sim.jobs import Crossing, DataParallelJob, GradientBucket, Job, PipelineJob, StageLoad
from wholestep.sim.simulate import Prediction, RankPrediction, simulate, trace

__all__ = [
    "Cluster",
    "CostModel",
    "Crossing",
    "DataParallelJob",
    "GradientBucket",
    "Job",
    "PipelineJob",
    "Prediction",
    "RankPrediction",
    "StageLoad",
    "simulate",
    "trace",
]
