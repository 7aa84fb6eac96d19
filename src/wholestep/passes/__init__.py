"""Passes: rewrites of step graphs, the pipelines they form and the manager that runs them."""

from wholestep.passes import cse, dce, reinplace, simplify
from wholestep.passes.base import Pass, register, registered
from wholestep.passes.chunk_loss import ChunkLoss, mark_logits
from wholestep.passes.loss_gradient import LossGradient
from wholestep.passes.manager import dump_graphs, new_dump_folder, run_passes
from wholestep.passes.pad_logits import PadLogits
from wholestep.passes.pipeline import Pipeline

DEFAULT_PIPELINE = Pipeline((simplify.Simplify(), cse.CommonSubexpressions(), dce.DeadCode(), reinplace.Reinplace()))

__all__ = [
    "DEFAULT_PIPELINE",
    "ChunkLoss",
    "LossGradient",
    "PadLogits",
    "Pass",
    "Pipeline",
    "dump_graphs",
    "mark_logits",
    "new_dump_folder",
    "register",
    "registered",
    "run_passes",
]
