"""Measure the peak of live memory of a call, the same way for eager and compiled steps.

On the CPU a dispatch mode sees every tensor that any op returns, forward or backward, and weak references tell when
its storage dies. That counts values, exactly and reproducibly; workspace inside a kernel is not seen. On CUDA the
allocator's own figure is used, which includes workspace.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from wholestep._torch import TorchDispatchMode


@dataclass(frozen=True)
class MeasuredPeak:
    """What a call returned, and its memory: `held_bytes` alive when it began, `peak_bytes` at the worst moment."""

    result: Any
    held_bytes: int
    peak_bytes: int

    @property
    def allocated_bytes(self) -> int:
        """What the call needed beyond what was there already."""
        return self.peak_bytes - self.held_bytes


def measure_peak(
    function: Callable[..., Any],
    *args: Any,
    held: Iterable[Any] = (),
    find: Callable[[Any], Iterable[torch.Tensor]] | None = None,
    **kwargs: Any,
) -> MeasuredPeak:
    """Call `function(*args, **kwargs)` and measure the peak of live bytes.

    Memory that was there before is known only as far as it hangs off the arguments or `held`: tensors, modules (with
    their gradients), optimizers (with their state) and containers of those. It is watched too, so that a gradient freed
    during the call counts until then. `find` tells which tensors those are, if others than `tensors_of`.
    """
    owners = (args, kwargs, tuple(held))
    find = find or tensors_of
    devices = {tensor.device for tensor in find(owners) if tensor.is_cuda}
    if devices:
        return _measure_cuda(function, args, kwargs, devices)
    tracker = _LiveStorages()
    tracker.watch_all(find(owners))
    held_bytes = tracker.live_bytes
    with tracker:
        result = function(*args, **kwargs)
    return MeasuredPeak(result, held_bytes, tracker.peak_bytes)


def tensors_of(owner: Any) -> Iterator[torch.Tensor]:
    """Tensors that an object keeps alive: parameters, gradients, buffers, optimizer state, items of containers."""
    if isinstance(owner, torch.Tensor):
        yield owner
        # Asking a tensor inside a graph for its gradient warns.
        if owner.is_leaf and owner.grad is not None:
            yield owner.grad
    elif isinstance(owner, nn.Module):
        for tensor in (*owner.parameters(), *owner.buffers()):
            yield from tensors_of(tensor)
    elif isinstance(owner, Optimizer):
        yield from tensors_of([group["params"] for group in owner.param_groups])
        yield from tensors_of(list(owner.state.values()))
    elif isinstance(owner, Mapping):
        yield from tensors_of(list(owner.values()))
    elif isinstance(owner, (list, tuple)):
        for item in owner:
            yield from tensors_of(item)


def _measure_cuda(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], devices: set[torch.device]
) -> MeasuredPeak:
    for device in devices:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    held_bytes = sum(torch.cuda.memory_allocated(device) for device in devices)
    result = function(*args, **kwargs)
    for device in devices:
        torch.cuda.synchronize(device)
    return MeasuredPeak(result, held_bytes, sum(torch.cuda.max_memory_allocated(device) for device in devices))


class _LiveStorages(TorchDispatchMode):
    """Counts the bytes of storages from the first op that returns them until they are freed."""

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self._watched: dict[int, weakref.ref[Any]] = {}

    def watch_all(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count several tensors; none of them is held on to."""
        for tensor in tensors:
            self.watch(tensor)

    def watch(self, tensor: torch.Tensor) -> None:
        """Count a tensor's storage, unless it is counted already, until it dies."""
        if tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        key, num_bytes = id(storage), storage.nbytes()
        if key in self._watched:
            return

        def on_death(_: weakref.ref[Any]) -> None:
            self.live_bytes -= num_bytes
            del self._watched[key]

        self._watched[key] = weakref.ref(storage, on_death)
        self.live_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.watch_all(_results(result))
        return result


def _results(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _results(item)
