"""Everything a user can see of a training step: looked at by name, kept, and put back exactly."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch.optim import Optimizer

from wholestep import _torch
from wholestep.capture import Capture, tree
from wholestep.capture.binding import AtPlace, FixedTensor
from wholestep.graph import SlotKind
from wholestep.runtime.guards import Call
from wholestep.runtime.own_objects import values_in


class Outside(Protocol):
    """Something else that a step may change: the generators of other libraries, the user's own objects."""

    def look(self) -> dict[str, Any]:
        """What it is like now, by name; values that can be compared."""
        ...

    def keep(self) -> Callable[[], None]:
        """A function that puts it back to what it is like now."""
        ...


class PythonGenerators:
    """The global generators of Python and NumPy."""

    def look(self) -> dict[str, Any]:
        numpy: Any = np.random.get_state()
        return {"random.getstate()": random.getstate(), "numpy.random.get_state()": (numpy[1].tobytes(), *numpy[2:])}

    def keep(self) -> Callable[[], None]:
        python, numpy = random.getstate(), np.random.get_state()

        def put_back() -> None:
            random.setstate(python)
            np.random.set_state(numpy)

        return put_back


@dataclass
class World:
    """Everything a step can change, copied: parameters, buffers, gradients, optimizer state, arguments, generators."""

    tensors: list[tuple[torch.Tensor, torch.Tensor]]
    grads: list[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]]
    flags: list[tuple[torch.Tensor, bool]]
    buffers: list[tuple[dict[str, Any], dict[str, Any]]]
    states: list[tuple[Optimizer, dict[torch.Tensor, dict[str, Any]]]]
    rng: Any
    outside: list[Callable[[], None]]

    @staticmethod
    def of(capture: Capture, call: Call, outside: Iterable[Outside] = ()) -> World:
        modules, optimizers = capture.found.modules.values(), capture.found.optimizers.values()
        submodules = [submodule for module in modules for submodule in module.modules()]
        held = list(parameters_of(capture))
        owners = [*held, *(leaf for leaf in call.leaves if isinstance(leaf, torch.Tensor))]
        held += [b for module in submodules for b in _torch.own_buffers(module).values() if b is not None]
        held += [leaf for leaf in call.leaves if isinstance(leaf, torch.Tensor)]
        held += [where.tensor for where in capture.bindings.values() if isinstance(where, FixedTensor)]
        held += [where.read([]) for where in capture.bindings.values() if isinstance(where, AtPlace)]
        held += [v for opt in optimizers for s in opt.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
        return World(
            tensors=[(tensor, tensor.detach().clone()) for tensor in held],
            grads=[(p, p.grad, None if p.grad is None else p.grad.detach().clone()) for p in owners],
            flags=[(p, p.requires_grad) for p in owners],
            buffers=[(_torch.own_buffers(module), dict(_torch.own_buffers(module))) for module in submodules],
            states=[(opt, {p: dict(entries) for p, entries in opt.state.items()}) for opt in optimizers],
            rng=rng_state(),
            outside=[other.keep() for other in (PythonGenerators(), *outside)],
        )

    def restore(self) -> None:
        """Put everything back, object for object."""
        with torch.no_grad():
            for tensor, value in self.tensors:
                tensor.copy_(value)
            for parameter, grad, value in self.grads:
                if grad is not None and value is not None:
                    grad.copy_(value)
                parameter.grad = grad
        for tensor, requires_grad in self.flags:
            tensor.requires_grad_(requires_grad)
        for own, entries in self.buffers:
            own.clear()
            own.update(entries)
        for optimizer, state in self.states:
            optimizer.state.clear()
            optimizer.state.update({p: dict(entries) for p, entries in state.items()})
        set_rng_state(self.rng)
        for put_back in self.outside:
            put_back()


def parameters_of(capture: Capture) -> Iterator[torch.Tensor]:
    """Every parameter of the models and optimizers of a step, once."""
    modules, optimizers = capture.found.modules.values(), capture.found.optimizers.values()
    parameters = {id(p): p for module in modules for p in module.parameters()}
    parameters |= {id(p): p for opt in optimizers for group in opt.param_groups for p in group["params"]}
    yield from parameters.values()


def observe(capture: Capture, call: Call, returned: Any, outside: Iterable[Outside] = ()) -> dict[str, Any]:
    """Copies of all that a step leaves behind, by name."""
    seen: dict[str, Any] = {}
    for slot in capture.graph.slots.values():
        value = capture.bindings[slot.id].read(call.leaves)
        seen[slot.id] = value
        if slot.kind in (SlotKind.PARAM, SlotKind.BATCH) and (value.requires_grad or value.grad is not None):
            seen[f"grad.{slot.name}"] = value.grad
    seen |= _module_values(capture) | _optimizer_values(capture)
    leaves, _ = tree.flatten(returned)
    seen |= dict(zip(tree.paths(returned, "returned"), leaves, strict=True))
    for index, state in enumerate((torch.get_rng_state(), *rng_state()[1])):
        seen["rng" if index == 0 else f"rng of cuda:{index - 1}"] = state
    for other in (PythonGenerators(), *outside):
        seen |= other.look()
    return {name: _copied(value) for name, value in seen.items()}


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.copy(value)


def _module_values(capture: Capture) -> dict[str, Any]:
    """Parameters and buffers that the graph has nothing to do with must not change either."""
    seen: dict[str, Any] = {}
    for name, module in capture.found.modules.items():
        prefix = capture.found.prefix_of(name)
        for path, parameter in module.named_parameters():
            seen[f"param.{prefix}{path}"] = parameter
            seen[f"grad.{prefix}{path}"] = parameter.grad
        seen |= {f"buffer.{prefix}{path}": buffer for path, buffer in module.named_buffers()}
    return seen


def _optimizer_values(capture: Capture) -> dict[str, Any]:
    """State as the optimizer has it: entries may come and go."""
    bound = {slot.name: capture.bindings[slot.id] for slot in capture.graph.slots_of_kind(SlotKind.PARAM)}
    names = {id(where.tensor): name for name, where in bound.items() if isinstance(where, FixedTensor)}
    several = len(capture.found.optimizers) > 1
    seen: dict[str, Any] = {}
    for name, optimizer in capture.found.optimizers.items():
        for index, (parameter, entries) in enumerate(optimizer.state.items()):
            owner = names.get(id(parameter), f"{name}[{index}]")
            prefix = f"state.{owner}.{name}" if several else f"state.{owner}"
            for key, value in entries.items():
                seen |= dict(values_in(f"{prefix}.{key}", value))
    return seen


def rng_state() -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The state of the CPU generator and of each CUDA device in use."""
    return torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []


def set_rng_state(state: tuple[torch.Tensor, list[torch.Tensor]]) -> None:
    """Undo whatever was drawn since `rng_state`."""
    torch.set_rng_state(state[0])
    if state[1]:
        torch.cuda.set_rng_state_all(state[1])
