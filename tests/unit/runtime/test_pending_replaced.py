"""What has a waiting update is replaced by another tensor between two calls: nobody reads it, so nobody is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.waiting import Pair, X, is_anything_waiting, is_pending, train_step
from torch import Tensor, nn
from torch.optim import Optimizer

import wholestep

pytestmark = pytest.mark.usefixtures("nothing_waits")

Replace = Callable[[nn.Module, Optimizer], Any]


def _first(optimizer: Optimizer) -> Any:
    return optimizer.param_groups[0]["params"][0]


def _plain_tensors(optimizer: Optimizer) -> dict[str, Any]:
    """State for the first parameter that was never held, made without a look at what is there."""
    keys = [*optimizer.state[_first(optimizer)]]
    return {key: torch.tensor(2.0) if key == "step" else torch.full((5, 4), 0.25) for key in keys}


def _entries(_: nn.Module, optimizer: Optimizer) -> None:
    own = optimizer.state[_first(optimizer)]
    for key, value in _plain_tensors(optimizer).items():
        own[key] = value


def _state_of_one(_: nn.Module, optimizer: Optimizer) -> None:
    optimizer.state[_first(optimizer)] = _plain_tensors(optimizer)


def _updated(_: nn.Module, optimizer: Optimizer) -> None:
    optimizer.state[_first(optimizer)].update(_plain_tensors(optimizer))


def _whole_state(_: nn.Module, optimizer: Optimizer) -> None:
    state = type(optimizer.state)(dict)
    state.update(optimizer.state)
    state[_first(optimizer)] = _plain_tensors(optimizer)
    optimizer.state = state


STATE: dict[str, Replace] = {
    "entries": _entries,
    "the state of a parameter": _state_of_one,
    "update": _updated,
    "the state": _whole_state,
}


def _replace_again_and_again(pair: Pair, replace: Replace) -> None:
    pair.steps(3)
    for number in (1, 2, 3):
        assert is_pending(pair.ours)
        for side in pair.sides:
            replace(side.model, side.optimizer)
        assert is_anything_waiting(), "nobody has read anything"
        pair.steps(number)
        assert is_pending(pair.ours), "what stands there now waits as well"
        pair.assert_same()
        pair.step()
    assert pair.compiled.num_captures == 1


@pytest.mark.parametrize("name", STATE)
@pytest.mark.parametrize("optimizer", ["momentum", "adamw", "adamw fused"])
def test_optimizer_state_is_replaced(optimizer: str, name: str) -> None:
    _replace_again_and_again(Pair(optimizer), STATE[name])


def test_a_step_counter_is_reset() -> None:
    def reset(_: nn.Module, optimizer: Optimizer) -> None:
        for state in optimizer.state.values():
            state["step"] = torch.tensor(0.0)

    _replace_again_and_again(Pair("adamw"), reset)


def _square_step(model: nn.Module, optimizer: Optimizer) -> Tensor:
    optimizer.zero_grad()
    loss = model(X).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def test_state_changes_places() -> None:
    """The same tensors, each at the parameter of the other one."""
    seen: list[list[Tensor]] = []
    for step in (_square_step, wholestep.compile(_square_step, cross_iteration="all")):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        parameters = list(model.parameters())
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        for _ in range(3):
            step(model, optimizer)
        first, _, second, _ = (optimizer.state[parameter] for parameter in parameters)
        buffers = first["momentum_buffer"], second["momentum_buffer"]
        second["momentum_buffer"], first["momentum_buffer"] = buffers
        for _ in range(3):
            step(model, optimizer)
        seen.append([tensor.detach().clone() for tensor in (*parameters, *buffers)])
    assert all(map(torch.equal, *seen))


def _averaging(model: Any, optimizer: Optimizer, x: Tensor, words: Tensor) -> Tensor:
    loss = train_step(model, optimizer, x, words)
    with torch.no_grad():
        model.mean.mul_(0.5).add_(model.last.weight)
    return loss


def _rebinding(model: Any, optimizer: Optimizer, x: Tensor, words: Tensor) -> Tensor:
    loss = train_step(model, optimizer, x, words)
    model.mean = model.mean * 0.5 + model.last.weight.detach()
    return loss


def _set_attribute(model: Any, _: Optimizer) -> None:
    model.mean = torch.ones(3, 5)


def _set_item(model: nn.Module, _: Optimizer) -> None:
    model._buffers["mean"] = torch.ones(3, 5)


def _register(model: nn.Module, _: Optimizer) -> None:
    model.register_buffer("mean", torch.ones(3, 5))


@pytest.mark.parametrize("replace", [_set_attribute, _set_item, _register])
@pytest.mark.parametrize("step", [_averaging, _rebinding])
def test_a_buffer_is_replaced(step: Callable[..., Tensor], replace: Replace) -> None:
    pair = Pair("sgd", step)
    for side in pair.sides:
        side.model.register_buffer("mean", torch.zeros(3, 5))
    _replace_again_and_again(pair, replace)
    pair.both(lambda model, _: model.mean)


def test_what_was_replaced_has_its_update() -> None:
    """Whoever has kept it finds there what the calls before have made of it."""
    pair = Pair("momentum")
    pair.steps(3)
    kept = [side.optimizer.state[side.parameters[0]]["momentum_buffer"] for side in pair.sides]
    for side in pair.sides:
        _entries(side.model, side.optimizer)
    pair.steps(2)
    assert torch.equal(*kept)
    pair.assert_same()


def test_what_is_written_beside_it_ends_no_loop() -> None:
    """A write to a dict that leaves the tensors where they are."""
    pair = Pair("momentum")
    pair.steps(3)
    for side in pair.sides:
        state = side.optimizer.state[side.parameters[0]]
        state["momentum_buffer"] = state["momentum_buffer"]
    waiting = pair.compiled._current.rotation.pending
    grip = waiting._grip
    pair.steps(2)
    assert waiting._grip is grip
    pair.assert_same()
