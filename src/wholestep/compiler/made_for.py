"""What a plan was made for: it fits the same step, captured by the same version, on as many ranks, and no other."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch
from torch import fx

from wholestep._version import __version__
from wholestep.errors import PlanError
from wholestep.graph import StepGraph

_WORDS = {
    "wholestep": "version of wholestep",
    "world": "number of ranks",
    "inputs": "parameters, state and batch",
    "num_ops": "number of ops",
    "graph": "ops",
    "torch": "version of torch",
}
"""What must be the same, in the order in which it is worth saying what is not."""
_HASHED = ("inputs", "graph")


@dataclass(frozen=True)
class MadeFor:
    """The step as it was captured, in marks: `inputs` of its slots with shapes and types, `graph` of all its ops.

    `source` is `FILE.py:FUNCTION`, for those who read the plan.
    """

    step: str
    source: str
    wholestep: str
    torch: str
    world: int
    num_ops: int
    inputs: str
    graph: str

    @staticmethod
    def of(graph: StepGraph, name: str, world: int) -> MadeFor:
        """For a graph as it was captured, before any rewrite."""
        return MadeFor(
            name,
            "",
            __version__,
            torch.__version__.partition("+")[0],
            world,
            graph.num_ops,
            _mark(_input_lines(graph)),
            _mark(_call_lines(graph)),
        )

    def require_same(self, other: MadeFor) -> None:
        """Raise `PlanError`, saying what differs, unless the plan fits another step as well."""
        differing = [field.name for field in fields(self) if getattr(self, field.name) != getattr(other, field.name)]
        if not {"wholestep", "world", "inputs", "num_ops", "graph"}.isdisjoint(differing):
            said = [
                word if name in _HASHED else f"{word} ({getattr(self, name)} in the plan, {getattr(other, name)} here)"
                for name, word in _WORDS.items()
                if name in differing
            ]
            raise PlanError(
                f"the plan was made for another step than {other.step}, which differs in its {', '.join(said)}; plan "
                "it again (wholestep plan ... --save, or step.plan.save)"
            )


def _mark(lines: Iterator[str]) -> str:
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line.encode())
        digest.update(b"\n")
    return digest.hexdigest()[:16]


def _input_lines(graph: StepGraph) -> Iterator[str]:
    for slot_id, node in graph.placeholders().items():
        yield f"{slot_id} {_value(node)}"


def _call_lines(graph: StepGraph) -> Iterator[str]:
    """Ops with their arguments and results, where no number is one of this process (a requirement's key is)."""
    for node in graph.calls():
        target = str(node.target)
        args = "" if target.startswith("wholestep.require") else f"{node.args} {node.kwargs}"
        yield f"{node.name} {target} {args} {_value(node)} {node.meta['phase']}"
    yield str(graph.output_node.args)


def _value(node: fx.Node) -> str:
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {list(value.shape)} {list(value.stride())} {value.device.type}"
    return type(value).__name__
