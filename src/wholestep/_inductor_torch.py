"""Inductor with another partitioner. Apart from `_aot_torch` because importing Inductor takes seconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from torch import fx
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomPartitionerFn

Partition = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]


class Partitioner(CustomPartitionerFn):
    """What Inductor asks for forward and backward; `identity` tells two of them apart in its caches."""

    def __init__(self, partition: Partition, identity: str) -> None:
        self.partition = partition
        self.identity = identity

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        return self.partition(gm, num_fwd_outputs=kwargs["num_fwd_outputs"])

    def uuid(self) -> Any:
        return self.identity


def compile_with_partition(
    module: fx.GraphModule, example_inputs: Sequence[Any], partition: Partition, identity: str
) -> Callable[..., Any]:
    """Compile a Dynamo graph with Inductor, `partition(joint, num_fwd_outputs=...)` in the place of its partitioner."""
    with config.patch(custom_partitioner_fn=Partitioner(partition, identity)):
        return cast(Callable[..., Any], compile_fx(module, list(example_inputs)))
