"""The `lower` pass: regions go to Inductor, the rest runs as it is."""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import fx

from wholestep.graph import Phase, StepGraph, ops
from wholestep.lower.numbers import lower_numbers
from wholestep.lower.outline import outline
from wholestep.lower.region import Region
from wholestep.lower.regions import NodePredicate, RegionPredicate, divide, merged
from wholestep.passes.base import Pass, register

_MAX_NAME = 48
_EMPTY = torch.ops.aten.empty_strided.default


@register
@dataclass(frozen=True)
class Lower(Pass):
    """Outline all runs of at least `min_ops` ops that Inductor can compile; what is left is noted with the reason.

    ```
    forward = regions.forward([tokens, weight, ...])
    loss = forward[0]; ...
    backward = regions.backward([relu, weight, ...])
    ```
    """

    name: ClassVar[str] = "lower"
    after: ClassVar[tuple[str, ...]] = ("decompose", "remat", "overlap", "rotate")
    min_ops: int = 10

    def apply(self, graph: StepGraph) -> StepGraph:
        _draw_first(graph)
        lower_numbers(graph, min_ops=self.min_ops)
        graph.eliminate_dead_code()
        lower_graph(graph, min_ops=self.min_ops)
        return graph


def lower_graph(
    graph: StepGraph,
    *,
    min_ops: int,
    node_predicate: NodePredicate | None = None,
    region_predicate: RegionPredicate | None = None,
) -> None:
    """Outline the regions of a graph and note the breaks."""
    _bring_items_home(graph)
    division = divide(graph, min_ops=min_ops, node_predicate=node_predicate, region_predicate=region_predicate)
    taken: set[str] = set()
    for nodes in division.regions:
        outline(graph, nodes, _unused_name(region_name(nodes), taken))
    graph.remarks["lower"] = tuple(str(item) for item in merged(division.breaks))


def regions_of(graph: StepGraph) -> list[Region]:
    """The regions of a lowered graph, in order."""
    return [node.target for node in graph.calls() if isinstance(node.target, Region)]


def dump_regions(graph: StepGraph, folder: Path) -> None:
    """Write the ops of each region, as Python, to a file that is called like it."""
    for region in regions_of(graph):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{region.name}.py").write_text(
            f"import torch\nfrom torch import device, inf, nan\n\n\n{region.code}\n"
        )


def region_name(nodes: Sequence[fx.Node]) -> str:
    """Phase and common module path of a region's nodes: `forward_blocks_3`."""
    paths = [node.meta["fqn"].split(".") for node in nodes if node.meta.get("fqn")]
    common = [names[0] for names in itertools.takewhile(lambda names: len(set(names)) == 1, zip(*paths))]
    text = "_".join([str(nodes[0].meta["phase"]), *common])
    return re.sub(r"\W", "_", text)[:_MAX_NAME].rstrip("_")


def _unused_name(name: str, taken: set[str]) -> str:
    """A name with a number behind it if need be: the second region of `blocks` must not be called like `blocks.2`."""
    names = (name if number == 1 else f"{name}_part{number}" for number in itertools.count(1))
    chosen = next(candidate for candidate in names if candidate not in taken)
    taken.add(chosen)
    return chosen


def _bring_items_home(graph: StepGraph) -> None:
    """Items of a tuple come right behind it, in its phase: no tuple crosses the border of a region."""
    for node in graph.calls():
        for item in [user for user in node.users if user.target is operator.getitem]:
            node.append(item)
            item.meta["phase"] = node.meta["phase"]


def _draw_first(graph: StepGraph) -> None:
    """Draw a forward's random numbers in front of it, in their order, so that they do not cut it into pieces.

    They are there until the backward anyway. A draw that needs more than a shape stays where it is, and so do all
    behind it: effects keep their order.
    """
    start: fx.Node | None = None
    for node in list(graph.calls()):
        is_forward = node.meta["phase"] is Phase.FORWARD
        if node.meta["phase"] is Phase.BACKWARD:
            start = None  # a forward behind it is another one
        if not ops.has_effect(node) or ops.is_collective(node.target):
            start = node if start is None and is_forward else start
            continue
        sources = node.all_input_nodes
        if not is_forward or any(not _is_bare(source) for source in sources):
            return
        if start is None:
            continue  # nothing comes before it
        for source in sources:
            value = source.meta["val"]
            options = {"dtype": value.dtype, "device": value.device}
            args = (list(value.shape), list(value.stride()))
            blank = graph.insert(_EMPTY, args, options, like=source, before=start)
            node.replace_input_with(source, blank)
        start.prepend(node)


def _is_bare(node: fx.Node) -> bool:
    """Whether a node is memory of a fixed size that nothing has been written to."""
    value = node.meta["val"]
    if node.target is not torch.ops.aten.empty_like.default:
        return False
    return not any(isinstance(size, torch.SymInt) for size in (*value.shape, *value.stride()))
