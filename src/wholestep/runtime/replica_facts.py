"""What must be the same on all ranks of a data-parallel step, as text and numbers that can be compared by name.

Forward and backward may differ, as batches do, and a parameter may be unused on a rank. What is computed from averaged
gradients (clipping, the update) may not: ranks would train different models from then on.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import math
from collections import ChainMap, Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CodeType
from typing import Any, cast

import torch
from torch import fx, nn
from torch.optim import Optimizer

from wholestep import _torch
from wholestep.capture import Capture
from wholestep.capture.binding import FixedTensor
from wholestep.capture.record.late import Within
from wholestep.comm import reducible_gradients
from wholestep.graph import Phase, SlotKind, StepGraph
from wholestep.graph.printer import format_target

_LOCAL = "local"
# Sizes of batches are numbers of a program that is the same on all ranks, as those are that it has in its text.
_SIZE = "size"
_SIZES = (torch.ops.aten.sym_size.int, torch.ops.aten.sym_numel.default, torch.ops.aten.sym_stride.int)
_MAX_NUMBERS = 16
_CHUNK = 2**20
_FACTOR = 0x9E3779B97F4A7C15 - 2**64
"""An odd number without pattern: multiples of it are the weights of a sum that no simple change leaves as it was."""
_WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def code_mark(function: Any) -> str:
    """The code of a step, without its place in a file; empty if it has none in Python."""
    while isinstance(function, functools.partial):
        function = cast("Callable[..., Any]", function.func)
    function = inspect.unwrap(getattr(function, "__func__", function))
    own = function if hasattr(function, "__code__") else vars(type(function)).get("__call__")
    code = getattr(own, "__code__", None)
    return hashlib.sha256(_code_text(code).encode()).hexdigest() if isinstance(code, CodeType) else ""


def _code_text(value: Any) -> str:
    if isinstance(value, CodeType):
        constants = ",".join(_code_text(constant) for constant in value.co_consts)
        return f"{value.co_code.hex()}({constants}){value.co_names}{value.co_varnames}{value.co_freevars}"
    if isinstance(value, frozenset):  # in another order in each process
        return str(sorted(map(repr, cast("frozenset[Any]", value))))
    return repr(value)


def tensor_facts(captured: Capture, kind: SlotKind) -> dict[str, str]:
    """By name: what each parameter or buffer of a step is."""
    slots = captured.graph.slots_of_kind(kind)
    return named_facts((slot.name, captured.bindings[slot.id].read([])) for slot in slots)


def named_facts(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """By name: what each parameter or buffer is."""
    return {name: describe(value) + _frozen(value) for name, value in tensors}


def _frozen(value: torch.Tensor) -> str:
    return " (frozen)" if isinstance(value, nn.Parameter) and not value.requires_grad else ""


def describe(tensor: torch.Tensor) -> str:
    """Type, shape and strides."""
    return f"{tensor.dtype}{tuple(tensor.shape)}{tensor.stride()}"


def mode_facts(modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """The mode of each model, and of those of its parts that are in another."""
    facts: dict[str, str] = {}
    for name, root in modules.items():
        facts[name] = _mode(root)
        odd = [path for path, module in root.named_modules() if module.training is not root.training]
        facts |= {f"{name}.{path}": _mode(root.get_submodule(path)) for path in odd}
    return facts


def _mode(module: nn.Module) -> str:
    return "train" if module.training else "eval"


def all_optimizer_facts(captured: Capture) -> dict[str, Any]:
    """Facts about all optimizers of a step."""
    names = {
        id(where.tensor): slot.name
        for slot in captured.graph.slots_of_kind(SlotKind.PARAM)
        if isinstance(where := captured.bindings[slot.id], FixedTensor)
    }
    facts: dict[str, Any] = {}
    for name, optimizer in captured.found.optimizers.items():
        facts |= optimizer_facts(name, optimizer, names) | _state_facts(name, optimizer, names)
    return facts


def optimizer_facts(name: str, optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """Class, options (learning rates too) and groups; `names` are those of parameters by id."""
    facts: dict[str, Any] = {f"the class of {name}": f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"}
    facts |= option_facts(name, optimizer)
    for index, group in enumerate(optimizer.param_groups):
        own = [names[id(parameter)] for parameter in group["params"] if id(parameter) in names]
        facts |= {f"{name}'s group of {parameter}": index for parameter in own}
    return facts


def _state_facts(name: str, optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    return {
        f"{name}'s state of {names[id(parameter)]}['{key}']": _content(value)
        if isinstance(value, torch.Tensor)
        else plain(value)
        for parameter, state in optimizer.state.items()
        if id(parameter) in names
        for key, value in state.items()
    }


def option_facts(name: str, optimizer: Optimizer) -> dict[str, Any]:
    """Options of an optimizer by group, as they are now."""
    return {
        f"{name}.param_groups[{index}]['{option}']": plain(value)
        for index, group in enumerate(optimizer.param_groups)
        for option, value in group.items()
        if option != "params"
    }


def plain(value: Any) -> Any:
    """A value as JSON has it; of what JSON has no word for, the type."""
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Tensor):
        is_small = value.numel() <= _MAX_NUMBERS and value.device.type != "meta"
        return plain(value.tolist()) if is_small else describe(value)
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in cast("list[Any]", value)]
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in cast("Mapping[Any, Any]", value).items()}
    return getattr(value, "__qualname__", type(value).__qualname__)


def update_facts(graph: StepGraph) -> dict[str, Any]:
    """How new parameters and optimizer state come about: each op, with its numbers, and how often; and a mark of all.

    The mark is made of what is computed and of names of slots, not of the order or the names of nodes.
    """
    marks = _marks(graph)
    updated = _updated(graph)
    whole = sorted(f"{slot_id}={_text(value, marks.__getitem__)}" for slot_id, value in updated.items())
    lines = Counter(_line(node) for node in _ancestors(updated.values(), marks))
    return {
        **lines,
        "how they are joined (parameters may be in another order)": hashlib.sha256(
            "\n".join(whole).encode()
        ).hexdigest(),
    }


def update_inputs(graph: StepGraph, *kinds: SlotKind) -> list[str]:
    """Slots of these kinds that new parameters and optimizer state are computed from, other than by gradients."""
    slots = {node: slot_id for slot_id, node in graph.placeholders().items()}
    read = {source for node in _ancestors(_updated(graph).values(), _marks(graph)) for source in node.all_input_nodes}
    wanted = tuple(f"{kind}." for kind in kinds)
    return sorted(slots[node] for node in read if node in slots and slots[node].startswith(wanted))


def local_update(graph: StepGraph) -> tuple[str, fx.Node] | None:
    """A slot whose new value is made of a rank's own batch, other than by averaged gradients, and what it is made of.

    Parameters and optimizer state would become different ones on each rank.
    """
    marks = _marks(graph)
    for slot_id, value in _updated(graph).items():
        found = [value] if isinstance(value, fx.Node) else []
        found += [source for node in _ancestors(found, marks) for source in node.all_input_nodes]
        for node in found:
            if marks[node] == _LOCAL and not node.meta.get("gradient_of"):  # nothing travels for an empty gradient
                return slot_id, node
    return None


def value_facts(captured: Capture, slot_ids: Iterable[str]) -> dict[str, Any]:
    """By slot: what is in a tensor, or a sum of what is."""
    found = {slot_id: captured.bindings[slot_id].read([]) for slot_id in slot_ids}
    return {slot_id: _content(value) for slot_id, value in found.items() if isinstance(value, torch.Tensor)}


def _content(tensor: torch.Tensor) -> Any:
    if tensor.device.type == "meta" or isinstance(tensor, _torch.FakeTensor):
        return describe(tensor)
    if tensor.numel() <= _MAX_NUMBERS:
        return [describe(tensor), plain(tensor)]
    return f"{describe(tensor)} with bits that add up to {bits_mark(tensor)}"


@torch.no_grad()
def bits_mark(tensor: torch.Tensor) -> int:
    """A number that is another for a tensor with other bits: their sum, weighted by position, modulo two to the 64."""
    value = tensor.detach().resolve_conj().resolve_neg()
    value = torch.view_as_real(value) if value.is_complex() else value
    bits = value.contiguous().view(-1).view(_WHOLE[value.dtype.itemsize])
    weights = torch.arange(1, min(_CHUNK, bits.numel()) + 1, device=bits.device) * _FACTOR
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for chunk in bits.split(_CHUNK):
        total = total * _FACTOR + (chunk.long() * weights[: chunk.numel()]).sum()
    return int(total)


def _updated(graph: StepGraph) -> dict[str, Any]:
    """What the step gives to parameters and optimizer state, by slot."""
    return {
        slot_id: value
        for slot_id, value in {**graph.updates, **graph.results}.items()
        if slot_id.startswith((f"{SlotKind.PARAM}.", f"{SlotKind.STATE}."))
    }


def _marks(graph: StepGraph) -> dict[fx.Node, str]:
    """For each node: what it computes from slots and averaged gradients; `_LOCAL` if from this rank's batch."""
    slots = {node: slot_id for slot_id, node in graph.placeholders().items()}
    averaged = {gradient.node: f"the gradient of {gradient.key}" for gradient in reducible_gradients(graph)}
    marks: dict[fx.Node, str] = {}
    averaged_first = ChainMap(averaged, marks)
    for node in graph.graph.nodes:
        if node in slots:
            marks[node] = _LOCAL if slots[node].startswith(f"{SlotKind.BATCH}.") else slots[node]
        elif node.op == "call_function":
            # What comes after the backward reads averaged gradients, the backward itself its own.
            is_after = node.meta.get("phase") is Phase.OPTIMIZER
            marks[node] = _mark(node, averaged_first if is_after else marks)
    return marks | averaged


