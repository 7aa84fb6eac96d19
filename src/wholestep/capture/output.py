"""The user's return value as a template: which leaves are computed, which are slots, which are plain Python."""

from __future__ import annotations

from typing import Any

from wholestep.capture import tree
from wholestep.capture.binding import Binding


class Computed:
    """A leaf that the graph computes: its position among the graph's outputs."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class FromSlot:
    """A leaf that is what a slot holds: a parameter, an argument handed through, a learning rate."""

    __slots__ = ("where",)

    def __init__(self, where: Binding) -> None:
        self.where = where


class Known:
    """A leaf that is the same object after every call: a number, a string, None."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class OutputTemplate:
    """Rebuilds the user's return value from the graph's outputs."""

    def __init__(self, template: Any) -> None:
        self._template = template
        self._is_single = isinstance(template, Computed)

    def fill(self, values: tuple[Any, ...], leaves: list[Any]) -> Any:
        """The return value of one call, from what the graph computed and the leaves of the call's arguments."""
        if self._is_single:
            return values[self._template.index]

        def resolve(leaf: Computed | FromSlot | Known) -> Any:
            if isinstance(leaf, Computed):
                return values[leaf.index]
            return leaf.where.read(leaves) if isinstance(leaf, FromSlot) else leaf.value

        return tree.map_leaves(resolve, self._template)
