"""The intermediate representation: step graphs, their slots and phases, queries, edits and checks."""

from wholestep.graph.phase import Phase
from wholestep.graph.slots import Slot, SlotKind
from wholestep.graph.step_graph import PassRecord, StepGraph, map_nodes, nodes_in

__all__ = ["PassRecord", "Phase", "Slot", "SlotKind", "StepGraph", "map_nodes", "nodes_in"]
