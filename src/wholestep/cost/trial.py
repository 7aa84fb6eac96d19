"""Try one op: run it on made-up data of the types it gets in its graph, and time that.

Data matters more than one would think. Floats lie between 0 and 1, in the domain of every function: `sqrt` of negative
numbers takes ten times as long on the CPU, and so do denormal numbers, which in-place ops would reach when repeated.
Indices are valid, for a bad one ends all work on CUDA, and where their range is known they are spread over it: adding
many rows into one is thirty times slower there than into different ones.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from wholestep import _torch
from wholestep._recording_torch import REQUIRE
from wholestep.cost.memory import tensors_in, written_values
from wholestep.graph import map_nodes, ops

aten = torch.ops.aten

# An op is repeated until its repeats add up to `_ENOUGH_US`, within limits; short ones on CUDA several at a time.
_ENOUGH_US, _MIN_REPEATS, _MAX_REPEATS = 2000.0, 3, 30
_SHORT_US, _NUM_QUEUED = 100.0, 20

_SAME_VALUE = frozenset({aten.detach.default, aten.alias.default})

# Ops whose integer tensors are indices into their first argument.
_INDEXING = frozenset(
    {"embedding", "gather", "index", "index_add", "index_copy", "index_put", "index_select", "scatter", "scatter_add"}
    | {"unsafe_index", "unsafe_index_put"}
)


def try_us(node: fx.Node) -> float | None:
    """Run a call on made-up arguments and time it; None if it does not accept them, or must not be tried at all.

    Asked only `undisturbed`.
    """
    if not _is_harmless(node):
        return None
    target: Any = node.target
    data = _Data()
    try:
        args, kwargs = data.arguments_of(node)
        written = [data.made[id(fake)] for fake in written_values(node)]
        return clock_us(lambda: target(*args, **kwargs), device_of([node, *node.all_input_nodes]), written)
    except Exception:  # whatever a kernel has against made-up data
        return None


@dataclass
class _Data:
    """Real arguments for calls, each value made once: `made` by the identity of the fake one."""

    made: dict[int, Any] = field(default_factory=dict)

    def arguments_of(self, node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        num_rows = _num_rows(node)
        items = {source: item for source in node.all_input_nodes if _is_workspace(item := _undetached(source))}
        for producer in dict.fromkeys(_producer(item) for item in items.values()):
            self._run(producer)
        return map_nodes(
            (node.args, node.kwargs),
            lambda source: self._make(items.get(source, source).meta.get("val"), num_rows),
        )

    def _run(self, producer: fx.Node) -> None:
        """Let a call produce its results in earnest, on made-up arguments."""
        if not _is_harmless(producer):
            raise ValueError(f"{producer.target} cannot be tried")
        args, kwargs = self.arguments_of(producer)
        target: Any = producer.target
        results = target(*args, **kwargs)
        for item in producer.users:
            index = ops.getitem_index(item)
            if index is not None:
                self.made[id(item.meta["val"])] = results[index]

    def _make(self, value: Any, num_rows: int) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in self.made:
                self.made[id(value)] = _made_up(value, num_rows)
            return self.made[id(value)]
        if isinstance(value, (list, tuple)):
            return [self._make(item, num_rows) for item in value]
        return plain(value)


def _undetached(node: fx.Node) -> fx.Node:
    while node.target in _SAME_VALUE and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _producer(item: fx.Node) -> fx.Node:
    assert isinstance(item.args[0], fx.Node)
    return item.args[0]


def _is_workspace(node: fx.Node) -> bool:
    """Whether a value may be what a kernel keeps for its backward: an item that is empty or holds no floats.

    Fake kernels do not know what real ones put there (LSTM: how many bytes; attention: on which device the seed is),
    and a backward that is given something else crashes. So it is taken from a real run of the op that makes it.
    """
    return ops.getitem_index(node) is not None and (_is_empty(node) or not _has_floats(node))


def _is_harmless(node: fx.Node) -> bool:
    """Whether made-up data will at worst be refused.

    Not by assertions, whose failure is for good on CUDA, nor by collectives, which other ranks would have to join, nor
    where workspace is an input of the graph.
    """
    target: Any = node.target
    if not ops.is_op(node):
        return True
    if (
        target is REQUIRE
        or ops.is_collective(target)
        or (_torch.has_side_effect(target) and not ops.written_arguments(target))
    ):
        return False
    given = [source for source in map(_undetached, node.all_input_nodes) if ops.getitem_index(source) is None]
    takes_seed = "attention" in _torch.packet_name(target)
    return not any(_is_empty(source) or (takes_seed and not _has_floats(source)) for source in given)


def _is_empty(node: fx.Node) -> bool:
    return any(0 in sizes_and_strides(tensor)[0] for tensor in tensors_in(node.meta.get("val")))


def _has_floats(node: fx.Node) -> bool:
    tensors = list(tensors_in(node.meta.get("val")))
    return all(tensor.dtype.is_floating_point or tensor.dtype is torch.bool for tensor in tensors)


def _num_rows(node: fx.Node) -> int:
    """How many different indices are valid in every dimension that the call's integers may index; 1 if unknown."""
    if not (ops.is_op(node) and _torch.packet_name(node.target).strip("_") in _INDEXING and node.args):
        return 1
    indexed = node.args[0].meta.get("val") if isinstance(node.args[0], fx.Node) else None
    return min(sizes_and_strides(indexed)[0], default=1) if isinstance(indexed, torch.Tensor) else 1


