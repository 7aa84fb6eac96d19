"""The figures of a step, gathered once for every way of showing them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import fx

from wholestep.cost import Cost, LiveValue, MemoryProfile, node_cost, profile_memory
from wholestep.cost.memory import storage_bytes, tensors_in
from wholestep.graph import Phase, SlotKind, StepGraph
from wholestep.lower import Region

OUTSIDE_MODULES = "(outside modules)"
_MAX_LINES = 3000

_SLOT_NAMES = {
    SlotKind.PARAM: "parameters",
    SlotKind.BUFFER: "buffers",
    SlotKind.STATE: "optimizer state",
    SlotKind.GRAD: "gradients",
    SlotKind.LR: "learning rates",
    SlotKind.BATCH: "batch",
    SlotKind.CONSTANT: "constants",
    SlotKind.CARRY: "carried over",
}


@dataclass(frozen=True)
class SlotTotal:
    """All slots of one kind."""

    name: str
    num_slots: int
    num_bytes: int


@dataclass(frozen=True)
class ModuleTotal:
    """Modules at the same place of repeated layers: `blocks.*.expand` stands for `num_modules` of them."""

    name: str
    num_modules: int
    forward: Cost
    backward: Cost

    @property
    def total(self) -> Cost:
        return self.forward + self.backward


@dataclass(frozen=True)
class GraphSummary:
    """What a step graph does and needs."""

    phases: dict[Phase, Cost]
    slots: tuple[SlotTotal, ...]
    modules: tuple[ModuleTotal, ...]
    memory: MemoryProfile
    at_peak: tuple[tuple[str, int], ...]

    @property
    def total(self) -> Cost:
        return sum(self.phases.values(), Cost())


def summarise(graph: StepGraph) -> GraphSummary:
    """Gather costs by phase and module, slots by kind, and the memory profile."""
    costs = {node: node_cost(node) for node in _ops_of(graph)}
    present = {phase: Cost() for phase in Phase if any(node.meta["phase"] is phase for node in costs)}
    for node, cost in costs.items():
        present[node.meta["phase"]] += cost
    memory = profile_memory(graph)
    return GraphSummary(present, _slot_totals(graph), _module_totals(costs), memory, _group(memory.at_peak))


def _ops_of(graph: StepGraph) -> Iterator[fx.Node]:
    """All calls; of a region those in it, which is what it computes."""
    for node in graph.calls():
        if isinstance(node.target, Region):
            yield from node.target.calls
        else:
            yield node


def _slot_totals(graph: StepGraph) -> tuple[SlotTotal, ...]:
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    totals: list[SlotTotal] = []
    for kind in SlotKind:
        nodes = [node for node in inputs if graph.slots[node.name].kind is kind]
        if nodes:
            tensors = [tensor for node in nodes for tensor in tensors_in(node.meta.get("val"))]
            totals.append(SlotTotal(_SLOT_NAMES[kind], len(nodes), sum(storage_bytes(tensor) for tensor in tensors)))
    return tuple(totals)


def _module_totals(costs: dict[fx.Node, Cost]) -> tuple[ModuleTotal, ...]:
    """Forward and backward cost by module pattern, most flops first."""
    paths: dict[str, set[str]] = {}
    forward: dict[str, Cost] = {}
    backward: dict[str, Cost] = {}
    for node, cost in costs.items():
        path = node.meta.get("fqn", "")
        if not path or node.meta["phase"] not in (Phase.FORWARD, Phase.BACKWARD):
            continue
        name = module_pattern(path)
        paths.setdefault(name, set()).add(path)
        side = forward if node.meta["phase"] is Phase.FORWARD else backward
        side[name] = side.get(name, Cost()) + cost
    totals = [
        ModuleTotal(name, len(paths[name]), forward.get(name, Cost()), backward.get(name, Cost())) for name in paths
    ]
    return tuple(sorted(totals, key=lambda item: (-item.total.flops, -item.total.bytes_moved, item.name)))


def _group(values: Iterable[LiveValue]) -> tuple[tuple[str, int], ...]:
    """Bytes of live values by what they belong to, largest first."""
    groups: dict[str, int] = {}
    for value in values:
        name = _SLOT_NAMES[value.slot.kind] if value.slot else module_pattern(value.fqn) or OUTSIDE_MODULES
        groups[name] = groups.get(name, 0) + value.num_bytes
    return tuple(sorted(((name, size) for name, size in groups.items() if size), key=lambda item: (-item[1], item[0])))


def listing(graph: StepGraph) -> str:
    """A graph as code, without the end of a very long one."""
    lines = [line.rstrip() for line in str(graph).splitlines()]
    left_out = len(lines) - _MAX_LINES
    return "\n".join(lines if left_out <= 0 else [*lines[:_MAX_LINES], f"# … {left_out} more lines are left out"])


def module_pattern(path: str) -> str:
    """A module path with layer numbers left out: `blocks.0.expand` -> `blocks.*.expand`."""
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


def format_bytes(num_bytes: float) -> str:
    """A size in the unit that keeps it short: `60.7 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def format_count(number: float) -> str:
    """A count of operations with a decimal prefix: `4.9 G`; small ones as they are."""
    for prefix in ("", " k", " M", " G", " T"):
        if abs(number) < 1000:
            return f"{number:.0f}" if not prefix else f"{number:.1f}{prefix}"
        number /= 1000
    return f"{number:.1f} P"


def format_seconds(seconds: float) -> str:
    """A duration in seconds, or in milliseconds where those are easier to read."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def format_share(part: float, whole: float) -> str:
    """A percentage; `–` of nothing."""
    return f"{part / whole:.1%}" if whole else "–"
