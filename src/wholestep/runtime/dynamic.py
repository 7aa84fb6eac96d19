"""Which sizes of a batch a capture takes as they are, and which stay symbolic."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from wholestep.runtime.guards import Call
from wholestep.runtime.owner_guards import tensor_type
from wholestep.runtime.specialization import Specialization


def choose_dynamic_leaves(dynamic_batch: bool | str, call: Call, known: Iterable[Specialization]) -> frozenset[int]:
    """Argument leaves whose dimension 0 becomes symbolic.

    `True`: all that share the batch size. `"auto"`: none at first; once a call differs from a captured one only in the
    batch size, those that changed.
    """
    batch = [index for index, leaf in enumerate(call.leaves) if isinstance(leaf, torch.Tensor) and leaf.dim() > 0]
    sizes = {index: call.leaves[index].shape[0] for index in batch}
    if not batch or sizes[batch[0]] < 2 or dynamic_batch is False:
        return frozenset()
    if dynamic_batch is True:
        return frozenset(index for index in batch if sizes[index] == sizes[batch[0]])
    changed = _changed_batch_leaves(call, batch, known)
    return changed if len({sizes[index] for index in changed}) == 1 else frozenset()


def _changed_batch_leaves(call: Call, batch: list[int], specializations: Iterable[Specialization]) -> frozenset[int]:
    for known in reversed([*specializations]):
        if known.capture.spec != call.spec or known.capture.dynamic_leaves:
            continue
        pairs = {index: (known.leaf_types[index], tensor_type(call.leaves[index])) for index in batch}
        if all(old[0][1:] == new[0][1:] and old[1:] == new[1:] for old, new in pairs.values()):
            changed = frozenset(index for index, (old, new) in pairs.items() if old != new)
            if changed:
                return changed
    return frozenset()
