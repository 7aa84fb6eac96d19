"""`verify=N`: the step is run both ways from the same state, and every difference has a name."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from wholestep import _torch
from wholestep.capture import Capture, tree
from wholestep.capture.binding import FixedTensor
from wholestep.errors import VerificationError
from wholestep.runtime.guards import Call
from wholestep.runtime.specialization import Specialization

_MAX_NAMED = 8


@dataclass
class _World:
    """Everything a step can change, copied: parameters, buffers, gradients, optimizer state, arguments, RNG."""

    tensors: list[tuple[torch.Tensor, torch.Tensor]]
    grads: list[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]]
    buffers: list[tuple[dict[str, Any], dict[str, Any]]]
    states: list[tuple[Any, dict[torch.Tensor, dict[str, Any]]]]
    rng: Any

    @staticmethod
    def copy_of(capture: Capture, call: Call) -> _World:
        modules, optimizers = capture.found.modules.values(), capture.found.optimizers.values()
        submodules = [submodule for module in modules for submodule in module.modules()]
        parameters = {id(p): p for module in modules for p in module.parameters()}
        parameters |= {id(p): p for opt in optimizers for group in opt.param_groups for p in group["params"]}
        held = list(parameters.values())
        owners = [*held, *(leaf for leaf in call.leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad)]
        held += [b for module in submodules for b in _torch.own_buffers(module).values() if b is not None]
        held += [leaf for leaf in call.leaves if isinstance(leaf, torch.Tensor)]
        held += [where.tensor for where in capture.bindings.values() if isinstance(where, FixedTensor)]
        held += [v for opt in optimizers for s in opt.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
        return _World(
            tensors=[(tensor, tensor.detach().clone()) for tensor in held],
            grads=[(p, p.grad, None if p.grad is None else p.grad.detach().clone()) for p in owners],
            buffers=[(_torch.own_buffers(module), dict(_torch.own_buffers(module))) for module in submodules],
            states=[(opt, {p: dict(entries) for p, entries in opt.state.items()}) for opt in optimizers],
            rng=rng_state(),
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
        for own, entries in self.buffers:
            own.clear()
            own.update(entries)
        for optimizer, state in self.states:
            optimizer.state.clear()
            optimizer.state.update({p: dict(entries) for p, entries in state.items()})
        set_rng_state(self.rng)


def checked_run(
    chosen: Specialization, call: Call, number: int, average_gradients: Callable[[], None] | None = None
) -> Any:
    """Run a step in eager and through its graph from the same state; raise `VerificationError` if they differ.

    `average_gradients` is what eager does behind each backward where several ranks train together.
    The state afterwards is the graph's. If they differ, the state is put back to what it was before the call.
    """
    capture = chosen.capture
    world = _World.copy_of(capture, call)
    try:
        with _behind_backward(average_gradients):
            returned = call.function(*call.args, **call.kwargs)
        expected = _observe(capture, call, returned)
        world.restore()
        result = chosen.run(call)
        chosen.rotation.pending.settle()
        differences = compare(expected, _observe(capture, call, result))
    except BaseException:
        _undo(world, chosen)
        raise
    if differences:
        _undo(world, chosen)
        worst = sorted(differences.items(), key=lambda item: -item[1])[:_MAX_NAMED]
        listed = ", ".join(f"{name} by {difference:.3g}" for name, difference in worst)
        raise VerificationError(
            f"step {number} differs from eager in {len(differences)} values: {listed}; the state before the step has "
            "been restored. Please report this; running without wholestep.compile is safe meanwhile",
            differences,
        )
    return result


@contextlib.contextmanager
def _behind_backward(average_gradients: Callable[[], None] | None) -> Generator[None]:
    """Call something each time eager code has run a backward."""
    if average_gradients is None:
        yield
        return
    original = torch.autograd.backward

    def backward(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        with torch.no_grad():
            average_gradients()

    with mock.patch.object(torch.autograd, "backward", backward):
        yield


def _undo(world: _World, chosen: Specialization) -> None:
    """Put everything back to before the call, which may have been the one that created the optimizer's state."""
    world.restore()
    if chosen.num_runs <= 1:
        chosen.remove_initial_state()


def compare(expected: dict[str, Any], found: dict[str, Any]) -> dict[str, float]:
    """Names whose values differ beyond the dtype's default tolerance, with the largest difference."""
    differences: dict[str, float] = {}
    for name in {**expected, **found}:
        if name not in expected or name not in found:
            differences[name] = float("inf")
            continue
        old, new = expected[name], found[name]
        if not isinstance(old, torch.Tensor) or not isinstance(new, torch.Tensor):
            if old != new and not (old != old and new != new):  # NaN is equal to NaN
                differences[name] = float("inf")
            continue
        try:
            torch.testing.assert_close(new, old, equal_nan=True)
        except AssertionError:
            differences[name] = _largest_difference(old, new)
    return differences


def _largest_difference(old: torch.Tensor, new: torch.Tensor) -> float:
    if old.shape != new.shape or old.dtype != new.dtype:
        return float("inf")
    return float((old.double() - new.double()).abs().nan_to_num(float("inf")).max())


def _observe(capture: Capture, call: Call, returned: Any) -> dict[str, Any]:
    """Copies of all that a step leaves behind, by name."""
    seen: dict[str, Any] = {}
    for slot in capture.graph.slots.values():
        value = capture.bindings[slot.id].read(call.leaves)
        seen[slot.id] = value
        if slot.kind == "param":
            seen[f"grad.{slot.name}"] = value.grad
    leaves, _ = tree.flatten(returned)
    seen |= dict(zip(tree.paths(returned, "returned"), leaves, strict=True))
    seen["rng"] = torch.get_rng_state()
    return {
        name: value.detach().clone() if isinstance(value, torch.Tensor) else copy.copy(value)
        for name, value in seen.items()
    }


def rng_state() -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The state of the CPU generator and of each CUDA device in use."""
    return torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []


def set_rng_state(state: tuple[torch.Tensor, list[torch.Tensor]]) -> None:
    """Undo whatever was drawn since `rng_state`."""
    torch.set_rng_state(state[0])
    if state[1]:
        torch.cuda.set_rng_state_all(state[1])
