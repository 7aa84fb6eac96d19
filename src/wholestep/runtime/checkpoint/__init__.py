"""Checkpoints: written in the background, complete or not there at all, read without running anything in them."""

from wholestep.runtime.checkpoint.checkpoints import Checkpoints, load_checkpoint

__all__ = ["Checkpoints", "load_checkpoint"]
