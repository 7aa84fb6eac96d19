"""Random numbers that do not depend on who draws them when.

One process draws masks in the order of its ops, one stream for all. Stages on several ranks cannot: none knows where
the stream would be. Here every random op of the model has a number, and draws from a stream of its own, which the
number, the micro-batch and the step begin. Masks are then the same for every cut, schedule and number of ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from wholestep import _torch
from wholestep.graph import StepGraph, ops, rng_state

# Node meta: the number of a random op among those of the model.
_NUMBER = "draw"
_MASK = 2**64 - 1

_seeds: list[int] = []


def number_draws(graph: StepGraph) -> None:
    """Number the random ops of a graph, before it is rewritten."""
    draws = [node for node in graph.calls() if ops.is_op(node) and ops.draws(node)]
    for number, node in enumerate(draws):
        node.meta[_NUMBER] = number


def insert_seeds(graph: StepGraph) -> None:
    """Begin a stream in front of every op with a number, and before its state is read for a second run."""
    for node in list(graph.calls()):
        if _NUMBER in node.meta:
            place = node.prev if node.prev.target is rng_state else node
            graph.insert(Reseed(node.meta[_NUMBER], _device_of(node)), (), like=node, before=place)


@contextlib.contextmanager
def seeded(seed: int) -> Generator[None]:
    """Draw from streams that `seed` begins, and leave the generators of the process as they are."""
    with torch.random.fork_rng():
        _seeds.append(seed)
        try:
            yield
        finally:
            _seeds.pop()


@dataclass(frozen=True)
class Reseed:
    """A call that begins the stream of the next random op."""

    number: int
    device: str

    @property
    def __name__(self) -> str:
        return f"reseed_{self.number}"

    def __str__(self) -> str:
        return f"wholestep.runtime.pipeline.draws.Reseed({self.number}, {self.device!r})"

    def __call__(self) -> None:
        if _torch.is_faking():
            return
        seed = seed_of(_seeds[-1], self.number)
        if self.device.startswith("cuda"):
            with torch.cuda.device(self.device):
                torch.cuda.manual_seed(seed)
        else:
            torch.default_generator.manual_seed(seed)


def seed_of(*numbers: int) -> int:
    """Another seed for other numbers: their bits mixed, the same on every machine."""
    mixed = 0x9E3779B97F4A7C15
    for number in numbers:
        mixed = ((mixed ^ number) * 0xBF58476D1CE4E5B9) & _MASK
        mixed ^= mixed >> 31
    return mixed >> 1


def _device_of(node: fx.Node) -> str:
    value: Any = node.meta["val"]
    tensor = value[0] if isinstance(value, (list, tuple)) else value
    return str(tensor.device)
