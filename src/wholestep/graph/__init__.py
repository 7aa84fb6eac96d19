"""The intermediate representation: step graphs, their slots and phases, queries, edits and checks."""

from wholestep.graph.in_layout import InLayout
from wholestep.graph.loss_head import LossHead
from wholestep.graph.phase import Phase
from wholestep.graph.replay import Replay, rng_state
from wholestep.graph.slots import Slot, SlotKind
from wholestep.graph.step_graph import PassRecord, StepGraph, map_nodes, nodes_in

__all__ = [
    "InLayout",
    "LossHead",
    "PassRecord",
    "Phase",
    "Replay",
    "Slot",
    "SlotKind",
    "StepGraph",
    "map_nodes",
    "nodes_in",
    "rng_state",
]
