"""Optimizer state that does not exist yet: created before the first step, exactly as the optimizer would.

An optimizer creates its state inside the first `step()`. Captured like that, the first step would be a graph of its
own. For torch's own optimizers the state is therefore created beforehand (zeros, counters) and is an input of the graph
from the first call on. Where the first step is really different (SGD with dampening, optimizers we do not know), the
first call is captured as it is, and the second call captures the steady step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import SGD, Optimizer

from wholestep import _torch
from wholestep.capture import source
from wholestep.capture.blank import is_blank
from wholestep.capture.record.again import LooksAtState
from wholestep.errors import CaptureError
from wholestep.graph import StepGraph

if TYPE_CHECKING:
    from wholestep.capture.discover import Reachable
    from wholestep.capture.session import Session

State = dict[torch.Tensor, dict[str, Any]]


def initial_state(optimizer: Optimizer) -> State:
    """State for each parameter that may get an update and has none yet; the optimizer itself is left as it is.

    Empty for an optimizer whose first step cannot be told apart from its later ones.
    """
    if not _torch.has_init_group(optimizer):
        return {}
    members = [p for group in optimizer.param_groups for p in group["params"]]
    fresh = [p for p in members if (p.requires_grad or p.grad is not None) and not optimizer.state[p]]
    for p in [p for p in optimizer.state if not optimizer.state[p]]:
        del optimizer.state[p]
    if not fresh:
        return {}
    fresh_ids = {id(p) for p in fresh}
    if isinstance(optimizer, SGD):
        return _momentum_buffers(optimizer, fresh_ids)
    created = _run_init_groups(optimizer, fresh_ids)
    return {p: created[p] for p in fresh if created.get(p)}


def state_before(
    optimizers: Mapping[str, Optimizer], as_it_is: Collection[int] = ()
) -> tuple[dict[str, State], set[int]]:
    """The state that the first run starts from, by optimizer; and ids of those that make theirs of learning rates.

    It is what there is for those `as_it_is`, by id: the step sees what state they have.
    """
    states, made_of_rates = dict[str, State](), set[int]()
    for name, optimizer in optimizers.items():
        made = initial_state(optimizer) if id(optimizer) not in as_it_is else {}
        states[name] = {**made, **optimizer.state}
        if made and _makes_of_rates(optimizer):
            made_of_rates.add(id(optimizer))
    return states, made_of_rates


def require_as_it_is(found: Reachable, states: Mapping[str, State], read: Collection[int]) -> None:
    """Raise `LooksAtState` if the step has looked at state that was made beforehand, and which eager does not show."""
    for name, optimizer in found.optimizers.items():
        owners = {id(optimizer), *map(id, found.wrappers.get(name, []))}
        if not owners.isdisjoint(read) and any(parameter not in optimizer.state for parameter in states[name]):
            raise LooksAtState(frozenset(owners))


def fresh_state(
    optimizers: Mapping[str, Optimizer], states: Mapping[str, State], session: Session, graph: StepGraph
) -> list[tuple[Optimizer, torch.Tensor, dict[str, Any]]]:
    """The state made beforehand of the parameters that the step really updates."""
    made = [
        (optimizer, parameter, entries)
        for name, optimizer in optimizers.items()
        for parameter, entries in states[name].items()
        if parameter not in optimizer.state
    ]
    kept = [one for one in made if (id(one[0]), id(session.twins[id(one[1])])) in session.touched]
    installed = {id(value) for _, _, entries in kept for value in entries.values()}
    for optimizer, _, entries in made:
        unmade = {id(value) for value in entries.values()} - installed
        used = [one.slot.id for one in session.lifted.values() if id(one.real) in unmade]
        if any(slot_id in graph.placeholders() for slot_id in used):
            raise CaptureError(
                f"the step updates with the state of {type(optimizer).__name__}, but not by its step()",
                advice="Let what wraps it call step() of the optimizer inside, or give it a state of its own",
            )
    return kept


def _makes_of_rates(optimizer: Optimizer) -> bool:
    """Whether what a parameter's state begins with depends on the learning rate (`Rprop`, `ASGD`).

    Nobody can tell where tensors have no memory; such a step is planned and does not run.
    """
    if isinstance(optimizer, SGD) or any(is_blank(p) for group in optimizer.param_groups for p in group["params"]):
        return False
    return any(
        _example(optimizer, group, 1.0) != _example(optimizer, group, 2.0)
        for group in optimizer.param_groups
        if "lr" in group
    )


def _example(optimizer: Optimizer, group: dict[str, Any], rate: float) -> dict[str, Any]:
    """The state of a parameter of one element, at some learning rate."""
    dtype = next((p.dtype for p in group["params"]), torch.float32)
    one = torch.nn.Parameter(torch.zeros(1, dtype=dtype, device="cpu"))
    one.grad = torch.zeros_like(one)
    kept, optimizer.state = optimizer.state, defaultdict(dict)
    try:
        _torch.init_optimizer_group(optimizer, {**group, "params": [one], "lr": rate})
        state = optimizer.state[one]
    finally:
        optimizer.state = kept
    return {key: value.tolist() if isinstance(value, torch.Tensor) else value for key, value in state.items()}


def rates_of(optimizer: Optimizer) -> list[Any]:
    return [group.get("lr") for group in optimizer.param_groups]


def refuse_other_rates(optimizer: Optimizer, before: list[Any]) -> None:
    """Refuse an update at rates that the step has set itself, where state was made of those of `before`."""
    if any(rate is not known for rate, known in zip(rates_of(optimizer), before, strict=False)):
        raise CaptureError(
            f"the step sets the learning rate of {type(optimizer).__name__}, which makes its state of that in its "
            "first step()",
            location=source.current_location(),
            advice="Set it before the call, or at the end of the step",
        )


def defaults() -> tuple[Any, ...]:
    """Dtype and device of tensors that are made here without naming one."""
    return torch.get_default_dtype(), torch.get_default_device()


def refuse_other_defaults(optimizer: Optimizer, before: tuple[Any, ...]) -> None:
    """Refuse state that the step would make elsewhere than it was made beforehand, where defaults were as `before`."""
    if _torch.has_init_group(optimizer) and defaults() != before:
        raise CaptureError(
            f"{type(optimizer).__name__}.step() runs under a default dtype or device that the step itself sets",
            location=source.current_location(),
            advice="Set it around the call of the step, or around the forward alone",
        )


def _run_init_groups(optimizer: Optimizer, fresh: set[int]) -> State:
    """Call the optimizer's own initialisation with stand-in gradients, into a state dict of ours."""
    kept_state, kept_grads = optimizer.state, {}
    optimizer.state = defaultdict(dict)
    try:
        for group in optimizer.param_groups:
            members = [p for p in group["params"] if id(p) in fresh]
            for p in members:
                kept_grads[p] = p.grad
                p.grad = torch.zeros((), dtype=p.dtype, device=p.device).expand_as(p)
            _torch.init_optimizer_group(optimizer, {**group, "params": members})
        return dict(optimizer.state)
    finally:
        optimizer.state = kept_state
        for p, grad in kept_grads.items():
            p.grad = grad


def _momentum_buffers(optimizer: SGD, fresh: set[int]) -> State:
    """Zeros: `momentum * 0 + grad` is the copy of the gradient that SGD starts with, unless it is dampened."""
    return {
        p: {"momentum_buffer": torch.zeros_like(p, memory_format=torch.preserve_format, requires_grad=False)}
        for group in optimizer.param_groups
        if group["momentum"] != 0 and group["dampening"] == 0
        for p in group["params"]
        if id(p) in fresh
    }