def _mark(node: fx.Node, marks: Mapping[fx.Node, str]) -> str:
    if node.target in _SIZES:
        return _SIZE
    if any(marks[source] == _LOCAL for source in node.all_input_nodes):
        return _LOCAL
    text = f"{_target(node)}{_text(node.args, marks.__getitem__)}{_text(node.kwargs, marks.__getitem__)}"
    return hashlib.sha256(text.encode()).hexdigest()


def _ancestors(values: Iterable[Any], marks: Mapping[fx.Node, str]) -> Iterator[fx.Node]:
    """The calls that the updates consist of, down to gradients and slots."""
    waiting = [value for value in values if isinstance(value, fx.Node)]
    seen: set[fx.Node] = set()
    while waiting:
        node = waiting.pop()
        if node in seen or node.op != "call_function" or node.meta.get("gradient_of") or marks[node] == _LOCAL:
            continue
        seen.add(node)
        yield node
        waiting += node.all_input_nodes


def _line(node: fx.Node) -> str:
    arguments = _text(node.args, _unnamed)[1:-1] + "".join(
        f", {k}={_text(v, _unnamed)}" for k, v in node.kwargs.items()
    )
    return f"{_target(node)}({arguments}) {node.meta.get('source', '')}".rstrip()


def _unnamed(_: fx.Node) -> str:
    return "_"


def _target(node: fx.Node) -> str:
    if isinstance(node.target, Within):
        return str(node.target)  # the Python that runs there: ranks that compute otherwise would drift apart
    is_named = _torch.is_op_overload(node.target) or hasattr(node.target, "__qualname__")
    return format_target(node.target) if is_named else type(node.target).__qualname__


def _text(value: Any, name: Callable[[fx.Node], str]) -> str:
    """Arguments as text, nodes under the names that `name` gives them."""
    if isinstance(value, fx.Node):
        return name(value)
    if isinstance(value, (list, tuple)):
        return f"({', '.join(_text(item, name) for item in cast('list[Any]', value))})"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={_text(item, name)}" for key, item in cast("Mapping[Any, Any]", value).items())
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return _LOCAL
    return str(value)
