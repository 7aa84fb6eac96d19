"""Joint graphs for tests: traced from a function, run in two halves, compared with autograd."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd

from wholestep.cost import measure_peak
from wholestep.graph import ops


class _Traced(Exception):
    pass


@dataclass(frozen=True)
class Joint:
    """A joint graph of a scalar function, with the inputs it was traced for (parameters first)."""

    module: fx.GraphModule
    inputs: tuple[Any, ...]
    function: Callable[[], torch.Tensor]
    leaves: tuple[torch.Tensor, ...]

    def run(self, forward: fx.GraphModule, backward: fx.GraphModule) -> tuple[Any, list[torch.Tensor]]:
        """The forward's first output, and the gradients that the backward returns."""
        torch.manual_seed(3)
        with torch.no_grad():
            output, *saved = forward(*self.inputs)
            gradients = backward(*_for_backward(saved), torch.ones_like(output))
        return output, [gradient for gradient in gradients if gradient is not None]

    def check(self, forward: fx.GraphModule, backward: fx.GraphModule) -> None:
        """The halves do what the joint graph does, bit for bit, and what autograd does, if nothing is random."""
        output, gradients = self.run(forward, backward)
        torch.manual_seed(3)
        with torch.no_grad():
            expected, *reference = self._run_whole(torch.ones_like(output))
        assert torch.equal(output, expected)
        assert len(gradients) == len(reference)
        assert all(torch.equal(one, other) for one, other in zip(gradients, reference))
        if not any(ops.is_random(node.target) for node in self.module.graph.nodes):
            wanted = list(torch.autograd.grad(self.function(), self.leaves))
            for gradient in gradients:
                match = next(i for i, item in enumerate(wanted) if _close(item, gradient))
                del wanted[match]

    def _run_whole(self, tangent: torch.Tensor) -> list[Any]:
        interpreter = fx.Interpreter(self.module)
        returned = interpreter.run(*self.inputs, tangent, enable_io_processing=False)
        return [item for item in returned if item is not None]

    def measured_peak(self, forward: fx.GraphModule, backward: fx.GraphModule) -> int:
        """Live bytes of a run at its peak, without inputs."""

        def both() -> Any:
            output, *saved = forward(*self.inputs)
            tangent = torch.ones_like(output)
            del output
            arguments = [*_for_backward(saved), tangent]
            del saved, tangent
            return _Releasing(backward).run_boxed(arguments)

        gc.collect()
        with torch.no_grad():
            return measure_peak(both, held=self.inputs).allocated_bytes


class _Releasing(fx.Interpreter):
    """Frees an input behind its last use, as AOTAutograd's runtime does."""

    def run_boxed(self, given: list[Any]) -> Any:
        self.env = {}
        graph: Any = self.graph
        for node in graph.find_nodes(op="placeholder"):
            self.env[node] = given.pop(0)
        for node in graph.nodes:
            if node.op == "placeholder":
                continue
            self.env[node] = self.run_node(node)
            for dead in self.user_to_last_uses.get(node, []):
                self.env.pop(dead, None)
            if node.op == "output":
                return self.env[node]
        raise AssertionError("a graph has an output")


def _close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-4, atol=1e-4)


def _for_backward(saved: Sequence[Any]) -> list[Any]:
    """Sizes come first in the backward and last in what the forward saves."""
    return [item for item in saved if isinstance(item, int)] + [item for item in saved if not isinstance(item, int)]


def trace_joint(
    function: Callable[..., torch.Tensor],
    module: nn.Module | None,
    *inputs: torch.Tensor,
    dynamic: bool = False,
    decompose: bool = True,
) -> Joint:
    """The joint graph `torch.compile` would partition, for gradients of the module's parameters, or of all inputs."""
    from torch._inductor.decomposition import select_decomp_table

    torch._dynamo.reset()
    found: list[tuple[fx.GraphModule, tuple[Any, ...]]] = []

    def record(joint: fx.GraphModule, joint_inputs: Any, **_: Any) -> Any:
        found.append((joint, tuple(joint_inputs[0])))
        raise _Traced

    if module is None:
        inputs = tuple(value.requires_grad_() if value.is_floating_point() else value for value in inputs)
    backend = aot_autograd(
        fw_compiler=lambda graph, _: graph,
        bw_compiler=lambda graph, _: graph,
        partition_fn=record,
        decompositions=select_decomp_table() if decompose else None,
    )
    try:
        torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)(*inputs)
    except Exception:
        if not found:
            raise
    joint, fakes = found[0]
    leaves = tuple(module.parameters()) if module is not None else inputs
    return Joint(
        joint,
        tuple(_matched(fakes, leaves, inputs)),
        lambda: function(*inputs),
        tuple(leaf for leaf in leaves if leaf.requires_grad),
    )


def _matched(fakes: Sequence[Any], leaves: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> list[Any]:
    """Real tensors for the graph's inputs: parameters in order, inputs in order, sizes by value."""
    queue = [*leaves, *(value for value in inputs if not any(value is leaf for leaf in leaves))]
    real: list[Any] = []
    for fake in fakes:
        if isinstance(fake, torch.Tensor):
            index = next(i for i, value in enumerate(queue) if tuple(value.shape) == tuple(int(s) for s in fake.shape))
            real.append(queue.pop(index).detach())
        else:
            real.append(int(fake))
    return real
