"""What `torch.utils.checkpoint` has left in a joint graph of AOTAutograd, in the words of our own captures.

Under `torch.compile` a checkpointed function is traced like any other, and each node is marked: `ac_graph_id` is the
number of its region, `recompute` the policy. In graphs that we capture the same is called `checkpoint_region` and
`checkpoint_policy`; decisions read those.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy


def read_annotations(nodes: Iterable[fx.Node]) -> None:
    """Give nodes of a joint graph the region and the policy that AOTAutograd has noted, if any."""
    for node in nodes:
        policy = node.meta.get("recompute")
        if not isinstance(policy, CheckpointPolicy):
            continue
        node.meta["checkpoint_policy"] = policy.name.lower()
        if "ac_graph_id" in node.meta:
            node.meta["checkpoint_region"] = node.meta["ac_graph_id"]
