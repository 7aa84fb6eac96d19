"""What a step does to flags and options: it may set learning rates and `requires_grad`, not an optimizer's flags."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from wholestep.capture import discover
from wholestep.capture.binding import Binding
from wholestep.capture.discover import Reachable
from wholestep.capture.record import AsksBefore, participants
from wholestep.capture.record.numbers import is_number, is_real
from wholestep.capture.session import Lifted
from wholestep.errors import CaptureError
from wholestep.graph import SlotKind

_OWNED = (SlotKind.PARAM, SlotKind.BATCH)


def flags(optimizer: Optimizer) -> list[Any]:
    """What the step must leave alone of an optimizer: the number of its groups, and the flags of torch's own."""
    own = vars(optimizer) if type(optimizer).__module__.startswith("torch.optim") else {}
    values = [value for key, value in own.items() if not participants.is_managed_item(key)]
    return [len(optimizer.param_groups), *map(discover.fingerprint, values)]


def refuse_changes(
    lifted: Collection[Lifted],
    found: Reachable,
    before: dict[str, list[Any]],
    rates: Collection[Any],
    *,
    asks_before: bool,
) -> None:
    """Refuse what would be frozen at its captured value; `before` are the flags of each optimizer before the step.

    Learning rates that the step sets (a schedule, `scheduler.step()`) are written after each call like any other item
    of a dict; as they were, they have to be plain numbers then, not the graph's own: `asks_before`, or traced again.
    """
    twins = {id(entry.twin) for entry in lifted} | {id(rate) for rate in rates}
    for name, optimizer in found.optimizers.items():
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if flags(optimizer) != before[name] or any(id(parameter) not in twins for parameter in parameters):
            raise CaptureError(
                f"the step changes a flag or the parameters of {name} ({type(optimizer).__name__})",
                advice="Change them outside of the step",
            )
        new = [rate for group in optimizer.param_groups if id(rate := group.get("lr")) not in twins and "lr" in group]
        if new and not asks_before:
            raise AsksBefore
        if not all(is_number(rate) or is_real(rate) for rate in new):
            raise CaptureError(
                f"the step gives {name} ({type(optimizer).__name__}) a learning rate that is no plain number",
                advice="Set it outside of the step, or write to the tensor that is there: group['lr'].fill_(value)",
            )
    for entry in lifted:
        if entry.slot.kind not in _OWNED and _has_other_flag(entry):
            raise CaptureError(
                f"the step changes requires_grad of '{entry.slot.name}'",
                advice="Pass it as an argument, or make one of your own: x = x.detach().requires_grad_()",
            )


def flags_left(lifted: Collection[Lifted], bindings: Mapping[str, Binding]) -> tuple[tuple[Binding, bool], ...]:
    """Where the step leaves `requires_grad` of parameters and arguments otherwise than it was: it does so each time."""
    changed = [entry for entry in lifted if entry.slot.kind in _OWNED and _has_other_flag(entry)]
    return tuple((bindings[entry.slot.id], entry.twin.requires_grad) for entry in changed)


def _has_other_flag(entry: Lifted) -> bool:
    return isinstance(entry.real, torch.Tensor) and entry.twin.requires_grad is not entry.real.requires_grad
