"""Collectives of a graph that, where a peer is gone or late, say what was waited for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from wholestep.graph import ops
from wholestep.runtime.agreement import lost_peer
from wholestep.runtime.roll_call import before_sending


class Collective:
    """A collective, or the wait for one; the error of a backend becomes a `RankError`. Equal to nothing but itself."""

    def __init__(self, call: Callable[..., Any], node: fx.Node) -> None:
        self._call = call
        self._what = _what(node)
        self._group = "" if node.target is ops.WAIT else next((arg for arg in node.args[::-1] if type(arg) is str), "")

    def __call__(self, *args: Any) -> Any:
        if self._group:
            before_sending(self._group)
        try:
            return self._call(*args)
        except RuntimeError as error:
            raise lost_peer(self._what, error) from error


def _what(node: fx.Node) -> str:
    """What travels: the gradients that a collective reduces, or that a wait is for."""
    names = [name for _, names in node.meta.get("reduces", ()) for name in names] or _waited_for(node)
    if not names:
        return f"'{node.name}'"
    return f"the gradient of {names[0]}" + (f" and {len(names) - 1} others" if len(names) > 1 else "")


def _waited_for(wait: fx.Node) -> list[str]:
    """Gradients behind a wait: its own, or those that its bucket is taken apart into."""
    names: dict[str, None] = {}
    waiting, seen = [wait], {wait}
    while waiting:
        node = waiting.pop(0)
        found: tuple[str, ...] = node.meta.get("reduced_gradient_of", ())
        names |= dict.fromkeys(found)
        if not found:
            fresh = [user for user in node.users if user not in seen and user.meta.get("phase") is node.meta["phase"]]
            seen |= set(fresh)
            waiting += fresh
    return list(names)
