"""Communication: blocks, buckets, their place in the step, optimizer updates cut to fit, and the plan behind it."""

from wholestep.comm.allreduce import AllReduce, Reducible, reducible_gradients
from wholestep.comm.blocks import CommBlock, find_blocks
from wholestep.comm.bucket import Bucket
from wholestep.comm.fill import FillBuckets
from wholestep.comm.optimizer_blocks import OptimizerBlock, find_optimizer_blocks
from wholestep.comm.overlap import Overlap
from wholestep.comm.split_optimizer import SplitOptimizer

__all__ = [
    "AllReduce",
    "Bucket",
    "CommBlock",
    "FillBuckets",
    "OptimizerBlock",
    "Overlap",
    "Reducible",
    "SplitOptimizer",
    "find_blocks",
    "find_optimizer_blocks",
    "reducible_gradients",
]
