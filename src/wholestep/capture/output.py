"""The user's return value as a template: which leaves are computed, which are slots, which are plain Python."""

from __future__ import annotations

from typing import Any

from wholestep.capture import tree


class Computed:
    """A leaf that the graph computes: its position among the graph's outputs."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class Known:
    """A leaf that is the same object after every call: a parameter, a buffer, a number, a string."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class OutputTemplate:
    """Rebuilds the user's return value from the graph's outputs."""

    def __init__(self, template: Any) -> None:
        self._template = template
        self._is_single = isinstance(template, Computed)

    def fill(self, values: tuple[Any, ...]) -> Any:
        """The return value of one call."""
        if self._is_single:
            return values[self._template.index]
        return tree.map_leaves(
            lambda leaf: values[leaf.index] if isinstance(leaf, Computed) else leaf.value, self._template
        )
