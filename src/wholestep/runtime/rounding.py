"""How much of a difference is rounding: the step once more, in eager and in a higher precision.

Two right ways to compute a value differ from each other by about as much as each differs from the exact value. Eager's
own error is known from a run of the same step in a higher precision, with the same random numbers. A value of the graph
counts as wrong if it differs from eager's by more than

    FACTOR * max(eager's largest error in this tensor, one unit in the last place of its largest value)

The reference is made by eager code from eager's state: a graph that computes something else does not move it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Generator, Mapping
from typing import Any

import torch

from wholestep import _torch
from wholestep.capture import Capture, tree
from wholestep.graph import ops
from wholestep.runtime.guards import Call
from wholestep.runtime.world import observe, parameters_of

logger = logging.getLogger(__name__)

# With losses in chunks, which is another order of sums, the largest ratio of five Hugging Face models in float32,
# bfloat16, under autocast and with float32 masters is 2.8.
FACTOR = 8.0


class EagerLog(_torch.TorchDispatchMode):
    """What eager's ops gave, in order: all that was drawn, and as many results as fit into `max_bytes`."""

    def __init__(self, max_bytes: int = 2**30) -> None:
        super().__init__()
        self.draws: list[list[torch.Tensor]] = []
        self.results: list[tuple[Any, torch.Tensor]] = []
        self._num_bytes_left = max_bytes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in _torch.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if ops.draws_with(func, args, kwargs or {}):
            self.draws.append([tensor.detach().clone() for tensor in tensors])
        if tensors and not ops.is_view(func):
            self._num_bytes_left -= tensors[0].numel() * tensors[0].element_size()
            if self._num_bytes_left > 0:
                self.results.append((func, tensors[0].detach().clone()))
        return result


class _Replay(_torch.TorchDispatchMode):
    """Gives random ops what they drew before, in the dtype that is asked for now."""

    def __init__(self, draws: list[list[torch.Tensor]]) -> None:
        super().__init__()
        self._draws = iter(draws)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if ops.draws_with(func, args, kwargs or {}):
            tensors = [leaf for leaf in _torch.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            for tensor, drawn in zip(tensors, next(self._draws), strict=True):
                tensor.copy_(drawn)
        return result


def reference(capture: Capture, call: Call, log: EagerLog, restore: Callable[[], None]) -> dict[str, Any] | None:
    """What the step leaves when eager runs it in a higher precision: double, or single where its code insists on it.

    None if there is no such run. `restore` puts the world back to before the call.
    """
    for dtype in (torch.float64, torch.float32):
        try:
            return _reference_in(dtype, capture, call, log)
        except Exception as error:  # dtypes that do not fit; torch has no class of its own for that
            logger.info("verify has no reference in %s: %s", dtype, error)
        finally:
            restore()
    return None


def _reference_in(dtype: torch.dtype, capture: Capture, call: Call, log: EagerLog) -> dict[str, Any]:
    leaves = [_raised(leaf, dtype) for leaf in call.leaves]
    args, kwargs = tree.fill((call.args, call.kwargs), leaves)
    raised = Call.of(call.function, args, kwargs)
    with _in_precision(dtype, capture), _Replay(log.draws):
        return observe(capture, raised, call.function(*args, **kwargs))


def _raised(value: Any, dtype: torch.dtype) -> Any:
    """A tensor in a higher precision; anything else, and what has that precision already, as it is."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    if torch.finfo(value.dtype).eps <= torch.finfo(dtype).eps:
        return value
    raised = value.detach().to(dtype).requires_grad_(value.requires_grad)
    if value.is_leaf and value.grad is not None:
        raised.grad = value.grad.detach().to(dtype)
    return raised


@contextlib.contextmanager
def _in_precision(dtype: torch.dtype, capture: Capture) -> Generator[None]:
    """Give parameters, gradients, buffers and optimizer state a dtype; parameters get their own memory back."""
    parameters = list(parameters_of(capture))
    kept = [(parameter, parameter.data) for parameter in parameters]
    modules = [submodule for module in capture.found.modules.values() for submodule in module.modules()]
    for parameter in parameters:
        grad, parameter.grad = parameter.grad, None
        parameter.data = _raised(parameter.data, dtype)
        parameter.grad = None if grad is None else _raised(grad, dtype)
    for module in modules:
        own = _torch.own_buffers(module)
        own.update({name: _raised(buffer, dtype) for name, buffer in own.items()})
    for optimizer in capture.found.optimizers.values():
        for parameter, entries in optimizer.state.items():
            # Step counts stay: fused kernels take them in one dtype only.
            moments = [key for key, value in entries.items() if getattr(value, "shape", None) == parameter.shape]
            entries.update({key: _raised(entries[key], dtype) for key in moments if parameter.dim() > 0})
    try:
        yield
    finally:
        for parameter, data in kept:
            parameter.grad = None
            parameter.data = data


def unexplained(
    differences: Mapping[str, float], expected: Mapping[str, Any], found: Mapping[str, Any], exact: Mapping[str, Any]
) -> dict[str, float]:
    """The differences between eager and the graph that are more than rounding."""
    is_rounding = lambda name: _is_rounding(expected.get(name), found.get(name), exact.get(name))  # noqa: E731
    return {name: size for name, size in differences.items() if not is_rounding(name)}


def _is_rounding(eager: Any, graph: Any, exact: Any) -> bool:
    values = (eager, graph, exact)
    if not all(isinstance(value, torch.Tensor) and value.is_floating_point() for value in values):
        return False
    if not eager.shape == graph.shape == exact.shape or eager.dtype != graph.dtype or eager.numel() == 0:
        return False
    return _largest(graph, eager) <= FACTOR * max(_largest(eager, exact), _last_place(eager))


def _largest(left: torch.Tensor, right: torch.Tensor) -> float:
    """The largest difference; infinite where only one of the two is a number."""
    left, right = left.double(), right.double().to(left.device)
    same = (left == right) | (left.isnan() & right.isnan())
    return float((left - right).abs().masked_fill(same, 0.0).nan_to_num(float("inf"), float("inf")).max())


def _last_place(tensor: torch.Tensor) -> float:
    finite = tensor.double().abs().nan_to_num(0.0, 0.0, 0.0)
    return float(finite.max()) * torch.finfo(tensor.dtype).eps
