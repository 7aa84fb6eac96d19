"""The seams of `torch.compile` that Wholestep uses: AOTAutograd's joint graphs. As private as `_torch`.

Seen in torch 2.11 to 2.13.
"""

from __future__ import annotations

from typing import Any

from torch import fx
from torch._functorch._aot_autograd.descriptors import SavedForBackwardsAOTOutput


def output_meta(joint: fx.GraphModule, num_forward: int, num_saved: int | None) -> dict[str, Any]:
    """What AOTAutograd notes about the outputs of a forward with `num_saved` saved values, or of a backward (None)."""
    [output] = joint.graph.find_nodes(op="output")
    known = output.meta.get("desc")
    if known is None:
        return {}
    if num_saved is None:
        return {"desc": [*known[num_forward:]]}
    return {"desc": [*known[:num_forward], *(SavedForBackwardsAOTOutput(index) for index in range(num_saved))]}
