"""A step as a loop: the graphs of its first, middle and last call, and what one call leaves for the next."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from wholestep import _torch
from wholestep.capture import Capture
from wholestep.capture.binding import Binding, Carried
from wholestep.graph import Slot, SlotKind, StepGraph
from wholestep.iteration import Kind, carried_nodes, derive, moved_nodes
from wholestep.iteration.moves import SHARED, found_again
from wholestep.lower import Lower, dump_regions
from wholestep.passes import Pipeline, run_passes
from wholestep.runtime.cuda_graph import why_not_recorded
from wholestep.runtime.executable import Executable
from wholestep.runtime.pending import Pending

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class IterationGraphs:
    """The graphs a step runs, as readable code: of the first call, the middle ones, the last, and of a flush."""

    setup: StepGraph
    main: StepGraph
    cleanup: StepGraph
    flush: StepGraph


class Rotation:
    """Runs a step whose graph notes which nodes belong to the next iteration.

    `graph` is functional; `finish` are the passes that make it run in place, run on each derived graph. With
    `cuda_graphs` those that can run as CUDA graphs do. What is in their regions is written to `dump_dir`.
    """

    def __init__(
        self,
        graph: StepGraph,
        finish: Pipeline,
        capture: Capture,
        name: str,
        *,
        cuda_graphs: bool = False,
        dump_dir: Path | None = None,
    ) -> None:
        self._name = name
        self._dump_dir = dump_dir
        self._cuda_graphs = cuda_graphs
        self._source = graph
        self._finish = finish
        self._blocks = frozenset(node.meta["next_iteration"] for node in moved_nodes(graph)) - {SHARED}
        self.pending = Pending(
            name,
            self._blocks,
            _carried_by(graph),
            self._apply,
            self._targets,
            optimizers=capture.stepped,
            modules=_asking_modules(capture),
        )
        carries = {
            Slot(SlotKind.CARRY, node.name).id: Carried(self.pending.carries, Slot(SlotKind.CARRY, node.name).id)
            for node in carried_nodes(graph)
        }
        self._bindings: dict[str, Binding] = capture.bindings | carries
        self._target_bindings = [self._bindings[slot_id] for slot_id in _target_slots(graph)]
        self._setup = self._derived(Kind.SETUP) if self._blocks else self._whole
        self._main = self._derived(Kind.MAIN) if self._blocks else self._whole
        self._flushes: dict[frozenset[int], Executable] = {}
        if capture.dynamic_leaves and any(item.name == Lower.name for item in finish):
            # Compiling regions may bring more assumptions about sizes, and guards are made of those known by then.
            _ = self._whole, self._cleanup

    @property
    def graph(self) -> StepGraph:
        """What a call in the middle of the loop runs."""
        return self._main.graph

    @property
    def in_loop(self) -> Executable | None:
        """What the next call runs if it is one in the middle of the loop; None if it is the first to run that."""
        is_in_loop = self._main.is_ready and (not self._blocks or self.pending.is_waiting)
        return self._main if is_in_loop else None

    @cached_property
    def graphs(self) -> IterationGraphs:
        """All graphs of the loop."""
        return IterationGraphs(
            self._setup.graph, self._main.graph, self._cleanup.graph, self._flush_of(self._blocks).graph
        )

    def run(self, leaves: list[Any], *, is_last: bool) -> tuple[Any, ...]:
        """One call of the loop. If it raises, what was pending has been applied, as it would have been in eager."""
        if not self._blocks:
            return self._whole.run(leaves)
        pending = self.pending
        if not pending.is_waiting:
            outputs = (self._whole if is_last else self._setup).run(leaves)
        else:
            pending.continued()
            try:
                outputs = (self._cleanup if is_last else self._main).run(leaves)
            except BaseException:
                pending.flush()
                raise
            pending.finished()
        if not is_last:
            pending.guard()
        return outputs

    @cached_property
    def _whole(self) -> Executable:
        return self._executable(self._source.copy(), "step")

    @cached_property
    def _cleanup(self) -> Executable:
        return self._derived(Kind.CLEANUP) if self._blocks else self._whole

    def _flush_of(self, blocks: frozenset[int]) -> Executable:
        if blocks not in self._flushes:
            graph = derive(self._source, Kind.FLUSH, blocks)
            self._flushes[blocks] = self._executable(graph, Kind.FLUSH)
        return self._flushes[blocks]

    def _apply(self, blocks: frozenset[int]) -> None:
        # Whoever looks may be tracing, or in inference mode; what is applied must be real and stay ordinary tensors.
        with _torch.outside_modes():
            self._flush_of(blocks).run([])

    def _derived(self, kind: Kind) -> Executable:
        return self._executable(derive(self._source, kind), kind)

    def _executable(self, graph: StepGraph, label: str) -> Executable:
        finished = run_passes(graph, self._finish)
        if self._dump_dir is not None:
            dump_regions(finished, self._dump_dir / "regions" / label if self._blocks else self._dump_dir / "regions")
        return Executable(
            finished, self._bindings, label, self.pending.applied, is_recorded=self._can_be_recorded(finished)
        )

    def _can_be_recorded(self, graph: StepGraph) -> bool:
        if not self._cuda_graphs:
            return False
        obstacle = why_not_recorded(graph)
        graph.remarks["cuda_graphs"] = (obstacle,) if obstacle else ()
        if obstacle:
            logger.warning("%s runs without CUDA graphs: %s", self._name, obstacle)
        return not obstacle

    def _targets(self) -> list[torch.Tensor]:
        """Tensors that must not be seen while updates are pending."""
        values = {
            id(value): value for where in self._target_bindings if isinstance(value := where.read([]), torch.Tensor)
        }
        return list(values.values())


def _asking_modules(capture: Capture) -> list[nn.Module]:
    """Modules that look at the types of their parameters before they use one, to choose a fast path."""
    kinds = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)
    return [module for root in capture.found.modules.values() for module in root.modules() if isinstance(module, kinds)]


def _carried_by(graph: StepGraph) -> dict[str, frozenset[int]]:
    """For each carried value: the blocks that need it, directly or through another moved node."""
    needs: dict[Any, set[int]] = {}
    for node in reversed(moved_nodes(graph)):
        blocks = {node.meta["next_iteration"]}.union(*(needs.get(user, ()) for user in node.users)) - {SHARED}
        needs[node] = blocks
    return {
        Slot(SlotKind.CARRY, node.name).id: frozenset().union(*(needs.get(user, ()) for user in node.users))
        for node in carried_nodes(graph)
    }


def _target_slots(graph: StepGraph) -> list[str]:
    """Slots that moved nodes write or find again, and the parameters whose gradient they make."""
    moved = set(moved_nodes(graph))
    if not moved:
        return []
    again = found_again(graph)
    slots = [
        slot_id
        for slot_id, node in graph.placeholders().items()
        if (node in again and not moved.isdisjoint(node.users)) or graph.updates.get(slot_id) in moved
    ]
    params = {slot.name: slot.id for slot in graph.slots_of_kind(SlotKind.PARAM)}
    names = [slot_id.removeprefix(f"{SlotKind.GRAD}.") for slot_id, value in graph.results.items() if value in moved]
    return list(dict.fromkeys([*slots, *(params[name] for name in names if name in params)]))
