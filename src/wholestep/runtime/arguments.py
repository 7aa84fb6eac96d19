"""What arguments and options of a step may look like."""

from __future__ import annotations

import torch

from wholestep.capture import Capture, tree
from wholestep.errors import CaptureError


def refuse_tensor_keys(spec: tree.Spec) -> None:
    """Raise `CaptureError` for a dict with tensors as keys: such a key is found by identity, which no call keeps."""
    if isinstance(spec, tree.Leaf):
        return
    if any(isinstance(key, torch.Tensor) for key in spec.keys):
        raise CaptureError(
            f"an argument is a {spec.type.__name__} with tensors as keys",
            advice="Use names or numbers as keys, or pass keys and values as two lists",
        )
    for child in spec.children:
        refuse_tensor_keys(child)


def refuse_unplannable(captured: Capture, memory_budget: object) -> None:
    """Raise `CaptureError` for a budget of a step with sizes that values decide: calls may need more than planned."""
    if memory_budget is not None and captured.sizes_of_values is not None:
        raise CaptureError(
            "the step makes a tensor whose size depends on values, so that its memory cannot be planned",
            location=captured.sizes_of_values,
            advice="Keep the shape and mask instead: torch.where, (x * mask).sum() / mask.sum(); or leave out "
            "memory_budget",
        )
