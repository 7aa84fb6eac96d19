"""Python side effects: what a step leaves on its modules and around itself besides tensors.

A captured step does not run the user's Python again, so whatever it counts or stores there would stand still. A value
that settles after one step (a cached length) is kept as eager would leave it; one that changes with every step is
refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from wholestep import _torch
from wholestep.capture.discover import Reachable
from wholestep.errors import CaptureError

_NUMBERS = (bool, int, float)

Change = tuple[nn.Module, str, Any]


def module_changes(root: nn.Module, before: dict[nn.Module, dict[str, Any]], slots: set[int]) -> list[Change]:
    """Numbers that a trace left with another value on a module; raises `CaptureError` for a computed tensor left there.

    `before` holds the attributes of each submodule as they were when the trace began; `slots` the ids of traced
    parameters and buffers, which a module may well refer to a second time (as `nn.LSTM` does).
    """
    changes: list[Change] = []
    for path, module in root.named_modules():
        for name, value in vars(module).items():
            old = before.get(module, {}).get(name)
            if value is old or isinstance(value, (dict, set)):
                continue
            if any(_torch.is_traced(item) and id(item) not in slots for item in _shallow(value)):
                raise CaptureError(
                    f"the forward stores a tensor in attribute '{name}' of module '{path or type(root).__name__}'",
                    advice="Register it as a buffer, or return it from the step",
                )
            if isinstance(value, (torch.SymInt, torch.SymFloat)):
                raise CaptureError(f"the forward keeps a size in attribute '{name}' of '{path}', so it must be fixed")
            if isinstance(value, _NUMBERS) and value != old:
                changes.append((module, name, value))
    return changes


def refuse_counters(changes: list[Change], found: Reachable, location: str | None) -> None:
    """Numbers that changed in a second trace as well: the step counts something."""
    if not changes:
        return
    module, name, _ = changes[0]
    paths = {id(m): path for root in found.modules.values() for path, m in root.named_modules()}
    raise CaptureError(
        f"every step changes the number '{name}' of module '{paths[id(module)] or type(module).__name__}'",
        location=location,
        advice="A captured step does not run Python again: keep the count in a buffer, or outside the step",
    )


def refuse_outer_changes(found: Reachable, location: str | None) -> None:
    """Numbers and containers in the closure, globals or objects that the step itself has just changed."""
    for name, free in found.free_values.items():
        if not free.has_changed():
            continue
        free.put_back()
        raise CaptureError(
            f"the step changes '{name}', which is outside of it",
            location=location,
            advice="A captured step does not run Python again: return what is to be kept, and count outside the step",
        )


def refuse_mode_changes(found: Reachable, before: list[dict[nn.Module, dict[str, Any]]]) -> None:
    """Train/eval mode that the step leaves switched."""
    for name, attributes in zip(found.modules, before, strict=True):
        if any(module.training is not old["training"] for module, old in attributes.items()):
            raise CaptureError(
                f"the step leaves '{name}' in another mode", advice="Call train() and eval() outside of it"
            )


def _shallow(value: Any) -> list[Any]:
    if isinstance(value, torch.Tensor):
        return [value]
    return list(value) if isinstance(value, (list, tuple)) else []
