"""Rotating the training loop: what may run in the next iteration, and the graphs of setup, main, cleanup and flush."""

from wholestep.iteration.derive import Kind, derive
from wholestep.iteration.moves import carried_nodes, leaf_closure, move_to_next_iteration, moved_nodes
from wholestep.iteration.rotate import Rotate, UpdateBlock, update_blocks

__all__ = [
    "Kind",
    "Rotate",
    "UpdateBlock",
    "carried_nodes",
    "derive",
    "leaf_closure",
    "move_to_next_iteration",
    "moved_nodes",
    "update_blocks",
]
