"""Training steps as they are published, retyped with tiny models, and what becomes of each when it is compiled.

    python -m benchmarks.loops.run [--only NAME ...] [--kinds KIND ...] [--held-back] [--eager]

A loop is a step function decorated with `loop`, in the file of its kind. What makes the published step hard stays in
it: its Python, meters, prints, `.item()`s, conditionals on counters.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import zlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

World = SimpleNamespace
"""The models, optimizers, meters and counters of a script. Names that begin with `_` are not compared (clocks)."""

ONE_IN = 10
"""One in so many loops, chosen by name, is held back: nobody looks at it while the compiler changes.
So are loops that say so: they were added to test it, not to build it."""

_HARNESS = ("run", "render", "trial")


@dataclasses.dataclass(frozen=True)
class Edit:
    """The smallest change with which a refused step can be compiled, in words and tried.

    `between`, if it is given, runs after each call on the world and what the step returned: the place of what moves
    out; `build` makes the world where the edit is in one of its classes.
    """

    words: str
    step: Callable[..., Any]
    between: Callable[[World, Any], Any] | None = None
    build: Callable[[], World] | None = None


@dataclasses.dataclass(frozen=True)
class Loop:
    """One published training step.

    `step(world, *batch)` is its body, `build()` makes its world (called once for each side, from one seed), `batch(n)`
    the tensors and plain values of call n, from 0. `between(world, returned, n)` is what the script does after call n
    outside of the step: schedulers, ends of epochs, evaluation. With `closure`, `step(world)` returns the body, a
    closure of the script's variables. `source` names the repository and the file that the step is after.
    """

    name: str
    kind: str
    source: str
    build: Callable[[], World]
    step: Callable[..., Any]
    batch: Callable[[int], tuple[Any, ...]]
    calls: int = 8
    between: Callable[[World, Any, int], Any] | None = None
    closure: bool = False
    edit: Edit | None = None
    held_back: bool = False

    @property
    def is_held_back(self) -> bool:
        return self.held_back or zlib.crc32(self.name.encode()) % ONE_IN == 0

    def edited(self) -> Loop:
        """The same loop with its edit made."""
        assert self.edit is not None
        before, own = self.between, self.edit.between

        def between(world: World, returned: Any, number: int) -> None:
            if own is not None:
                own(world, returned)
            if before is not None:
                before(world, returned, number)

        build = self.edit.build or self.build
        return dataclasses.replace(self, step=self.edit.step, build=build, between=between, edit=None)


_LOOPS: dict[str, Loop] = {}


def loop(name: str, **fields: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated step under a name; the fields are those of `Loop`."""

    def register(step: Callable[..., Any]) -> Callable[..., Any]:
        assert name not in _LOOPS, f"two loops are called {name}"
        _LOOPS[name] = Loop(name=name, step=step, **fields)
        return step

    return register


def edit(
    name: str,
    words: str,
    between: Callable[[World, Any], Any] | None = None,
    build: Callable[[], World] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated step as the loop of that name with its smallest edit made."""

    def register(step: Callable[..., Any]) -> Callable[..., Any]:
        _LOOPS[name] = dataclasses.replace(_LOOPS[name], edit=Edit(words, step, between, build))
        return step

    return register


def all_loops() -> dict[str, Loop]:
    """Every loop of every file in this folder, by name, ordered by kind and name."""
    for module in pkgutil.iter_modules(__path__):
        if module.name not in _HARNESS:
            importlib.import_module(f"{__name__}.{module.name}")
    return {found.name: found for found in sorted(_LOOPS.values(), key=lambda found: (found.kind, found.name))}
