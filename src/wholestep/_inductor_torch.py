"""Inductor: with another partitioner, and for parts of a graph. Apart from `_aot_torch`: importing it takes seconds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, cast

import torch
from torch import fx
from torch._guards import TracingContext, tracing
from torch._inductor import config, cpp_builder, decomposition, lowering
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch._inductor.exc import InvalidCxxCompiler
from torch._inductor.fx_passes import joint_graph
from torch._inductor.virtualized import V
from torch.fx.experimental import proxy_tensor
from torch.utils._triton import has_triton

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


def decomposed(fake_mode: Any, function: Callable[..., Any], values: Sequence[Any]) -> fx.Graph:
    """What a function of fake values comes to in the ops that Inductor likes best."""
    assert lowering.lowerings  # decompositions look the module up lazily
    table: Any = decomposition.decompositions
    with fake_mode, torch.no_grad():
        return proxy_tensor.make_fx(function, decomposition_table=table)(*values).graph


def has_decomposition(target: Any) -> bool:
    return target in decomposition.decompositions


def compile_functional(
    module: fx.GraphModule, fake_mode: Any, free_outputs: Collection[int] = ()
) -> tuple[Callable[[list[Any]], Sequence[Any]], Sequence[tuple[int, ...] | None] | None]:
    """Compile a graph of functional ops; outputs keep their strides but for those of these numbers.

    What comes back takes its arguments as a list, which it empties: they go once they are used. With it come the
    strides of its outputs, as far as they are known. Random ops in it are eager's own.
    """
    inputs = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    [output] = module.graph.find_nodes(op="output")
    output.meta["user_visible_output_idxs"] = [i for i in range(len(output.args[0])) if i not in free_outputs]
    with (
        torch.no_grad(),
        tracing(TracingContext(fake_mode)),
        V.set_fake_mode(fake_mode),
        config.patch(fallback_random=True),
        TracingContext.report_output_strides() as strides,
    ):
        joint_graph.joint_graph_passes(module)
        return compile_fx_inner(module, inputs), strides


def why_no_compiler(*, is_cuda: bool) -> str:
    """What Inductor lacks to compile for a kind of device, "" if it lacks nothing."""
    if is_cuda:
        return "" if has_triton() else "there is no Triton here"
    try:
        cpp_builder.get_cpp_compiler()
    except InvalidCxxCompiler:
        return "there is no C++ compiler here"
    return ""
