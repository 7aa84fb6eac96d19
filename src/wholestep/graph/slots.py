"""Slots: the named inputs of a step graph, and what the step leaves behind in them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class SlotKind(StrEnum):
    """What a graph input stands for."""

    PARAM = "param"
    BUFFER = "buffer"
    STATE = "state"
    GRAD = "grad"
    LR = "lr"
    NUMBER = "number"
    BATCH = "batch"
    CONSTANT = "constant"
    CARRY = "carry"


@dataclass(frozen=True, order=True)
class Slot:
    """One input of the step, under the name a user would recognise.

    `name` is the parameter's or buffer's FQN; for STATE and GRAD that of the parameter it belongs to; for LR the
    parameter group's; for NUMBER (a Python number that changes from call to call) the one it has in the recording; for
    BATCH the path into the arguments (`batch['x']`). `key` is the entry of the optimizer state. A CARRY is a value that
    the previous iteration left for this one; its name is that of the node that made it.
    `aliases` are further FQNs of the same tensor (tied weights).
    """

    kind: SlotKind
    name: str
    key: str = ""
    aliases: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        """Unique text form: `param.wte.weight`, `state.wte.weight.exp_avg`, `lr.0`."""
        return f"{self.kind}.{self.name}.{self.key}" if self.key else f"{self.kind}.{self.name}"

    def __str__(self) -> str:
        return self.id