def _made_up(fake: torch.Tensor, num_rows: int) -> torch.Tensor:
    """A real tensor with a fake one's type and layout: floats from 0 to 1, indices below `num_rows`, True, 0."""
    sizes, strides = sizes_and_strides(fake)
    num_elements = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides)) if 0 not in sizes else 0
    # Through its memory: writing to a tensor of overlapping elements (`expand`) is not allowed.
    memory = torch.empty(num_elements, dtype=fake.dtype, device=fake.device)
    if fake.dtype.is_floating_point:
        memory.uniform_()
    elif fake.dtype in (torch.int32, torch.int64) and num_rows > 1:
        memory.copy_(torch.arange(num_elements, device=fake.device).remainder_(num_rows))
    else:
        memory.fill_(fake.dtype is torch.bool)
    return memory.as_strided(sizes, strides)


def clock_us(call: Callable[[], Any], device: torch.device, written: Iterable[torch.Tensor] = ()) -> float:
    """The median time of a call, after one to warm up. Tensors it writes to get their old values between repeats.

    Else repeated in-place ops would reach denormal numbers, which are slow. On CUDA, where they are not, short calls
    are queued several at a time, as in a real step: launching one overlaps with running the one before.
    """
    restored = [(tensor, tensor.clone()) for tensor in written]

    def run_us(num_calls: int) -> float:
        for tensor, before in restored:
            tensor.copy_(before)
        return _clocked_us(call, device, num_calls) / num_calls

    run_us(1)
    times_us = [run_us(1)]
    num_queued = 1
    if device.type == "cuda" and times_us[0] < _SHORT_US:
        times_us, num_queued = [], _NUM_QUEUED
    # By the shortest, so that a moment in which the machine did something else does not end it.
    while len(times_us) < _MIN_REPEATS or (
        len(times_us) < _MAX_REPEATS and len(times_us) * min(times_us) * num_queued < _ENOUGH_US
    ):
        times_us.append(run_us(num_queued))
    return statistics.median(times_us)


def _clocked_us(call: Callable[[], Any], device: torch.device, num_calls: int) -> float:
    if device.type != "cuda":
        started_ns = time.perf_counter_ns()
        for _ in range(num_calls):
            call()
        return (time.perf_counter_ns() - started_ns) / 1e3
    stream = torch.cuda.current_stream(device)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    stream.synchronize()
    begin.record(stream)
    for _ in range(num_calls):
        call()
    end.record(stream)
    end.synchronize()
    return begin.elapsed_time(end) * 1e3


@contextlib.contextmanager
def undisturbed(device: torch.device) -> Generator[None]:
    """Run ops below modes, autocast and autograd; random numbers drawn here are not missed afterwards."""
    with _torch.real_kernels([device] if device.type == "cuda" else ()):
        yield


def device_of(nodes: Iterable[fx.Node]) -> torch.device:
    """Where nodes run: on the GPU if any of their values is there."""
    devices = (tensor.device for node in nodes for tensor in tensors_in(node.meta.get("val")))
    return next((device for device in devices if device.type == "cuda"), torch.device("cpu"))


def sizes_and_strides(fake: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Layout of a fake tensor in numbers, symbolic ones as they were captured."""
    sizes, strides = map(_torch.optimization_hint, fake.shape), map(_torch.optimization_hint, fake.stride())
    return tuple(sizes), tuple(strides)


def plain(value: Any) -> Any:
    """A number for a symbolic one: sizes as they were captured, 1.0 for a learning rate."""
    if isinstance(value, torch.SymFloat):
        return 1.0
    return _torch.optimization_hint(value) if isinstance(value, torch.SymInt) else value
