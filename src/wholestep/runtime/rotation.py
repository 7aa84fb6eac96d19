"""A step as a loop: the graphs of its first, middle and last call, and what one call leaves for the next."""

from __future__ import annotations

import logging
import threading
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from wholestep import _torch
from wholestep.capture import Capture
from wholestep.capture.binding import Binding, FixedTensor
from wholestep.compiler import LoopGraphs
from wholestep.graph import SlotKind, StepGraph, nodes_in, ops
from wholestep.iteration import Kind, moved_nodes
from wholestep.iteration.moves import found_again, kept_gradients
from wholestep.lower import dump_regions, memory_of
from wholestep.runtime.cuda_graph import why_not_recorded
from wholestep.runtime.executable import Executable
from wholestep.runtime.journal import Journal
from wholestep.runtime.pending import Pending, Targets

logger = logging.getLogger(__name__)


class Rotation:
    """Runs the graphs of a step's loop.

    With `cuda_graphs` those that can run as CUDA graphs do. What is in their regions is written to `dump_dir`; unless
    it `compiles`, regions are left as they are.
    """

    def __init__(
        self,
        loop: LoopGraphs,
        capture: Capture,
        name: str,
        *,
        cuda_graphs: bool = False,
        dump_dir: Path | None = None,
        compiles: bool = True,
    ) -> None:
        self.graphs = loop
        self._name = name
        self._dump_dir = dump_dir
        self._cuda_graphs = cuda_graphs
        self._compiles = compiles
        self._bindings: dict[str, Binding] = capture.bindings
        self._held = _target_slots(loop.source)
        self._setup = self._executable(loop.setup, Kind.SETUP) if loop.blocks else self._whole
        self._main = self._executable(loop.main, Kind.MAIN) if loop.blocks else self._whole
        # Before anything waits there is what applies it: a reader may come from where nothing can be compiled.
        self._flush = self._executable(loop.flush, Kind.FLUSH) if loop.blocks else None
        self.pending = Pending(name, self._targets(capture), self._flush)
        if capture.dynamic_dims and loop.plan.is_lowered:
            # Compiling regions may bring more assumptions about sizes, and guards are made of those known by then.
            _ = self._whole, self._cleanup

    @property
    def graph(self) -> StepGraph:
        """What a call in the middle of the loop runs."""
        return self._main.graph

    @property
    def in_loop(self) -> Executable | None:
        """What the next call runs if it is one in the middle of the loop; None if it is the first to run that."""
        is_in_loop = self._main.is_ready and (not self.graphs.blocks or self.pending.can_begin)
        return self._main if is_in_loop else None

    def run(self, leaves: list[Any], *, is_last: bool, number: int = 0) -> tuple[Any, ...]:
        """One call of the loop, the caller's `number`th; it has the turn of `pending`.

        If it raises, what waited has been applied, as it would have been in eager, or cannot be read.
        """
        if not self.graphs.blocks:
            return self._whole.run(leaves)[0]
        pending = self.pending
        pending.runner = threading.get_ident()
        try:
            does_end = is_last and pending.can_begin and self._ends_in_place
            in_loop = self._cleanup if does_end else self._main
            journal = pending.begin(in_loop)
            if journal is None:
                pending.settle()
                does_wait = not is_last and not pending.why_not_held()
                outputs, carries = (self._setup if does_wait else self._whole).run(leaves)
            else:
                does_wait = in_loop is self._main
                outputs, carries = self._apply_and_run(in_loop, leaves, journal)
            if does_wait:
                pending.leave(carries, number)
        finally:
            pending.runner = None
        if is_last or not does_wait or pending.is_wanted:
            pending.settle()
        return outputs

    def _apply_and_run(
        self, executable: Executable, leaves: list[Any], journal: Journal
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self.pending.continued()
        try:
            return executable.run(leaves, journal)
        except Exception as error:
            self.pending.settle_after(error)
            raise

    @cached_property
    def _whole(self) -> Executable:
        return self._executable(self.graphs.whole, "step")

    @cached_property
    def _cleanup(self) -> Executable:
        return self._executable(self.graphs.cleanup, Kind.CLEANUP) if self.graphs.blocks else self._whole

    @cached_property
    def _ends_in_place(self) -> bool:
        """Whether the last call's graph applies the call before where a flush would: then it can be resumed like one.

        It may put the old update into memory of its own instead, as only the new one has to be in its slot in the end.
        """
        assert self._flush is not None
        return _written_slots(self._cleanup.graph) == _written_slots(self._flush.graph)

    def _executable(self, graph: StepGraph, label: str) -> Executable:
        if self._dump_dir is not None:
            folder = self._dump_dir / "regions"
            dump_regions(graph, folder / label if self.graphs.blocks else folder)
        return Executable(
            graph,
            self._bindings,
            label,
            is_recorded=self._can_be_recorded(graph),
            held=self._held,
            applies=label in (Kind.MAIN, Kind.CLEANUP, Kind.FLUSH),
            is_flush=label == Kind.FLUSH,
            compiles=self._compiles,
        )

    def _can_be_recorded(self, graph: StepGraph) -> bool:
        if not self._cuda_graphs:
            return False
        obstacle = why_not_recorded(graph)
        graph.remarks["cuda_graphs"] = (obstacle,) if obstacle else ()
        if obstacle:
            logger.warning("%s runs without CUDA graphs: %s", self._name, obstacle)
        return not obstacle

    def _targets(self, capture: Capture) -> Targets:
        """Tensors that must not be seen while updates wait, and who has them."""
        bindings = {slot_id: self._bindings[slot_id] for slot_id in self._held}

        def read() -> dict[str, torch.Tensor]:
            values = {slot_id: binding.read([]) for slot_id, binding in bindings.items()}
            return {slot_id: value for slot_id, value in values.items() if isinstance(value, torch.Tensor)}

        kept = kept_gradients(self.graphs.source)
        names = dict.fromkeys(kept, True) | dict.fromkeys(_coming_gradients(self.graphs.source), False)
        params = self.graphs.source.slots_of_kind(SlotKind.PARAM)
        gradients = {slot.id: names[slot.name] for slot in params if slot.name in names}
        ids = {id(binding.tensor) for binding in bindings.values() if isinstance(binding, FixedTensor)}
        modules = {id(module): module for root in capture.found.modules.values() for module in root.modules()}
        owners = [
            module
            for module in modules.values()
            if any(id(parameter) in ids for parameter in _torch.own_parameters(module).values())
        ]
        written = {} if self._flush is None else _written_slots(self._flush.graph)
        # Fused optimizers count no versions.
        versioned = frozenset(
            slot for slot, ops_there in written.items() if any("_fused_" not in op for op in ops_there)
        )
        return Targets(read, gradients, versioned, owners)


def _written_slots(graph: StepGraph) -> dict[str, list[str]]:
    """By slot: the ops of the call before that write there, in order."""
    found: dict[str, list[str]] = {}
    for node in graph.calls():
        if "applies" in node.meta and ops.is_op(node):
            arguments = [node.args[index] for index in ops.written_arguments(node.target) if index < len(node.args)]
            for slot in {graph.slot_of(memory_of(source)) for source in nodes_in(arguments)} - {None}:
                found.setdefault(slot.id, []).append(str(node.target))  # pyright: ignore[reportOptionalMemberAccess]
    return found


def _target_slots(graph: StepGraph) -> list[str]:
    """Slots that moved nodes write or find again, and the parameters whose gradient they make or need."""
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
    names = [*_coming_gradients(graph), *sorted(kept_gradients(graph))]
    return list(dict.fromkeys([*slots, *(params[name] for name in names if name in params)]))


def _coming_gradients(graph: StepGraph) -> list[str]:
    """Names of what gets its gradient from moved nodes."""
    moved = set(moved_nodes(graph))
    return [slot_id.removeprefix(f"{SlotKind.GRAD}.") for slot_id, value in graph.results.items() if value in moved]
