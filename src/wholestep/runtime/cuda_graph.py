"""Steps as CUDA graphs: recorded once, then launched as one.

A recording repeats kernels with the very addresses and numbers it was made with. So everything a step reads must stay
where it is, or be brought there:

    parameters, buffers, optimizer state    stay: updates are made in place. If one has moved, the step is recorded anew
    the batch                               copied into memory of the recording
    learning rates                          numbers that change: fused optimizers read them from the device instead
    random numbers                          the generator of the device counts on with each launch, as torch provides
    what the step returns                   copied out, so that it survives the next launch
    gradients                               live in the recording: the next launch writes them again
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from wholestep import _sizes_torch, _torch
from wholestep._recording_torch import REQUIRE
from wholestep.graph import Replay, SlotKind, StepGraph, nodes_in, ops
from wholestep.lower import Region
from wholestep.runtime.codegen import Step

logger = logging.getLogger(__name__)

# Recordings of one graph: for other sizes, or because something has moved. Each holds all memory of a step.
_MAX_RECORDINGS = 8
_MAKE_TENSOR = torch.ops.aten.scalar_tensor.default

Record = Callable[[Callable[[], Any]], tuple[Callable[[], None], Any]]


def why_not_recorded(graph: StepGraph) -> str:
    """What keeps a finished graph from being a CUDA graph, "" if nothing does."""
    device = next((value.device for value in _tensors(graph.nodes) if value.device.type == "cuda"), None)
    if device is None:
        return "nothing in it runs on a CUDA device"
    for node in graph.nodes:
        if reason := _obstacle(node, device):
            return f"{node.name} {reason}"
    return ""


def _obstacle(node: fx.Node, device: torch.device) -> str:
    value = node.meta.get("val")
    if node.op == "placeholder" and isinstance(value, torch.SymFloat) and not _is_rate(node):
        return "is a number that changes from step to step, and not only fused optimizers read it"
    if node.target is REQUIRE or getattr(node.target, "reads_values", False):
        return "looks at values of the device"
    if _sizes_torch.depends_on_values(value):
        return "has a size that depends on values"
    if any(item.device != device for item in _tensors([node])) and not _is_rate_tensor(node):
        return f"is not on {device}"
    if node.op != "call_function":
        return ""
    if node.target is torch.ops.aten._local_scalar_dense.default or ops.is_number_of_tensors(node):
        return "reads a number from the device"
    if ops.is_collective(node.target):
        return "talks to other ranks"
    if isinstance(node.target, Replay):
        return "draws the random numbers of an earlier op again"
    if node.meta.get("applies") is not None:
        return "belongs to the step before"
    return ""


def _tensors(nodes: Iterable[fx.Node]) -> Iterable[torch.Tensor]:
    for node in nodes:
        value = node.meta.get("val")
        values = value if isinstance(value, (list, tuple)) else [value]
        yield from (item for item in values if isinstance(item, torch.Tensor))


def _is_rate_tensor(node: fx.Node) -> bool:
    return node.target is _MAKE_TENSOR and isinstance(node.args[0], fx.Node) and _is_rate(node.args[0])


def _is_rate(node: fx.Node) -> bool:
    """Whether a number is made a tensor, and only fused optimizers read that, as their learning rate."""
    readers = [reader for tensor in node.users for reader in tensor.users]
    return (
        all(tensor.target is _MAKE_TENSOR for tensor in node.users)
        and all(_torch.packet_name(reader.target).startswith("_fused_") for reader in readers if ops.is_op(reader))
        and all(reader.kwargs.get("lr") in node.users for reader in readers)
    )


class DeviceNumber:
    """A number in the memory of a device, written when it changes."""

    def __init__(self, device: torch.device) -> None:
        self._tensor = torch.zeros((), device=device, dtype=torch.float32)  # what fused kernels read
        self._value: float | None = None

    def holding(self, value: float) -> torch.Tensor:
        if value != self._value:
            self._tensor.fill_(value)
            self._value = value
        return self._tensor


def take_rates_from_device(graph: StepGraph) -> dict[int, DeviceNumber]:
    """Let fused optimizers read their learning rates from the device; returns them by the number of the input.

    ```
    rate = aten.scalar_tensor(lr_0, dtype=float64, device=cpu)
    _fused_adamw_(..., lr=rate)                                    ->     _fused_adamw_(..., lr=lr_0)
    ```
    """
    numbers: dict[int, DeviceNumber] = {}
    for index, node in enumerate(graph.placeholders().values()):
        if not isinstance(node.meta["val"], torch.SymFloat):
            continue
        tensors = list(node.users)
        device = next(value.device for tensor in tensors for reader in tensor.users
                      for value in _tensors(nodes_in(reader.args)))  # fmt: skip
        with graph.fake_mode:
            node.meta["val"] = torch.empty((), device=device, dtype=torch.float32)
        numbers[index] = DeviceNumber(device)
        graph.replace(dict.fromkeys(tensors, node))
    return numbers


def copied_inputs(graph: StepGraph) -> frozenset[int]:
    """Inputs whose tensors are others in each call: those of the batch that the step does not write to."""
    placeholders = list(graph.placeholders().items())
    written = written_inputs(graph)
    batch = {slot.id for slot in graph.slots_of_kind(SlotKind.BATCH)}
    return frozenset(i for i, (slot_id, _) in enumerate(placeholders) if slot_id in batch and i not in written)


def written_inputs(graph: StepGraph) -> frozenset[int]:
    """Inputs that the graph writes to, themselves or a view of them."""
    owner = {node: index for index, node in enumerate(graph.placeholders().values())}
    written: set[int] = set()
    for node in graph.calls():
        arguments = [node.args[i] for i in ops.written_arguments(node.target) if i < len(node.args)]
        if isinstance(node.target, Region):
            inputs: Any = node.args[0]
            arguments = [inputs[i] for i in node.target.written]
        written |= {owner[source] for source in nodes_in(arguments) if source in owner}
        if ops.is_op(node) and ops.shares_memory(node.target) and node.all_input_nodes[:1]:
            source = node.all_input_nodes[0]
            owner |= {node: owner[source]} if source in owner else {}
    return frozenset(written)


def record_on_device(function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    """Record what a function does on the device; returns how to do it again, and where its results will be."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        returned = function()
    return graph.replay, returned


