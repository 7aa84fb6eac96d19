"""The seams of `torch.compile` that Wholestep uses: AOTAutograd's joint graphs and Inductor. As private as `_torch`.

Seen in torch 2.11 to 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import fx
from torch._functorch._aot_autograd.descriptors import SavedForBackwardsAOTOutput

Partition = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]


def output_meta(joint: fx.GraphModule, num_forward: int, num_saved: int | None) -> dict[str, Any]:
    """What AOTAutograd notes about the outputs of a forward with `num_saved` saved values, or of a backward (None)."""
    [output] = joint.graph.find_nodes(op="output")
    known = output.meta.get("desc")
    if known is None:
        return {}
    if num_saved is None:
        return {"desc": [*known[num_forward:]]}
    return {"desc": [*known[:num_forward], *(SavedForBackwardsAOTOutput(index) for index in range(num_saved))]}


def compile_with_partition(
    module: fx.GraphModule, example_inputs: Sequence[Any], partition: Partition, identity: str
) -> Callable[..., Any]:
    """Compile a Dynamo graph with Inductor, `partition` in the place of its partitioner.

    `partition(joint, num_fwd_outputs=...)` returns forward and backward; `identity` tells two partitions apart in the
    cache of compiled code.
    """
    # Inductor is slow to import and not needed by most.
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    class Partitioner(CustomPartitionerFn):
        def __call__(
            self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
        ) -> tuple[fx.GraphModule, fx.GraphModule]:
            return partition(gm, num_fwd_outputs=kwargs["num_fwd_outputs"])

        def uuid(self) -> Any:
            return identity

    with config.patch(custom_partitioner_fn=Partitioner()):
        return cast(Callable[..., Any], compile_fx(module, list(example_inputs)))


def aot_compile(
    module: torch.nn.Module, *, partition: Partition, decompose: bool = True, dynamic: bool | None = False
) -> Callable[..., Any]:
    """`torch.compile` a module op by op (no code generation), with `partition` deciding what is saved."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor import lowering as _lowering  # its decompositions look this up lazily
    from torch._inductor.decomposition import select_decomp_table

    assert _lowering is not None

    def partition_fn(gm: fx.GraphModule, _inputs: Any, *, num_fwd_outputs: int, **_: Any) -> Any:
        return partition(gm, num_fwd_outputs=num_fwd_outputs)

    def as_is(graph_module: fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
        return graph_module

    backend = aot_autograd(
        fw_compiler=as_is,
        bw_compiler=as_is,
        partition_fn=partition_fn,
        decompositions=select_decomp_table() if decompose else None,
    )
    return torch.compile(module, backend=backend, fullgraph=True, dynamic=dynamic)
