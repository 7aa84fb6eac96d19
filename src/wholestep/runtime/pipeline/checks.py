"""What a pipeline looks at before it runs: whether a capture still fits, and what it must not contain."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from wholestep import _recording_torch, _waiting_torch
from wholestep._recording_torch import RANDOM_STATE
from wholestep.capture import Capture, source, tree
from wholestep.capture.record import Difference, ReadGuard, Watch
from wholestep.errors import PipelineError
from wholestep.graph import ops
from wholestep.runtime.guards import make_forward_guards
from wholestep.runtime.owner_guards import found_type


class CaptureGuard:
    """What the capture of a micro-batch took for granted, but for what `signature` tells apart."""

    def __init__(self, captured: Capture) -> None:
        self._watch = Watch()
        self._guards = make_forward_guards(captured, self._watch)
        self._reads = ReadGuard(list(captured.recording.roots), found_type, self._watch)

    def check(self, given: Any) -> str | None:
        """None if a call, with its `args` and `kwargs`, fits; otherwise what has changed."""
        with _waiting_torch.past_traps():
            self._watch.begin()
            for guard in self._guards:
                changed = guard(given)
                if changed is not None:
                    return changed.reason if isinstance(changed, Difference) else changed
            changed = self._reads.check(given)
        if changed is not None:
            return changed.reason
        self._watch.passed()
        return None


def signature(model: nn.Module, arguments: Any) -> Any:
    """What captures are told apart by: sizes and types of a micro-batch, modes of the model, autocast."""
    leaves, spec = tree.flatten(arguments)
    kinds = tuple(_kind(leaf) for leaf in leaves)
    modes = tuple(module.training for module in model.modules())
    trained = tuple(parameter.requires_grad for parameter in model.parameters())
    casts = tuple(
        (device, torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None)
        for device in ("cpu", "cuda")
    )
    return kinds, str(spec), modes, trained, casts


def _kind(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad
    return type(leaf), leaf


def refuse_python(captured: Capture) -> None:
    """Stages run on several ranks and many times for a batch: what Python would do once has no place there."""
    recording = captured.recording
    what = [f"changes '{change.name}'" for change in recording.effects.changes if not change.is_repeat]
    what += ["prints or logs something"] if recording.effects.outputs else []
    what += ["draws from Python's or NumPy's generators"] if recording.program.generators else []
    what += ["sets torch's random state"] if any(n.target in RANDOM_STATE for n in captured.graph.calls()) else []
    what += ["computes with a number of its tensors (x.item())"] if _has_numbers(captured) else []
    if what:
        raise PipelineError(f"the model or the loss {what[0]}, which a pipeline cannot do; do it outside of it")


def _has_numbers(captured: Capture) -> bool:
    return any(map(ops.is_number_of_tensors, captured.graph.calls()))


def refuse_hooks(model: nn.Module) -> None:
    """Gradients of micro-batches are added up out of sight: nobody could be shown the sum after each of them."""
    for name, parameter in model.named_parameters():
        for hook in _recording_torch.accumulated_hooks(parameter):
            where = source.location_of(hook)
            raise PipelineError(
                f"{'' if where is None else f'{where}: '}parameter '{name}' has a hook that is called after each "
                "micro-batch's gradient was added, which a pipeline cannot do; use register_hook, or change gradients "
                "between pipe.step() and your own optimizer.step()"
            )