@dataclass(frozen=True)
class _Recording:
    """A recorded step with the inputs it reads; `copied` have their values brought there, `fixed` are at addresses.

    `echoed` says of each output which input it is, None if it is none.
    """

    inputs: list[Any]
    copied: tuple[int, ...]
    fixed: tuple[tuple[int, int], ...]
    replay: Callable[[], None]
    returned: tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]
    echoed: tuple[int | None, ...]

    def moved(self, inputs: Sequence[Any]) -> list[int]:
        """Inputs that are not where they were."""
        return [index for index, address in self.fixed if inputs[index].data_ptr() != address]

    def run(self, inputs: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]:
        """Launch it. What the caller may keep is an argument as it was passed, or a copy."""
        for index in self.copied:
            self.inputs[index].copy_(inputs[index])
        self.replay()
        outputs, updates, results = self.returned
        given = [
            inputs[index] if index is not None else value.clone() if isinstance(value, torch.Tensor) else value
            for index, value in zip(self.echoed, outputs, strict=True)
        ]
        return tuple(given), updates, results


class RecordedStep:
    """A generated step that runs as a CUDA graph from its second call on.

    `copied` are the numbers of inputs that are other tensors in each call, `written` of those it writes to. Another
    input that has moved counts among the former from then on, unless it is written to.
    """

    def __init__(
        self, step: Step, copied: frozenset[int], written: frozenset[int], record: Record = record_on_device
    ) -> None:
        self._step = step
        self._copied = copied
        self._written = written
        self._record = record
        self._recordings: dict[tuple[Any, ...], _Recording] = {}
        self._num_recorded = 0
        self._varying: tuple[int, ...] | None = None

    def __call__(self, inputs: list[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]:
        if self._varying is None or self._num_recorded > _MAX_RECORDINGS:
            self._varying = self._find_varying(inputs)
            return self._step(inputs)
        recording = self._recordings.get(self._key(inputs))
        moved = [] if recording is None else recording.moved(inputs)
        if recording is not None and not moved:
            return recording.run(inputs)
        del recording  # its memory goes before another one is made
        return self._run_anew(inputs, frozenset(moved) - self._written)

    def _find_varying(self, inputs: Sequence[Any]) -> tuple[int, ...]:
        """Inputs that may differ from call to call in more than their values: the others stay where they are."""
        return tuple(i for i, value in enumerate(inputs) if i in self._copied or not isinstance(value, torch.Tensor))

    def _key(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        assert self._varying is not None
        return tuple(_kind(inputs[index]) for index in self._varying)

    def _run_anew(
        self, inputs: list[Any], restless: frozenset[int]
    ) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]:
        """Record for these inputs, of which some count as others in each call from now on."""
        if restless:
            self._copied |= restless
            self._varying = self._find_varying(inputs)
            self._recordings.clear()
        key = self._key(inputs)
        self._recordings.pop(key, None)
        self._num_recorded += 1
        if self._num_recorded > _MAX_RECORDINGS:
            logger.warning("a step has been recorded %d times and runs without CUDA graphs now", _MAX_RECORDINGS)
            self._recordings.clear()
            return self._step(inputs)
        self._recordings[key] = self._recorded(inputs)
        return self._recordings[key].run(inputs)

    def _recorded(self, inputs: Sequence[Any]) -> _Recording:
        tensors = [index for index, value in enumerate(inputs) if isinstance(value, torch.Tensor)]
        copied = tuple(index for index in tensors if index in self._copied)
        own = [value.clone() if index in copied else value for index, value in enumerate(inputs)]
        replay, returned = self._record(lambda: self._step(list(own)))
        fixed = tuple((index, own[index].data_ptr()) for index in tensors if index not in copied)
        places = {id(own[index]): index for index in reversed(tensors)}
        echoed = tuple(places.get(id(value)) for value in returned[0])
        return _Recording(own, copied, fixed, replay, returned, echoed)


def _kind(value: Any) -> Any:
    """What a recording is for: sizes of tensors, and numbers."""
    return (value.shape, value.stride()) if isinstance(value, torch.Tensor) else value
