"""Imports inside the step: a module that is not loaded yet is imported outside of the trace, which is made again then.

Its own code would run within the trace otherwise: tensors that it makes and keeps would be stand-ins.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from importlib.util import resolve_name
from typing import Any

_tried: set[tuple[str, tuple[str, ...]]] = set()
"""Imports that have been made outside, and left something missing: the step itself sees what comes of them."""


class Unimported(BaseException):
    """The step is about to import what is not loaded yet."""

    def __init__(self, name: str, members: tuple[str, ...]) -> None:
        super().__init__(name)
        self.name = name
        self.members = members

    def load(self) -> None:
        """Import it, as the step would do; errors are left to the step."""
        _tried.add((self.name, self.members))
        with contextlib.suppress(Exception):
            module = importlib.import_module(self.name)
            for member in self.members:
                if not hasattr(module, member):
                    importlib.import_module(f"{self.name}.{member}")


def require_loaded(name: str, package: str | None = None, members: tuple[str, ...] = ()) -> None:
    """Raise `Unimported` before the import of a module, or of some of its members, that are not loaded."""
    absolute = resolve_name(name, package) if name.startswith(".") else name
    if (absolute, members) not in _tried and not _is_loaded(absolute, members):
        raise Unimported(absolute, members)


def _is_loaded(name: str, members: tuple[str, ...]) -> bool:
    module: Any = sys.modules.get(name)
    if module is None:
        return False
    present = getattr(module, "__dict__", {})  # looking for a member may load it
    return all(member == "*" or member in present or f"{name}.{member}" in sys.modules for member in members)
