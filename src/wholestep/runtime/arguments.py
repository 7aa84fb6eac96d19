"""What arguments of a step may look like."""

from __future__ import annotations

import torch

from wholestep.capture import tree
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
